"""Charts of a report: SVG whose text and axes take the page's colour."""

import contextlib
import dataclasses
import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np

from ..._table import elided
from ..chart import label_lines, load_matplotlib
from .facts import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#0a0b0c"
"""The colour of text and axes, which becomes currentColor."""
_FILL = "#3987c9"
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_LABEL = 36
"""The longest label in characters."""
_LEVELS = 16
_SPAN = 6.0
"""The smallest range of the colours of an error map in dB, so that small differences look small."""
LINES = 40
"""Up to so many numbers of a format are lines through the histogram; more are ticks at its foot."""


@dataclasses.dataclass(frozen=True)
class QualityPoint:
    """One model in the chart of quality against size.

    Attributes:
        name: its label.
        bits_per_weight: its bits per weight.
        kl: its mean KL divergence.
        error: the standard error of that.
    """

    name: str
    bits_per_weight: float
    kl: float
    error: float


@dataclasses.dataclass(frozen=True)
class LayerMap:
    """A number for each kind of weight and each layer.

    Attributes:
        kinds: the kinds of weights, a row each.
        layers: the numbers of the layers, a column each.
        values: the number of each kind and layer; None where there is none.
    """

    kinds: tuple[str, ...]
    layers: tuple[int, ...]
    values: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, values: Mapping[tuple[str, int], float]) -> Self:
        """The map of numbers by kind and layer; kinds without what they all begin with."""
        kinds = tuple(dict.fromkeys(kind for kind, _ in values))
        layers = tuple(sorted({layer for _, layer in values}))
        grid = tuple(tuple(values.get((kind, layer)) for layer in layers) for kind in kinds)
        parts = [kind.partition("*") for kind in kinds]
        if all(star for _, star, _ in parts) and len({head for head, _, _ in parts}) == 1:
            kinds = tuple(rest.lstrip("/.") for _, _, rest in parts)
        return cls(kinds, layers, grid)

    @property
    def finite(self) -> list[float]:
        """The finite numbers."""
        return [value for row in self.values for value in row if value is not None and math.isfinite(value)]


def quality_chart(points: Sequence[QualityPoint], *, prefix: str, title: str) -> str:
    """KL divergence over bits per weight.

    Args:
        points: the models.
        prefix: what the SVG's ids begin with, unique in the page.
        title: the text alternative.

    Returns:
        An `<svg>` element; the same points give the same text.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.4, 3.4), layout="constrained")
        axes = figure.add_subplot()
        places = [(point.bits_per_weight, point.kl) for point in points]
        errors = np.nan_to_num([point.error for point in points], posinf=0.0)
        axes.errorbar(*zip(*places, strict=True), yerr=errors, fmt="o", color=_FILL, ecolor=_INK, capsize=3)
        for point, place, lower in zip(points, places, label_lines(places, also=[0.0]), strict=True):
            offset = (7, 5 - 13 * lower)
            axes.annotate(_label(point.name), place, xytext=offset, textcoords="offset points", parse_math=False)
        axes.set_xlabel("bits per weight")
        axes.set_ylabel("KL divergence, nats (lower is better)")
        axes.margins(x=0.25, y=0.18)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.grid(alpha=0.2, color=_INK, linewidth=0.6)
        return _svg(figure, prefix, title)


def layer_map_chart(found: LayerMap, *, prefix: str, title: str, label: str, is_logarithmic: bool = False) -> str:
    """The numbers of a map as colours and text.

    Args:
        found: the map; some of its numbers are finite.
        prefix: what the SVG's ids begin with, unique in the page.
        title: the text alternative.
        label: what the numbers are, next to the colours.
        is_logarithmic: whether the colours are on a logarithmic scale; then all numbers are positive.

    Returns:
        An `<svg>` element; the same map gives the same text.
    """
    with _style() as matplotlib:
        from matplotlib.colors import LogNorm, Normalize
        from matplotlib.figure import Figure

        rows, columns = len(found.kinds), len(found.layers)
        figure = Figure(figsize=(2.9 + 0.29 * columns, 0.95 + 0.29 * rows), layout="constrained")
        axes = figure.add_subplot()
        colours = matplotlib.colormaps["viridis"].resampled(_LEVELS)
        low, high = min(found.finite), max(found.finite)
        if is_logarithmic:
            norm = LogNorm(low, max(high, 2 * low))
        else:
            spare = max(_SPAN - (high - low), 0.0) / 2
            norm = Normalize(low - spare, high + spare)
        values = np.array(found.values, np.float64)  # None becomes NaN
        mesh = axes.pcolormesh(np.where(np.isfinite(values), values, math.nan), cmap=colours, norm=norm)
        fills = mesh.to_rgba(values)
        for i, row in enumerate(found.values):
            for j, value in enumerate(row):
                if value is None:
                    continue
                text, ink = f"{value:.1f}".replace("inf", "∞"), _INK
                if value == math.inf:
                    text = "="
                elif math.isfinite(value):
                    ink = ink_on(fills[i, j, :3])
                    text = f"{value:.{int(value < 100)}f}"
                axes.text(j + 0.5, i + 0.5, text, color=ink, fontsize=7, ha="center", va="center")
        axes.invert_yaxis()
        axes.set_yticks([i + 0.5 for i in range(rows)], [_label(kind) for kind in found.kinds], parse_math=False)
        axes.set_xticks([j + 0.5 for j in range(columns)], [str(layer) for layer in found.layers])
        axes.tick_params(length=0, labelsize=8)
        axes.set_xlabel("layer")
        axes.spines[:].set_visible(False)
        figure.colorbar(mesh, ax=axes, label=label, pad=0.02, fraction=0.5 / (2.9 + 0.29 * columns))
        return _svg(figure, prefix, title)


def histogram_chart(histogram: Histogram, *, prefix: str, title: str) -> str:
    """A histogram with the numbers of the format as vertical lines.

    Args:
        histogram: the histogram.
        prefix: what the SVG's ids begin with, unique in the page.
        title: the text alternative.

    Returns:
        An `<svg>` element; the same histogram gives the same text.
    """
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.9, 1.9), layout="constrained")
        axes = figure.add_subplot()
        bins = len(histogram.counts)
        width = (histogram.high - histogram.low) / bins
        edges = [histogram.low + i * width for i in range(bins + 1)]
        axes.stairs(histogram.counts, edges, fill=True, color=_FILL, alpha=0.8)
        top, line = 1.0, 0.8
        if len(histogram.numbers) > LINES:
            top, line = 0.08, 0.5
        axes.vlines(histogram.numbers, 0, top, transform=axes.get_xaxis_transform(), color=_INK, linewidth=line)
        axes.set_xlim(histogram.low, histogram.high)
        axes.set_yticks([])
        axes.set_xlabel("weight / block scale")
        axes.spines[["left", "right", "top"]].set_visible(False)
        return _svg(figure, prefix, title)


def ink_on(fill: Sequence[float] | np.ndarray) -> str:
    """Black or white, whichever has the larger contrast to a colour.

    Args:
        fill: red, green and blue, 0 to 1.

    Returns:
        `#000000` or `#ffffff`.

    >>> ink_on((0.99, 0.9, 0.14)), ink_on((0.27, 0.0, 0.33))
    ('#000000', '#ffffff')
    """
    red, green, blue = (_linear(float(channel)) for channel in fill)
    if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179:
        return "#000000"
    return "#ffffff"


def _linear(channel: float) -> float:
    """The linear light of an sRGB channel."""
    if channel <= 0.04045:
        return channel / 12.92
    return ((channel + 0.055) / 1.055) ** 2.4


def _label(name: str) -> str:
    """A name that every font has, elided in the middle."""
    return elided(name.encode("ascii", "backslashreplace").decode(), _LABEL)


@contextlib.contextmanager
def _style() -> Iterator[ModuleType]:
    """matplotlib, with text kept as text, reproducible ids, and the colour that `_svg` replaces."""
    matplotlib = load_matplotlib()
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "fewbit", "font.size": 9, **dict.fromkeys(inked, _INK)}
    with matplotlib.rc_context(settings):
        yield matplotlib


def _svg(figure: "Figure", prefix: str, title: str) -> str:
    """The figure as an `<svg>` element for a page.

    It has no header, metadata or style, but ids of its own and the page's colour.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_METADATA, transparent=True)
    text = buffer.getvalue()
    head, body = text[text.index("<svg") :].split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'( id="|xlink:href="#|url\(#)', rf"\g<1>{prefix}-", body).replace(_INK, "currentColor")
    width, height = (round(96 * inches) for inches in figure.get_size_inches())
    return (
        f'<svg viewBox="{box[1]}" width="{width}" height="{height}" role="img" aria-labelledby="{prefix}-title">\n'
        f'<title id="{prefix}-title">{html.escape(title)}</title>{body.strip()}'
    )

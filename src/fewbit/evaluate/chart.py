"""Plots perplexity against model size."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ..errors import QuantError, UnsupportedError

_METADATA = {".svg": {"Date": None}, ".png": {"Software": None}}
"""The metadata of each file type that would differ between runs, left out."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One model in the chart.

    Attributes:
        name: its label.
        nbytes: its bytes.
        perplexity: its perplexity.
        error: the standard error of the difference from the float model's perplexity; the perplexity's own error is mostly
            the spread of the text, the same for all.
    """

    name: str
    nbytes: int
    perplexity: float
    error: float


def save_chart(path: str | os.PathLike[str], points: Sequence[Point], *, reference: float, title: str) -> Path:
    """Writes a chart of perplexity over size as SVG or PNG, deterministically.

    Args:
        path: the file to write, `.svg` or `.png`.
        points: the models.
        reference: the perplexity of the float model, drawn as a dashed line.
        title: the title of the chart.

    Returns:
        The path.

    Raises:
        QuantError: when there are no points, the suffix is another one, or the directory does not exist.
        UnsupportedError: when matplotlib is not installed.
    """
    path = Path(path)
    check_chart_path(path)
    if not points:
        raise QuantError("a chart needs at least one point")
    matplotlib = load_matplotlib()
    # Text stays text in the SVG, and its ids are reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewbit"}):
        figure = _figure(points, reference, title)
        figure.savefig(path, metadata=_METADATA[path.suffix])
    return path


def check_chart_path(path: str | os.PathLike[str]) -> None:
    """Checks a chart's path early, before the models are evaluated.

    Raises:
        QuantError: when the path ends in neither .svg nor .png, or its directory does not exist.
        UnsupportedError: when matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in _METADATA:
        raise QuantError(f"chart {path} must end in {' or '.join(_METADATA)}")
    if not path.absolute().parent.is_dir():
        raise QuantError(f"chart {path} cannot be written: the directory {path.parent} does not exist")
    load_matplotlib()


def _figure(points: Sequence[Point], reference: float, title: str):  # noqa: ANN202 - a matplotlib Figure, which is an extra
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    axes.axhline(reference, linestyle="--", color="0.4", linewidth=1, label=f"float model, {reference:.2f}")
    sizes = [point.nbytes / 1e6 for point in points]
    values, errors = [point.perplexity for point in points], [point.error for point in points]
    axes.errorbar(sizes, values, yerr=errors, fmt="o", color="C0", capsize=3)
    places = [(point.nbytes / 1e6, point.perplexity) for point in points]
    for point, place, lower in zip(points, places, label_lines(places, also=[reference]), strict=True):
        axes.annotate(point.name, place, xytext=(6, 6 - 14 * lower), textcoords="offset points")
    axes.set_xlabel("size of all parameters, MB")
    axes.set_ylabel("perplexity (lower is better)")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.15, y=0.15)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", frameon=False)
    return figure


def label_lines(places: Sequence[tuple[float, float]], *, also: Sequence[float] = ()) -> list[int]:
    """The number of lines to lower each point's label by. A lowered label does not overlap earlier ones.

    Args:
        places: the points.
        also: other heights in the chart.

    Returns:
        A number of lines for each point.
    """
    xs, ys = [x for x, _ in places], [*also, *(y for _, y in places)]
    width, height = max(xs) - min(xs), max(ys) - min(ys)

    def is_near(a: tuple[float, float], b: tuple[float, float]) -> bool:
        return abs(a[0] - b[0]) <= 0.1 * width and abs(a[1] - b[1]) <= 0.04 * height

    return [sum(is_near(place, earlier) for earlier in places[:i]) for i, place in enumerate(places)]


def load_matplotlib() -> ModuleType:
    """Imports matplotlib.

    Raises:
        UnsupportedError: when it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UnsupportedError('matplotlib is not installed; pip install "fewbit[plot]" brings it') from error
    return matplotlib

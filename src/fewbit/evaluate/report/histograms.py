"""The report's weight histograms: the worst weights, and one to choose."""

import base64
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from .charts import LINES, histogram_chart
from .facts import Histogram, ModelFacts
from .markup import box, decibels_in_words

_CHOOSER = """\
<div id="chooser" hidden>
<h3>Any quantized weight</h3>
<div class="find">
<label for="weight-search">Search: words of a path or scheme<input id="weight-search" type="search"></label>
<label for="weight">Weight<select id="weight"></select></label>
</div>
<p class="dim" id="weights-found" role="status"></p>
<figure id="chosen" tabindex="-1">
<figcaption><span id="chosen-caption" role="status"></span></figcaption>
<svg id="chosen-chart" role="img" aria-labelledby="chosen-caption"></svg>
</figure>
</div>
"""
"""What the page's script fills and shows."""


def histogram_section(models: Sequence[ModelFacts], names: Sequence[str]) -> str:
    """The chooser of a weight, and the histograms of each model's worst weights.

    Args:
        models: the models.
        names: their names.
    """
    text = (
        '<p class="dim">Each source weight is divided by the scale of its block; the lines are the numbers of the format, to which '
        "weights are rounded. Clipped are weights more than half a step beyond the last line.</p>\n" + _CHOOSER
    )
    for i, (name, model) in enumerate(zip(names, models, strict=True)):
        text += f"<h3>Lowest SQNR, {escape(name)}</h3>\n"
        figures = [_figure(one, f"histogram-{i}-{j}") for j, one in enumerate(model.worst)]
        if figures:
            text += f'<div class="histograms">\n{"".join(figures)}</div>\n'
        else:
            text += "<p>No quantized weight lost anything that was measured.</p>\n"
    return text


def histogram_data(models: Sequence[ModelFacts], names: Sequence[str]) -> str:
    """The histograms of all models as JSON for the page's script.

    Args:
        models: the models.
        names: their names.

    Returns:
        `grids` has the numbers of each format once; one of more than `lines` numbers is drawn as ticks. `weights` has for
        each histogram the index of its model, path, scheme, details, the index of its grid, both edges and the heights, one byte a
        bin in base64: 255 is the largest count, and any count above 0 is at least 1. No character ends or opens an element of HTML.
    """
    grids = {numbers: i for i, numbers in enumerate(dict.fromkeys(h.numbers for model in models for h in model.histograms))}
    weights = [
        [i, h.path, h.stored, _details(h), grids[h.numbers], _short(h.low), _short(h.high), _heights(h.counts)]
        for i, model in enumerate(models)
        for h in model.histograms
    ]
    form: dict[str, Any] = {"models": list(names), "lines": LINES}
    form |= {"grids": [[_short(number) for number in numbers] for numbers in grids], "weights": weights}
    return json.dumps(form, separators=(",", ":")).replace("<", "\\u003c")


def _short(number: float) -> float:
    """A number to six digits, which place it within a thousandth of a pixel."""
    return float(f"{number:.6g}")


def _heights(counts: Sequence[int]) -> str:
    largest = max(max(counts), 1)
    return base64.b64encode(bytes(max(round(255 * count / largest), min(count, 1)) for count in counts)).decode()


def _details(histogram: Histogram) -> str:
    """The SQNR, the largest magnitude, the grid and the clipped fraction."""
    return (
        f"{decibels_in_words(histogram.sqnr_db)}, largest magnitude {histogram.amax:.4g}, "
        f"{len(histogram.numbers)} numbers of {histogram.format}, {100 * histogram.clipped:.2g} % clipped"
    )


def _figure(histogram: Histogram, prefix: str) -> str:
    """A figure with its caption."""
    caption = f"{histogram.stored}, {_details(histogram)}"
    title = f"Histogram of {histogram.path} in units of its block scale: {caption}"
    chart = box(histogram_chart(histogram, prefix=prefix, title=title), f"Histogram of {histogram.path}", "chart")
    return f"<figure><h4>{escape(histogram.path)}</h4>\n{chart}<figcaption>{escape(caption)}</figcaption></figure>\n"

"""The sections about activations: outliers, tokens of experts."""

import re
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from .charts import LayerMap, layer_map_chart
from .facts import InputFacts, Report
from .markup import box, cell, number, row, table

_WORST = 10
"""The number of products in the table of outliers."""
_UNSEEN = 16
"""The number of experts without tokens that are named in a layer."""
UNSEEN_EXPERTS = {
    "nearest": "their weights are rounded to nearest",
    "share": "they took the statistics of all tokens of the layer's other experts",
    "error": "there is none, or the run would have ended",
}
"""What `--unseen-experts` did."""


def input_section(report: Report) -> str:
    """A map of activation outliers, and a table of the worst.

    The map is by layer and product. Without measured inputs, the section says why there are none.

    Args:
        report: the facts.
    """
    found = report.inputs
    if found is None:
        return f"<p>Not measured: {escape(report.why_no_inputs)}.</p>\n"
    text = (
        f'<p class="dim">The inputs of the source\'s products on {found.tokens:,} tokens of {escape(found.text)}. Each number is the '
        "largest magnitude over the root mean square of all inputs: 4 to 6 for normal numbers. Where it is large, few channels "
        "or tokens decide the scale of a quantized activation, and errors of their weights count most.</p>\n"
    )
    values = {(re.sub(r"(?<=/)\d+(?=/)", "*", one.path), one.layer): one.peak for one in found.products if one.peak > 0}
    if not values:
        return text + "<p>All inputs are zero.</p>\n"
    title = "Largest magnitude over root mean square of the inputs of each product (rows) in each layer (columns)"
    label = "amax / RMS"
    chart = layer_map_chart(LayerMap.of(values), prefix="inputs-chart", title=title, label=label, is_logarithmic=True)
    worst = sorted(found.products, key=lambda one: -one.peak)[:_WORST]
    headings = ["inputs of", "#amax / RMS", "#amax", "#RMS", "#channel", "#of", "#largest / median channel"]
    rows = [_input_row(one) for one in worst]
    return text + box(chart, "Map of activation outliers", "chart") + table("Largest activation outliers", headings, rows)


def _input_row(one: InputFacts) -> str:
    numbers = (f"{one.peak:.1f}", f"{one.amax:.4g}", f"{one.rms:.4g}", str(one.channel), f"{one.channels:,}")
    head = f'<th scope="row" class="path">{escape(one.path)}</th>'
    return row([head, *map(number, numbers), number(f"{one.channel_ratio:.4g}")])


def expert_section(report: Report, names: Sequence[str]) -> str:
    """The tokens that the experts of each layer got, in the runs that quantized the models.

    Models whose methods learned nothing of experts have those of the source on the text of the activations. Empty for a model
    without experts.

    Args:
        report: the facts.
        names: of the models.
    """
    parts = []
    for model, name in zip(report.models, names, strict=True):
        if (found := model.experts) is not None:
            parts.append(
                f'<p class="dim">{escape(name)}: to how many of {found.tokens:,} tokens of {escape(found.text)}, from which its '
                f"method learned, the router sent each expert. Experts without tokens: {escape(UNSEEN_EXPERTS[found.unseen])} "
                f"(--unseen-experts {escape(found.unseen)}).</p>\n"
                + _expert_table(f"Tokens of experts, {name}", found.counts)
            )
    if not parts and report.inputs is not None and report.inputs.expert_tokens:
        parts.append(
            f'<p class="dim">To how many of {report.inputs.tokens:,} tokens of {escape(report.inputs.text)} the source\'s router sends '
            "each expert. A method that learns from activations knows nothing of an expert without tokens, and little of one with "
            "few: --unseen-experts says what it does.</p>\n"
            + _expert_table("Tokens of experts", report.inputs.expert_tokens)
        )
    return "".join(parts)


def _expert_table(title: str, tokens: Mapping[str, Sequence[int]]) -> str:
    rows = []
    for path, counts in tokens.items():
        unseen = [str(i) for i, count in enumerate(counts) if count == 0]
        listed = ", ".join(unseen[:_UNSEEN]) + ", ..." * (len(unseen) > _UNSEEN)
        numbers = (len(counts), min(counts), round(float(np.median(counts))), max(counts), len(unseen))
        head = f'<th scope="row" class="path">{escape(path)}</th>'
        rows.append(row([head, *(number(f"{n:,}") for n in numbers), cell(listed)]))
    headings = ["experts of", "#experts", "#fewest tokens", "#median", "#most", "#without any", "these"]
    return table(title, headings, rows)

"""Writes a report as one HTML page that loads nothing."""

import functools
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ...errors import QuantError
from ...io.atomic_directory import StagedDirectory
from ...io.output import OutputKind, check_output
from ...recipe.table import shape_text
from ..chart import load_matplotlib
from ..metrics import Estimate
from ..perplexity import Perplexity
from .charts import LayerMap, QualityPoint, layer_map_chart, quality_chart
from .facts import MeasuredQuality, ModelFacts, Report, StoredModel, TensorFacts
from .histograms import histogram_data, histogram_section
from .inputs import expert_section, input_section
from .markup import box, bullets, cell, decibels, decibels_in_words, number, row, table
from .template import MARKER, framed

_SECTIONS = {
    "summary": "Summary",
    "quality": "Quality against size",
    "errors": "Error of each weight",
    "histograms": "Weights and grids",
    "inputs": "Activation outliers",
    "experts": "Experts",
    "skipped": "What was skipped, and why",
    "tensors": "The plan, tensor by tensor",
}


def check_page_path(
    path: str | os.PathLike[str], *, overwrite: bool = False, sources: Iterable[str | os.PathLike[str]] = ()
) -> Path:
    """Checks early where a report is to be written.

    Args:
        path: the file.
        overwrite: whether a file that is no report may be replaced.
        sources: the files and directories of the models, which are never replaced.

    Returns:
        The path.

    Raises:
        QuantError: as `io.check_output`, for a file in a directory that does not exist, and without `overwrite` for an existing
            file that is no report. It may lie in a model's directory, and an earlier report is always replaced.
        UnsupportedError: when matplotlib is not installed.
    """
    is_new = not os.path.lexists(path)
    if is_new or _is_report(Path(path)):
        sources = ()  # it may lie in a model's directory
    kind = OutputKind(
        functools.partial(_foreign_files, overwrite=overwrite), "report.html", "is no report of fewbit", makes_parents=False
    )
    check_output(path, overwrite=True, sources=sources, kind=kind)
    load_matplotlib()
    return Path(path)


def _is_report(path: Path) -> bool:
    """True for a file that begins as a report of fewbit."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MARKER)) == MARKER.encode()


def _foreign_files(path: Path, overwrite: bool) -> list[str]:
    """Refuses a file that is no report, without `overwrite`."""
    if not (overwrite or _is_report(path)):
        raise QuantError("or pass overwrite=True, --overwrite")
    return []


def save_page(
    path: str | os.PathLike[str],
    report: Report,
    *,
    overwrite: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
) -> Path:
    """Writes the page of a report; the file appears whole or not at all.

    Args:
        path: the file to write.
        report: the facts.
        overwrite: as in `check_page_path`.
        sources: as in `check_page_path`.

    Returns:
        The path.

    Raises:
        QuantError: when `check_page_path` refuses the path, another process is writing it, or the disk is full.
        UnsupportedError: when matplotlib is not installed.
    """
    check = functools.partial(check_page_path, overwrite=overwrite, sources=tuple(sources))
    path = check(path)
    text = report_page(report).encode("utf-8", "backslashreplace")
    with StagedDirectory(path.absolute(), overwrite=True, check=check) as staged:
        staged.write_verified(path.name, text)
        staged.commit_file(path.name)
    return path


def report_page(report: Report) -> str:
    """The page of a report.

    Args:
        report: the facts.

    Returns:
        HTML with its styles, its charts and its script; the same facts give the same text.

    Raises:
        UnsupportedError: when matplotlib is not installed.
    """
    names = _labels([model.stored for model in report.models])
    title = f"{', '.join(names)}: a report"
    parts = {
        "summary": _summary(report, names),
        "quality": _quality(report, names),
        "errors": _errors(report.models, names),
        "histograms": histogram_section(report.models, names),
        "inputs": input_section(report),
        "experts": expert_section(report, names),
        "skipped": _skipped(report.models, names),
        "tensors": _tensors(report.models, names),
    }
    parts = {key: content for key, content in parts.items() if content}
    links = "".join(f'<li><a href="#{key}">{_SECTIONS[key]}</a></li>' for key in parts)
    sections = [
        f'<section aria-labelledby="{key}">\n<h2 id="{key}">{_SECTIONS[key]}</h2>\n{content}</section>\n'
        for key, content in parts.items()
    ]
    count = f"{len(names)} quantized model{'s' * (len(names) > 1)}"
    header = (
        f"<header>\n<h1>{count} of {escape(report.source.name)}</h1>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>'
    )
    return framed(escape(title), f"{header}\n<main>\n{''.join(sections)}</main>", histogram_data(report.models, names))


# --- the sections ---


def _summary(report: Report, names: Sequence[str]) -> str:
    """A row for the source and for each model."""
    headings = ["model", "#bits/weight", "#perplexity", "#KL, nats", "#same top-1", "#arrays, MB", "#disk, MB"]
    headings += ["container", "recipe", "method", "made from"]
    measured = [model.quality for model in report.models if model.quality is not None]
    quality = [number("")] * 3
    if measured:
        quality = [number(text) for text in (_perplexity(measured[0].comparison.reference), "0", "100 %")]
    rows = [_summary_row("source", report.source, quality, [cell("")] * 3)]
    for name, model in zip(names, report.models, strict=True):
        quality = [number("not measured")] * 3
        if model.quality is not None:
            both = model.quality.comparison
            quality = [number(text) for text in (_perplexity(both.candidate), str(both.kl.mean), _percent(both.top1))]
        origin = [cell(text or "not recorded") for text in (model.recipe, model.method, model.source)]
        if model.source == report.source.name:
            origin[-1] = cell("the source")
        rows.append(_summary_row(name, model.stored, quality, origin))
    text = table("Sizes and quality", headings, rows)
    for said in dict.fromkeys(map(_measurement, measured)):
        text += (
            f'<p class="dim">{escape(said)}; ± is one standard error. KL divergence and top-1 agreement are against the source, '
            "the first row. Bits per weight are those of the arrays, scales included.</p>\n"
        )
    remarks = []
    for name, model in zip(names, report.models, strict=True):
        if model.quality is None:
            remarks.append(f"{name}: quality was not measured: {model.why_no_quality}")
        remarks += [f"{name}: {note}" for note in model.notes]
    return text + bullets(remarks)


def _quality(report: Report, names: Sequence[str]) -> str:
    """The chart of KL divergence over bits per weight, where it was measured."""
    points = []
    for name, model in zip(names, report.models, strict=True):
        if model.quality is not None and math.isfinite(model.quality.comparison.kl.mean.value):
            kl = model.quality.comparison.kl.mean
            points.append(QualityPoint(name, model.stored.bits_per_weight, kl.value, kl.error))
    if not points:
        return "<p>No chart: the quality of no model was measured, or none is finite. The summary says why.</p>\n"
    title = "KL divergence over bits per weight: " + ", ".join(
        f"{point.name} {point.kl:.4g} nats at {point.bits_per_weight:.3f} bits" for point in points
    )
    chart = quality_chart(points, prefix="quality-chart", title=title)
    text = box(chart, "Quality against size", "chart fitted")
    if left := len(names) - len(points):
        text += f"<p>Not in the chart, since without a finite KL divergence: {left} of {len(names)} models.</p>\n"
    return text + '<p class="dim">Bars are one standard error over tokens. The source has KL divergence 0.</p>\n'


def _errors(models: Sequence[ModelFacts], names: Sequence[str]) -> str:
    """A map of SQNR by kind and layer for each model."""
    maps = [_error_map(model.tensors) for model in models]
    text = (
        '<p class="dim">SQNR is the signal-to-quantization-noise ratio of a weight against the source, in decibels: higher is '
        "better, 6 dB are one bit. = is a weight that lost nothing. Where a layer has several weights of a kind, such as those of "
        "experts, the lowest counts. Each map has its own colours, over 6 dB or more.</p>\n"
    )
    for i, (name, model, errors) in enumerate(zip(names, models, maps, strict=True)):
        text += f"<h3>{escape(name)}</h3>\n"
        if errors.finite:
            title = f"SQNR in dB of each kind of weight (rows) in each layer (columns) of {name}; the table below has the numbers"
            chart = layer_map_chart(errors, prefix=f"errors-{i}", title=title, label="SQNR, dB")
            text += box(chart, f"Error map of {name}", "chart") + _error_table(errors, name)
        elif any(value not in (None, math.inf) for some in errors.values for value in some):
            text += "<p>No SQNR is finite.</p>\n" + _error_table(errors, name)
        elif errors.kinds:
            text += "<p>Every weight of its layers is equal to the source's.</p>\n"
        else:
            text += "<p>No SQNR was measured for weights of numbered layers.</p>\n"
        outside = [t for t in model.tensors if t.layer is None and t.sqnr_db is not None]
        text += bullets(f"Outside of the layers: {tensor.path}, {decibels_in_words(tensor.sqnr_db)}" for tensor in outside)
    return text


def _error_table(errors: LayerMap, name: str) -> str:
    """The numbers of an error map."""
    headings = ["layer", *(f"#{kind}" for kind in errors.kinds)]
    rows = [
        row([f'<th scope="row">{layer}</th>', *(number(decibels(some[j])) for some in errors.values)])
        for j, layer in enumerate(errors.layers)
    ]
    numbers = table(f"SQNR by layer, {name}", headings, rows, kind="tall")
    return f"<details><summary>The numbers, in dB</summary>\n{numbers}</details>\n"


def _skipped(models: Sequence[ModelFacts], names: Sequence[str]) -> str:
    """The counts of tensors in float, by reason."""
    text = ""
    for name, model in zip(names, models, strict=True):
        text += f"<h3>{escape(name)}</h3>\n"
        rows = []
        for group in model.left_in_float:
            share = f"{100 * group.nbytes / max(model.stored.array_bytes, 1):.2g} %"
            numbers = [number(text) for text in (f"{group.count:,}", f"{group.nbytes:,}", share)]
            rows.append(row([cell(_role(group.role)), cell(group.reason, "why"), *numbers, cell(group.example, "path")]))
        if rows:
            text += table(
                f"Left in float, {name}", ["role", "why", "#tensors", "#bytes", "#of all arrays", "the first"], rows
            )
        else:
            text += "<p>Nothing: every tensor is quantized.</p>\n"
    return text


def _tensors(models: Sequence[ModelFacts], names: Sequence[str]) -> str:
    """The table of every tensor of each model, below one search box."""
    total = sum(len(model.tensors) for model in models)
    text = (
        '<p class="dim">What the recipe made of each tensor, and why. The link of a quantized tensor, or a click on its row, shows '
        'its histogram.</p>\n<div class="find">\n'
        '<label for="search">Search: words of a path, scheme, role or reason<input id="search" type="search"></label>\n'
        '<label for="filter">Show<select id="filter"><option value="all">all</option>'
        '<option value="quantized">quantized</option><option value="float">left in float</option></select></label>\n'
        f'</div>\n<p class="dim" id="shown" role="status">{total} of {total} tensors</p>\n'
    )
    headings = [
        "tensor",
        "#shape",
        "stored as",
        "role",
        "#bytes before",
        "#bytes after",
        "#bits/weight",
        "#SQNR, dB",
        "why",
    ]
    index = itertools.count()  # as in histogram_data
    for name, model in zip(names, models, strict=True):
        charts = {histogram.path: next(index) for histogram in model.histograms}
        rows = [_tensor_row(tensor, charts.get(tensor.path)) for tensor in model.tensors]
        text += f"<h3>{escape(name)}</h3>\n" + table(f"Tensors of {name}", headings, rows, kind="tall")
    return text


def _tensor_row(tensor: TensorFacts, chart: int | None) -> str:
    """A row of the table of tensors. `chart` is the index of the tensor's histogram, if it has one."""
    state, why = "quantized", tensor.reason
    if not tensor.is_quantized:
        state, why = "float", tensor.reason or "not recorded"
    before = ""
    if tensor.bytes_before is not None:
        before = f"{tensor.bytes_before:,}"
    head, data = escape(tensor.path), ""
    if chart is not None:
        head, data = f'<a href="#chosen">{head}</a>', f' data-weight="{chart}"'
    cells = [
        f'<th scope="row" class="path">{head}</th>',
        number(shape_text(tensor.shape)),
        cell(tensor.stored),
        cell(_role(tensor.role)),
        number(before),
        number(f"{tensor.bytes_after:,}"),
        number(f"{tensor.bits_per_weight:.3f}"),
        number(decibels(tensor.sqnr_db)),
        cell(why, "why"),
    ]
    return f'<tr data-state="{state}"{data}>{"".join(cells)}</tr>'


# --- facts as text ---


def _labels(models: Sequence[StoredModel]) -> list[str]:
    """The name of each model, or its path where two have one name."""
    names = [model.name for model in models]
    return [model.name if names.count(model.name) == 1 else model.path for model in models]


def _error_map(tensors: Sequence[TensorFacts]) -> LayerMap:
    """The lowest SQNR of each kind and layer."""
    lowest: dict[tuple[str, int], float] = {}
    for tensor in tensors:
        if tensor.layer is not None and tensor.sqnr_db is not None:
            key = tensor.kind, tensor.layer
            lowest[key] = min(lowest.get(key, math.inf), tensor.sqnr_db, key=_nan_first)
    return LayerMap.of(lowest)


def _nan_first(value: float) -> float:
    """The key that sorts NaN below every number."""
    if math.isnan(value):
        return -math.inf
    return value


def _role(name: str) -> str:
    return name.replace("_", " ")


def _measurement(quality: MeasuredQuality) -> str:
    """On which text the quality was measured, and by which program."""
    tokens = f"{quality.comparison.candidate.tokens:,} tokens of {quality.text}, windows of {quality.window}"
    return f"Quality on {tokens}, computed by {quality.engine}"


def _perplexity(found: Perplexity) -> str:
    return f"{found.value:,.2f} ± {found.error:,.2f}"


def _percent(agreement: Estimate) -> str:
    return f"{100 * agreement.value:.2f} ± {100 * agreement.error:.2f} %"


def _summary_row(name: str, model: StoredModel, quality: Sequence[str], origin: Sequence[str]) -> str:
    """A row of the summary, with the given cells.

    `quality` are the cells of the model's quality, `origin` those of its recipe, method and source.
    """
    sizes = [number(f"{model.array_bytes / 1e6:,.2f}"), number("not written")]
    if model.file_bytes is not None:
        sizes[-1] = number(f"{model.file_bytes / 1e6:,.2f}")
    head = f'<th scope="row" class="model">{escape(name)}</th>'
    if model.path != name:
        head = f'<th scope="row" class="model">{escape(name)}<br><span class="dim">{escape(model.path)}</span></th>'
    cells = [head, number(f"{model.bits_per_weight:.3f}"), *quality, *sizes, cell(model.container), *origin]
    return row(cells)

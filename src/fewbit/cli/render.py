"""Formats plans, sizes and qualities as tables."""

import collections
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._table import Column, table
from ..evaluate.chart import Point
from ..evaluate.metrics import Estimate
from ..evaluate.perplexity import Comparison
from ..recipe.plan import Plan
from ..recipe.table import plan_text, shape_text
from ..workflows.compare import Candidate
from ..workflows.evaluate import Baseline, Quality
from ..workflows.inspect import Inspection, file_bytes
from ..workflows.model import Model
from ..workflows.plan import folded
from ..workflows.tensors import Outcome, TensorResult, worst
from .console import block_lines, worst_weight_lines


def plan_lines(model: Model, plan: Plan, *, full: bool, to: str) -> list[str]:
    """The notes on the source, the plan table, and its sizes in the layout `to`."""
    sizes = f"{model.name}: {file_bytes(model.path):,} bytes on disk; planned {plan.bytes_after:,} bytes of arrays"
    if to == "hf":
        sizes += ", whose weights are written dequantized, in bfloat16"
    notes = [f"note: {sentence}" for sentence in (*source_notes(model), *plan.notes)]
    return [*notes, plan_table(plan, full=full), *product_lines(plan, full=full), sizes]


def plan_totals(plan: Plan) -> dict[str, Any]:
    """The bytes of a plan, before and after, and its hash."""
    sizes = {"bytes_before": plan.bytes_before, "bytes_after": plan.bytes_after, "bits_per_weight": plan.bits_per_weight}
    return {**sizes, "sha256": plan.sha256}


def plan_table(plan: Plan, *, full: bool, width: int | None = None) -> str:
    """The rows of a plan; without `full`, identical layers share one row."""
    rows = [(row.path, 1, row) for row in plan] if full else folded(plan)
    return plan_text(plan, rows, width=width)


def product_lines(plan: Plan, *, full: bool) -> list[str]:
    """The products without a parameter, counted by policy, and with `full` each one."""
    if not plan.products:
        return []
    counts = collections.Counter(str(row.policy or "float") for row in plan.products)
    lines = [f"products without a parameter: {', '.join(f'{n} in {kind}' for kind, n in counts.items())}"]
    if not full:
        return lines
    shapes = [" . ".join(map(shape_text, row.shapes)) for row in plan.products]
    return lines + [f"  {row.name}  {s}  {row.policy or 'float'}" for row, s in zip(plan.products, shapes, strict=True)]


def source_notes(model: Model) -> list[str]:
    """The notes on a model, and the sentence on a quantized source."""
    return [*model.notes, *filter(None, [quantized_source_note(model)])]


def quantized_source_note(model: Model) -> str | None:
    """A sentence that says that a checkpoint is already quantized. None if it is not."""
    if not model.quantized:
        return None
    kinds = ", ".join(f"{len(paths)} tensor{'s' * (len(paths) > 1)} {kind}" for kind, paths in model.quantized.items())
    bits = min(info.scheme.format.bits for info in model.info.values() if info.scheme is not None)
    return (
        f"{model.name} is already quantized to {bits}-bit ({kinds}). Its weights are dequantized and quantized again, "
        f"so every loss below is relative to that {bits}-bit model, not to the original one; tensors whose scheme does not change "
        "are kept exactly."
    )


def size_lines(outcome: Outcome, model: Model) -> list[str]:
    """The measured sizes, and the tensors of lowest SQNR."""
    lines = [
        f"wrote {outcome.path} in {outcome.seconds:.1f} s",
        f"  files:  {outcome.file_bytes:,} bytes, of them {outcome.tensor_file_bytes:,} in tensor files "
        f"({outcome.file_bits_per_weight:.3f} bits/weight, headers included)",
        f"  arrays: {outcome.array_bytes:,} bytes ({outcome.array_bits_per_weight:.3f} bits/weight); "
        f"in the source {model.nbytes:,} bytes ({8 * model.nbytes / max(model.size, 1):.3f} bits/weight)",
    ]
    return lines + worst_lines(worst(outcome.tensors))


def worst_lines(tensors: Sequence[TensorResult]) -> list[str]:
    """The tensors of lowest SQNR, a line each."""
    if not tensors:
        return ["  all tensors are lossless"]
    return ["  lowest signal-to-noise ratio:", *(f"    {t.sqnr_db:6.2f} dB  {t.path}  {t.scheme}" for t in tensors)]


def quality_lines(quality: Quality) -> list[str]:
    """Perplexity, and the divergence from the reference if there is one."""
    lines = [f"quality on {quality.perplexity.tokens:,} tokens of {quality.text} (windows of {quality.window}):"]
    lines.append(f"  computed by {quality.engine}")
    lines.append(f"  perplexity {quality.perplexity}")
    if quality.kv is not None:
        lines.append(f"  keys and values quantized: {quality.kv}")
    if quality.activations is not None:
        lines.append(f"  activations quantized: {quality.activations}")
    if quality.against is not None:
        lines += comparison_lines(quality.against)
    lines += block_lines(quality.blocks) + worst_weight_lines(quality.sqnr_db)
    return lines + [f"  {text}" for text in quality.notes]


def comparison_lines(both: Comparison) -> list[str]:
    """The divergence of a model from its reference."""
    ratio = both.candidate.value / both.reference.value
    kl = both.kl
    quantiles = f"median {kl.median:.4g}, 90% {kl.p90:.4g}, 99% {kl.p99:.4g}, largest {kl.largest:.4g}"
    return [
        f"  reference  {both.reference}; ratio {ratio:.4f} (log {both.log_ratio.value:+.4f} ± {both.log_ratio.error:.4f})",
        f"  KL divergence {kl.mean} nats ({quantiles})",
        f"  top-1 agreement {percent(both.top1)}",
    ]


def percent(agreement: Estimate) -> str:
    """A fraction in percent, with its error."""
    return f"{100 * agreement.value:.2f} ± {100 * agreement.error:.2f} %"


def command_lines(out: Path, source: Path, *, can_run: bool, can_evaluate: bool) -> list[str]:
    """The commands that use the directory that was written."""
    directory, original = shlex.quote(str(out)), shlex.quote(str(source))
    load = f"from fewbit import io; tensors = io.read({str(out)!r}).tensors"
    quoted = shlex.quote(load) if set(str(out)) & set("\"'$`\\!") else f'"{load}"'
    lines = [f"load:      python -c {quoted}", f"check:     fewbit verify {directory}"]
    if can_evaluate:
        lines.append(f"evaluate:  fewbit eval {directory} --against {original}")
    if can_run:
        lines.append(f'generate:  fewbit generate {directory} "Once upon a time"')
    return lines


def candidate_record(candidate: Candidate) -> dict[str, Any]:
    """The JSON of one candidate of a comparison."""
    quality = candidate.quality
    path, sqnr_db = _worst_layer(candidate)
    return {
        "recipe": candidate.recipe,
        "bytes": candidate.nbytes,
        "bits_per_weight": candidate.bits_per_weight,
        "perplexity": quality.candidate.value,
        "perplexity_error": quality.candidate.error,
        "log_ratio": quality.log_ratio.value,
        "log_ratio_error": quality.log_ratio.error,
        "kl": quality.kl.mean.value,
        "kl_error": quality.kl.mean.error,
        "top1": quality.top1.value,
        "top1_error": quality.top1.error,
        "worst_layer": path,
        "worst_sqnr_db": sqnr_db,
        "blocks": candidate.blocks,
        "activations": candidate.activations,
        "seconds_to_quantize": candidate.seconds_to_quantize,
        "seconds_to_evaluate": candidate.seconds_to_evaluate,
    }


def _worst_layer(candidate: Candidate) -> tuple[str | None, float | None]:
    """The path and the SQNR of the tensor of lowest SQNR. None if all are lossless."""
    for result in candidate.worst:
        return result.path, result.sqnr_db
    return None, None


def comparison_table(base: Baseline, candidates: Sequence[Candidate], *, width: int | None = None) -> str:
    """A row for the float model and for each candidate."""
    model = base.model
    first = {"recipe": "float", "bytes": 4 * model.size, "bits": "32.000", "ppl": str(base.perplexity)}
    records = [first, *(_candidate_row(candidate) for candidate in candidates)]
    columns = [
        Column("recipe", kind="name"),
        Column("bytes", align="right"),
        Column("bits", "bits/weight", "right"),
        Column("ppl", "perplexity", "right"),
        Column("ratio", align="right", rank=2),
        Column("kl", "KL, nats", "right"),
        Column("top1", "same top-1", "right", rank=1),
        Column("worst", "worst layer", kind="name", rank=4),
        Column("sqnr", "its SQNR", "right", rank=3),
    ]
    return table(records, columns, width=width)


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    quality = candidate.quality
    path, sqnr_db = _worst_layer(candidate)
    return {
        "recipe": candidate.recipe,
        "bytes": candidate.nbytes,
        "bits": f"{candidate.bits_per_weight:.3f}",
        "ppl": str(quality.candidate),
        "ratio": f"{quality.candidate.value / quality.reference.value:.4f}",
        "kl": str(quality.kl.mean),
        "top1": percent(quality.top1),
        "worst": path,
        "sqnr": None if sqnr_db is None else f"{sqnr_db:.1f} dB",
    }


def activation_lines(candidates: Sequence[Candidate]) -> list[str]:
    """The activations of each candidate, where they were quantized beyond what its recipe says."""
    found = [candidate for candidate in candidates if candidate.activations is not None]
    return [f"activations quantized, {candidate.recipe}: {candidate.activations}" for candidate in found]


def chart_points(candidates: Sequence[Candidate]) -> list[Point]:
    """The candidates as points of a chart."""
    return [
        Point(c.recipe, c.nbytes, c.quality.candidate.value, c.quality.candidate.value * c.quality.log_ratio.error)
        for c in candidates
    ]


def inspection_lines(found: Inspection) -> list[str]:
    """The lines above the table of a stored model's tensors."""
    lines = [f"{found.path}: {found.kind}, architecture {found.architecture}"]
    if found.why_not_run:
        lines.append(f"  cannot be run: {found.why_not_run}")
    if found.config:
        lines.append("  " + ", ".join(f"{key} {value}" for key, value in found.config.items()))
    if found.tokenizer is not None:
        lines.append(f"  tokenizer of {found.tokenizer:,} tokens")
    if found.facts:
        lines.append("  written " + ", ".join(f"{key} {value}" for key, value in found.facts.items() if key != "source"))
        source = found.facts.get("source")
        name = source.get("name") if isinstance(source, dict) else source  # facts of `fb.io.write` are the caller's
        lines.append(f"  from {name or 'an unknown source'}")
    return lines + [f"  note: {text}" for text in found.notes]


def inspection_table(found: Inspection, *, width: int | None = None) -> str:
    """The table of a stored model's tensors."""
    records = [
        {**vars(t), "tensor": t.path, "shape": shape_text(t.shape), "bytes": t.nbytes, "bits": f"{t.bits_per_weight:.3f}"}
        for t in found.tensors
    ]
    columns = [
        Column("tensor", kind="name"),
        Column("shape", align="right"),
        Column("stored", "stored as", kind="words", narrowest=12),
        Column("bytes", align="right"),
        Column("bits", "bits/weight", "right", rank=1),
    ]
    footer = (
        f"{len(records)} tensors; {found.size:,} elements; {found.tensor_bytes:,} bytes; "
        f"{found.bits_per_weight:.3f} bits/weight"
    )
    return table(records, columns, width=width, footer=footer)

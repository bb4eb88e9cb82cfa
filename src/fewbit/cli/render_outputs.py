"""Formats comparisons of models' outputs."""

from collections.abc import Sequence
from typing import Any

from .._table import Column, table
from ..evaluate.outputs import OutputError, OutputQuality
from ..workflows.outputs import OutputBaseline, OutputCandidate
from .console import block_lines, worst_weight_lines


def output_lines(quality: OutputQuality) -> list[str]:
    """The error of each output, block and weight."""
    examples = f"{quality.examples} example{'s' * (quality.examples > 1)}"
    lines = [f"outputs on {examples}: {quality.inputs}", f"  computed by {quality.engine}"]
    for error in quality.outputs:
        lines.append(
            f"  {error.name}: cosine {error.cosine:.6f} (lowest {error.lowest_cosine:.6f}), "
            f"largest difference {error.relative_error:.4g} of the largest value"
        )
    lines += block_lines(quality.blocks)
    return lines + worst_weight_lines(quality.sqnr_db) + [f"  {text}" for text in quality.notes]


def output_record(candidate: OutputCandidate) -> dict[str, Any]:
    """The JSON of one candidate of a comparison."""
    worst = candidate.worst[:1]
    return {
        "recipe": candidate.recipe,
        "bytes": candidate.nbytes,
        "bits_per_weight": candidate.bits_per_weight,
        "outputs": candidate.quality.outputs,
        "blocks": candidate.quality.blocks,
        "worst_layer": worst[0].path if worst else None,
        "worst_sqnr_db": worst[0].sqnr_db if worst else None,
        "seconds_to_quantize": candidate.seconds_to_quantize,
        "seconds_to_evaluate": candidate.seconds_to_evaluate,
    }


def output_table(base: OutputBaseline, candidates: Sequence[OutputCandidate], *, width: int | None = None) -> str:
    """A row for the float model, and for each candidate and output."""
    records: list[dict[str, Any]] = [{"recipe": "float", "bytes": 4 * base.model.size, "bits": "32.000"}]
    for candidate in candidates:
        sizes = {"recipe": candidate.recipe, "bytes": candidate.nbytes, "bits": f"{candidate.bits_per_weight:.3f}"}
        for error in candidate.quality.outputs:
            records.append({**sizes, **_errors(error)})
            sizes = {}
        for result in candidate.worst[:1]:
            records[-len(candidate.quality.outputs)] |= {"worst": result.path, "sqnr": f"{result.sqnr_db:.1f} dB"}
    columns = [
        Column("recipe", kind="name"),
        Column("bytes", align="right"),
        Column("bits", "bits/weight", "right"),
        Column("output", kind="name"),
        Column("cosine", align="right"),
        Column("lowest", "lowest cosine", "right", rank=1),
        Column("relative", "relative error", "right", rank=2),
        Column("worst", "worst layer", kind="name", rank=4),
        Column("sqnr", "its SQNR", "right", rank=3),
    ]
    return table(records, columns, width=width)


def _errors(error: OutputError) -> dict[str, str]:
    return {
        "output": error.name,
        "cosine": f"{error.cosine:.6f}",
        "lowest": f"{error.lowest_cosine:.6f}",
        "relative": f"{error.relative_error:.4g}",
    }

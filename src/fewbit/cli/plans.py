"""What `fewbit plan` and `fewbit inspect` print."""

import dataclasses
from pathlib import Path
from typing import Any

import typer

from .. import jobs
from ..errors import QuantError
from ..jobs.planning import unknown_roles
from ..recipe import Plan
from .app import FOUND
from .output import emit_json, say
from .views import inspection_lines, inspection_table, plan_table, product_lines, quantized_source_note


def show_plan(path: Path, *, recipe: str | None, save: Path | None, strict: bool, full: bool, json: bool) -> None:
    """Plans a model, prints the plan, and writes it where that is asked for."""
    if recipe is None:
        raise QuantError("which recipe? pass --recipe NAME; `fewbit recipes` lists them")
    model = jobs.load(path)
    made = jobs.plan_model(model, recipe=recipe)
    if strict and (message := unknown_roles(made)) is not None:
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(FOUND)
    if save is not None:
        made.save(save)
    if json:
        emit_json({"model": str(path), "architecture": model.architecture, "plan": made, **plan_totals(made)})
        return
    print_plan(model, made, full=full)
    if save is not None:
        say(f"saved as {save}; edit it, then: fewbit quantize {path} -o OUT --plan {save}")


def show_inspection(path: Path, *, json: bool) -> None:
    """Prints what a stored model holds."""
    found = jobs.inspect(path)
    if json:
        emit_json({**dataclasses.asdict(found), "bits_per_weight": found.bits_per_weight})
        return
    for line in inspection_lines(found):
        say(line, wrap=True)
    say(inspection_table(found))
    say(f"{found.file_bytes:,} bytes on the disk")


def print_plan(model: jobs.Model, made: Plan, *, full: bool) -> None:
    """The plan table with what should be known of the source."""
    for sentence in [*model.notes, *source_sentences(model), *made.notes]:
        say(f"note: {sentence}")
    say(plan_table(made, full=full))
    for line in product_lines(made, full=full):
        say(line)
    on_disk = jobs.inspection.file_bytes(model.path)
    say(f"{model.name}: {on_disk:,} bytes on the disk; planned {made.bytes_after:,} bytes of arrays")


def source_sentences(model: jobs.Model) -> list[str]:
    """What should be known of the source before it is quantized."""
    sentence = quantized_source_note(model)
    return [] if sentence is None else [sentence]


def plan_totals(made: Plan) -> dict[str, Any]:
    """The bytes of a plan, before and after."""
    return {"bytes_before": made.bytes_before, "bytes_after": made.bytes_after, "bits_per_weight": made.bits_per_weight}

"""Prints `fewbit plan` and `fewbit inspect`."""

import dataclasses
from pathlib import Path
from typing import Any

import typer

from .. import workflows
from ..errors import QuantError
from ..recipe import Plan
from ..workflows.inspect import file_bytes
from ..workflows.plan import unknown_roles
from .app import FOUND
from .console import emit_json, say
from .render import inspection_lines, inspection_table, plan_table, product_lines, source_notes


def show_plan(path: Path, *, recipe: str | None, save: Path | None, strict: bool, full: bool, json: bool) -> None:
    """Plans a model, prints the plan, and saves it if asked to."""
    if recipe is None:
        raise QuantError("a recipe is missing: pass --recipe NAME; `fewbit recipes` lists them")
    model = workflows.load(path)
    made = workflows.plan_model(model, recipe=recipe)
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
    """Prints the metadata and the tensors of a stored model."""
    found = workflows.inspect(path)
    if json:
        emit_json({**dataclasses.asdict(found), "bits_per_weight": found.bits_per_weight})
        return
    for line in inspection_lines(found):
        say(line, wrap=True)
    say(inspection_table(found))
    say(f"{found.file_bytes:,} bytes on disk")


def print_plan(model: workflows.Model, made: Plan, *, full: bool) -> None:
    """Prints the plan table and the notes on the source."""
    for sentence in [*source_notes(model), *made.notes]:
        say(f"note: {sentence}")
    say(plan_table(made, full=full))
    for line in product_lines(made, full=full):
        say(line)
    on_disk = file_bytes(model.path)
    say(f"{model.name}: {on_disk:,} bytes on disk; planned {made.bytes_after:,} bytes of arrays")


def plan_totals(made: Plan) -> dict[str, Any]:
    """The bytes of a plan, before and after."""
    return {"bytes_before": made.bytes_before, "bytes_after": made.bytes_after, "bits_per_weight": made.bits_per_weight}

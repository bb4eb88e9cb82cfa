"""The commands that read and write checkpoints: plan, quantize, inspect, verify."""

from pathlib import Path
from typing import Annotated

import typer

from ..app import FOUND, app
from ..options import Full, Json, ModelPath, RecipeName, Rotate, Seed, Strict, path_argument, rotation_seed


@app.command()
def plan(
    model: ModelPath,
    recipe: RecipeName = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="PATH",
            parser=path_argument,
            help="Write the plan here as JSON, to edit and pass to quantize --plan.",
        ),
    ] = None,
    strict: Strict = False,
    full: Full = False,
    json: Json = False,
) -> None:
    """Shows what a recipe does to every parameter of a model, without quantizing anything."""
    from ..plan_report import show_plan

    show_plan(model, recipe=recipe, save=save, strict=strict, full=full, json=json)


@app.command()
def quantize(
    model: ModelPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", parser=path_argument, help="The directory to write.")
    ],
    recipe: RecipeName = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan", metavar="PATH", parser=path_argument, help="A plan that `fewbit plan --save` wrote, perhaps edited."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Write the tensors as they are (the same as --recipe keep).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace OUTPUT if fewbit wrote all its files; the old one is kept until the end."),
    ] = False,
    rotate: Rotate = False,
    seed: Seed = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the float model on a short text at the end.")
    ] = True,
    text: Annotated[
        str | None, typer.Option("--text", help="The text of that check: a file, sotu/<speech>, or pydoc.")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="PATH", parser=path_argument, help="Write one line per tensor here instead of to stderr."
        ),
    ] = None,
    full: Full = False,
    json: Json = False,
) -> None:
    """Quantizes a model into a directory of safetensors, tensor by tensor, and measures the loss."""
    from ..quantize_report import quantize_checkpoint

    quantize_checkpoint(
        model,
        output,
        recipe=recipe,
        plan=plan,
        keep=keep,
        dry_run=dry_run,
        overwrite=overwrite,
        rotation_seed=rotation_seed(rotate, seed),
        check=check,
        text=text,
        log=log,
        full=full,
        json=json,
    )


@app.command()
def inspect(path: ModelPath, json: Json = False) -> None:
    """Lists the tensors of a model's file or directory: how each is stored, and its bytes."""
    from ..plan_report import show_inspection

    show_inspection(path, json=json)


@app.command()
def verify(path: ModelPath, json: Json = False) -> None:
    """Reads every byte of a stored model and reports errors. Exit status 1 when it finds errors."""
    from ... import io
    from ..console import emit_json, say

    findings = io.verify(path)
    errors = sum(finding.severity == "error" for finding in findings)
    if json:
        emit_json({"path": str(path), "errors": errors, "findings": findings})
    else:
        for finding in findings:
            say(str(finding))
        say(f"{path}: {errors} errors, {len(findings) - errors} warnings")
    if errors:
        raise typer.Exit(FOUND)

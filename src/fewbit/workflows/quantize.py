"""Quantizes a checkpoint into a directory, tensor by tensor."""

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..array.qarray import QArray
from ..errors import QuantError
from ..io.files import file_sha256
from ..io.orbax import TREE
from ..io.parts import FinishedParts
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from .convert.fused import fused_rows
from .convert.targets import Job, check_path, check_target, fused_modules, prepared, representable, write_tensors
from .methods.calibrated import CalibrationData, calibrated_weights
from .model import Model, Value
from .plan import KEEP
from .tensors import Outcome, TensorResult, quantized_tensors


def quantize(
    model: Model,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    to: str = "fewbit",
    overwrite: bool = False,
    method: AbstractMethod = NEAREST,
    calibration: CalibrationData | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    on_tensor: Callable[[TensorResult], None] | None = None,
    on_verify: Callable[[str, int], None] | None = None,
) -> Outcome:
    """Writes the quantized model; the directory appears complete or not at all.

    One tensor is loaded at a time; quantized tensors are buffered up to one file of 1 GiB. The output is deterministic. A method
    with calibration data stores finished layers in `.<name>.fewbit-work` next to the output until that is complete: the same
    call after an interruption resumes from them, and gives the same bytes.

    Args:
        model: the model.
        plan: its plan; see `plan_model`.
        out: the output directory, or the file of GGUF.
        to: the layout of the files: "fewbit", "hf" (dequantized to bfloat16), "gguf", "orbax", or the name of a container.
        overwrite: whether a directory that fewbit wrote earlier may be replaced.
        method: how scales and codes are chosen. With a method that needs statistics, the source's and all quantized weights are in
            memory.
        calibration: what such a method learns from; see `calibration_data`.
        on_layer: called with the number of layers that it has quantized, and of all layers.
        on_tensor: called after each tensor.
        on_verify: called with the name and the bytes of each stored array that was read back.

    Returns:
        The directory and its sizes.

    Raises:
        QuantError: when `io.check_output` refuses the directory, a parameter has NaN or infinity, or writing fails.
        UnsupportedError: when the layout cannot store a planned weight exactly, or fewbit's decoder cannot run a model for
            whose method it must; before any work.
    """
    model = prepared(to, model)
    check_target(to, model, plan)
    check_path(to, Path(out), model, overwrite=overwrite)
    if method.collect and calibration is None:
        raise QuantError(f"method {method.name} needs calibration data; pass calibration=calibration_data(model)")
    if calibration is not None and not method.collect:
        raise QuantError(f"method {method.name} uses no calibration data; leave calibration out")

    def progress(stage: str, name: str, nbytes: int) -> None:
        if stage == "verify" and on_verify is not None:
            on_verify(name, nbytes)

    start, results = time.perf_counter(), []
    fused, facts = fused_rows(model, plan, fused_modules(to)), _facts(model, plan)

    def write(calibrated: Mapping[str, QArray]) -> Path:
        def tensors() -> Iterator[tuple[str, Value]]:
            for value, result in quantized_tensors(model, plan, fused, calibrated, method.name):
                yield result.path, representable(to, value) if result.is_quantized else value
                results.append(result)
                if on_tensor is not None:
                    on_tensor(result)

        return write_tensors(to, Job(model, plan, out, _config(model), facts, overwrite, progress), tensors())

    if calibration is None:
        written = write({})
    else:
        facts["method"] = {"name": method.name, **dataclasses.asdict(method), "calibration": calibration.facts}
        identity = {**facts, "plan": plan.to_json(), "to": to, "version": importlib.metadata.version("fewbit")}
        with FinishedParts(out, identity) as parts:
            written = write(
                calibrated_weights(model, plan, method, calibration, fused=fused, parts=parts, progress=on_layer)
            )
            parts.remove()
    files = [file for file in (written, *written.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    in_tensors = sum(file.stat().st_size for file in files if _has_tensors(file.relative_to(written)))
    arrays = sum(result.bytes_after for result in results)
    seconds = time.perf_counter() - start
    return Outcome(written, tuple(results), model.size, size, in_tensors, arrays, seconds)


def _has_tensors(file: Path) -> bool:
    """Whether a file of the output has tensors: a GGUF file itself, safetensors, or a part of Orbax's tree."""
    return not file.name or file.suffix == ".safetensors" or file.parts[0] == TREE


def _config(model: Model) -> dict[str, Any]:
    """The `config.json` of the directory: a Hugging Face checkpoint's own; else ours, for a model that can be run."""
    if "model_type" in model.metadata:
        return dict(model.metadata)
    if model.config is not None:
        return {"architecture": "decoder", "decoder": model.config.to_json()}
    # Not bytes, nor a vocabulary, which GGUF stores in the metadata too.
    vast = {key for key, value in model.metadata.items() if isinstance(value, list) and len(value) > 1000}
    return {key: value for key, value in model.metadata.items() if key not in vast and not isinstance(value, bytes)}


def _facts(model: Model, plan: Plan) -> dict[str, Any]:
    """The provenance recorded in the directory."""
    files = sorted(model.path.glob("*.safetensors")) if model.path.is_dir() else [model.path]
    hashes = {file.name: file_sha256(file) for file in files}
    facts: dict[str, Any] = {
        "recipe": plan.recipe,
        "source": {"name": model.name, "kind": model.kind, "sha256": hashes},
    }
    if "rotation_seed" in model.facts:
        facts["rotation_seed"] = model.facts["rotation_seed"]
    if plan.recipe == KEEP and model.facts:
        facts["source"]["facts"] = dict(model.facts)
    return facts

"""Quantizes a checkpoint into a fewbit directory, tensor by tensor."""

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import io
from ..recipe import Plan
from .model import Model
from .plan import KEEP
from .tensors import TensorResult, quantized_tensors

_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of quantizing a checkpoint.

    Attributes:
        path: the directory.
        tensors: the result of each tensor.
        size: the number of elements of all parameters.
        file_bytes: the bytes of all files of the directory.
        tensor_file_bytes: the bytes of its safetensors files.
        array_bytes: the bytes of the arrays.
        seconds: how long it took, reading back included.
    """

    path: Path
    tensors: tuple[TensorResult, ...]
    size: int
    file_bytes: int
    tensor_file_bytes: int
    array_bytes: int
    seconds: float

    @property
    def file_bits_per_weight(self) -> float:
        """`8 * tensor_file_bytes / size`."""
        return 8 * self.tensor_file_bytes / self.size

    @property
    def array_bits_per_weight(self) -> float:
        """`8 * array_bytes / size`."""
        return 8 * self.array_bytes / self.size


def worst(tensors: tuple[TensorResult, ...], count: int = 5) -> list[TensorResult]:
    """The tensors of lowest SQNR.

    Args:
        tensors: the result of each tensor.
        count: how many at most.

    Returns:
        The worst first; lossless tensors are left out.
    """
    lossy = [t for t in tensors if t.sqnr_db is not None and math.isfinite(t.sqnr_db)]
    return sorted(lossy, key=lambda t: t.sqnr_db or 0.0)[:count]


def quantize(
    model: Model,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    on_tensor: Callable[[TensorResult], None] | None = None,
    on_verify: Callable[[str, int], None] | None = None,
) -> Outcome:
    """Writes the quantized model; the directory appears complete or not at all.

    One tensor is loaded at a time; quantized tensors are buffered up to one file of 1 GiB. The output is deterministic.

    Args:
        model: the model.
        plan: its plan; see `plan_model`.
        out: the output directory.
        overwrite: whether a directory that fewbit wrote earlier may be replaced.
        on_tensor: called after each tensor.
        on_verify: called with the name and the bytes of each stored array that was read back.

    Returns:
        The directory and its sizes.

    Raises:
        QuantError: when the directory may not be written (see `io.check_output`), a parameter has NaN or infinity, or the
            files cannot be written.
    """
    start = time.perf_counter()

    def progress(stage: str, name: str, nbytes: int) -> None:
        if stage == "verify" and on_verify is not None:
            on_verify(name, nbytes)

    results = []
    writer = io.DirectoryWriter(
        out,
        config=_config(model),
        files=model.files,
        facts=_facts(model, plan),
        overwrite=overwrite,
        sources=[model.path],
        progress=progress,
    )
    with writer:
        for value, result in quantized_tensors(model, plan):
            writer.add(model.names.get(result.path, result.path), value)
            results.append(result)
            if on_tensor is not None:
                on_tensor(result)
    sizes = {file.name: file.stat().st_size for file in sorted(writer.path.iterdir())}
    in_tensors = sum(size for name, size in sizes.items() if name.endswith(".safetensors"))
    arrays = sum(result.bytes_after for result in results)
    seconds = time.perf_counter() - start
    return Outcome(writer.path, tuple(results), model.size, sum(sizes.values()), in_tensors, arrays, seconds)


def _config(model: Model) -> dict[str, Any]:
    """The `config.json` of the directory: a Hugging Face checkpoint's own; else ours, for a model that can be run."""
    if "model_type" in model.metadata:
        return dict(model.metadata)
    if model.config is not None:
        return {"architecture": "llama", "llama": model.config.to_json()}
    return {key: value for key, value in model.metadata.items() if _is_small(value)}


def _is_small(value: object) -> bool:
    """False for bytes and for a vocabulary, which GGUF stores in the metadata too."""
    return not isinstance(value, bytes) and not (isinstance(value, list) and len(value) > 1000)


def _facts(model: Model, plan: Plan) -> dict[str, Any]:
    """The provenance recorded in the directory."""
    facts: dict[str, Any] = {
        "recipe": plan.recipe,
        "source": {"name": model.name, "kind": model.kind, "sha256": _hashes(model.path)},
    }
    if "rotation_seed" in model.facts:
        facts["rotation_seed"] = model.facts["rotation_seed"]
    if plan.recipe == KEEP and model.facts:
        facts["source"]["facts"] = dict(model.facts)
    return facts


def _hashes(path: Path) -> Mapping[str, str]:
    """The SHA-256 of the source's tensor files, by name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {file.name: _sha256(file) for file in files}


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()

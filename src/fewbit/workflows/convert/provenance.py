"""What a written directory says of its source, and its sizes."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..._json import parsed_object
from ...io.files import file_sha256
from ...io.orbax import TREE
from ...io.safetensors.reader import tagged
from ...methods.named import method_name
from ...methods.scaling import AbstractScaling
from ...recipe.method import NEAREST, AbstractMethod
from ...recipe.plan import Plan
from ..methods.calibration_data import CalibrationData
from ..methods.importance_file import ImportanceFile
from ..model import Model, Value
from ..plan import KEEP
from ..tensors import Outcome, TensorResult


def outcome(model: Model, written: Path, results: Sequence[TensorResult], seconds: float) -> Outcome:
    """The sizes of what was written.

    Args:
        model: the source.
        written: the directory or file.
        results: the result of each tensor.
        seconds: how long it took.
    """
    files = [file for file in (written, *written.rglob("*")) if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    in_tensors = sum(file.stat().st_size for file in files if _has_tensors(file.relative_to(written)))
    arrays = sum(result.bytes_after for result in results)
    return Outcome(written, tuple(results), model.size, size, in_tensors, arrays, seconds)


def _has_tensors(file: Path) -> bool:
    """Whether a file of the output has tensors.

    Such files are a GGUF file itself, safetensors, and a part of Orbax's tree.
    """
    return not file.name or file.suffix == ".safetensors" or file.parts[0] == TREE


def stored_config(model: Model) -> dict[str, Any]:
    """The `config.json` of the directory.

    A Hugging Face checkpoint has its own; else it is ours, for a model that can be run.
    """
    if "model_type" in model.metadata:
        return dict(model.metadata)
    if model.config is not None:
        return {"architecture": "decoder", "decoder": model.config.to_json()}
    # Not bytes, nor a vocabulary, which GGUF stores in the metadata too.
    vast = {key for key, value in model.metadata.items() if isinstance(value, list) and len(value) > 1000}
    kept = {key: value for key, value in model.metadata.items() if key not in vast and not isinstance(value, bytes)}
    # GGUF fields may be infinite or NaN, which JSON lacks.
    return parsed_object(json.dumps(kept).encode(), f"the metadata of {model.path}", constant=tagged)


def provenance(model: Model, plan: Plan, source: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance recorded in the directory.

    Args:
        model: the source.
        plan: its plan.
        source: what identifies the source's bytes.
    """
    facts: dict[str, Any] = {"recipe": plan.recipe, "source": {"name": model.name, "kind": model.kind, **source}}
    facts |= {name: model.facts[name] for name in ("rotation_seed", "scaling") if name in model.facts}
    if plan.recipe == KEEP and model.facts:
        facts["source"]["facts"] = dict(model.facts)
    return facts


def method_facts(
    method: AbstractMethod,
    calibration: CalibrationData | ImportanceFile | None = None,
    scaling: AbstractScaling | None = None,
) -> dict[str, Any]:
    """What the directory records of the method and the scaling. That is their settings, and what they learned from."""
    facts: dict[str, Any] = {}
    for kind, one in (("scaling", scaling), ("method", method)):
        if one is not None and one != NEAREST:
            facts[kind] = {"name": method_name(one), **dataclasses.asdict(one)}
            if calibration is not None and one.collect:
                facts[kind]["calibration"] = calibration.facts
    return facts


def versions() -> list[str]:
    """Those of fewbit and JAX, on which the bytes of a job depend."""
    return [importlib.metadata.version("fewbit"), jax.__version__]


def source_files(model: Model) -> list[Path]:
    """The files that the tensors of a model are read from. Those of an Orbax checkpoint are all its files."""
    if not model.path.is_dir():
        return [model.path]
    if model.kind == "orbax":
        return sorted(file for file in model.path.rglob("*") if file.is_file())
    return sorted(model.path.glob("*.safetensors"))


def file_hashes(model: Model) -> dict[str, str]:
    """The SHA-256 of each of these files, by its path within a directory, or the model's name."""
    if not model.path.is_dir():
        return {model.name: file_sha256(model.path)}
    return {file.relative_to(model.path).as_posix(): file_sha256(file) for file in source_files(model)}


def value_sha256(value: Value) -> str:
    """The SHA-256 of a parameter: its scheme or dtype, its shape and its bytes."""
    digest = hashlib.sha256(f"{value.dtype} {value.shape} {getattr(value, 'scheme', None)}".encode())
    for leaf in jax.tree.leaves(value):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()

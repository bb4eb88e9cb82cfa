"""The file layouts that a model can be written in."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from ..._registry import near_names
from ...array.qarray import QArray
from ...errors import QuantError, UnsupportedError
from ...io.checkpoint import TensorInfo
from ...io.containers.container import AbstractContainer, Weight
from ...io.containers.huggingface import HuggingFace
from ...io.containers.registry import CONTAINERS, container
from ...io.containers.writer import ContainerWriter
from ...io.gguf.writer import check_gguf_output
from ...io.journal import Journal
from ...io.native.writer import DirectoryWriter
from ...io.orbax import ORBAX, OrbaxWriter
from ...io.output import DIRECTORY, check_output
from ...models.roles.checkpoint import checkpoint_roles
from ...recipe.plan import Plan
from ...recipe.quantize_row import quantized_leaf
from ...recipe.role import Role
from ...recipe.rows import PlanRow
from ..model import Model, Value, decoded, is_kept
from .gguf import why_not_model, why_not_scaled, why_not_weight, write_unfinished
from .hugging_face import as_hugging_face
from .separate_experts import with_separate_experts, with_separate_rows

Values = Iterable[tuple[str, Value]]
"""The parameters of a model by path, one at a time."""
Progress = Callable[[str, str, int], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """A directory to be written.

    Attributes:
        model: the source.
        plan: what happens to its parameters.
        out: the path.
        config: the `config.json`, without a section for quantized weights.
        facts: JSON for the manifest.
        overwrite: whether what fewbit wrote at the path may be replaced.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).
        journal: what earlier runs of the job finished.
    """

    model: Model
    plan: Plan
    out: str | os.PathLike[str]
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    overwrite: bool
    progress: Progress
    journal: Journal

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that all writers take."""
        return {
            "config": self.config,
            "files": self.model.files,
            "facts": self.facts,
            "overwrite": self.overwrite,
            "sources": [self.model.path],
            "progress": self.progress,
            "journal": self.journal,
        }


def target_names() -> tuple[str, ...]:
    """The names that `--to` takes."""
    return ("fewbit", "hf", "gguf", "orbax", *(one.name for one in CONTAINERS))


def check_target(to: str, model: Model, plan: Plan) -> None:
    """Refuses a target that cannot store the planned weights exactly, before any work.

    Args:
        to: the name of a target.
        model: the source.
        plan: its plan.

    Raises:
        QuantError: for an unknown name.
        UnsupportedError: when a weight does not fit, naming schemes that do.
    """
    model = prepared(to, model)
    if to == "gguf":
        _check_gguf(model, plan)
    elif to in (one.name for one in CONTAINERS):
        found, (weights, kept) = container(to), planned_weights(model, plan)
        _check_container(found, weights, model)
        found.files(weights, kept, model.metadata)


def _check_container(found: AbstractContainer, weights: Sequence[Weight], model: Model) -> None:
    """Refuses weights that a container cannot store.

    The message has a way to decode those that are quantized in the source.
    """
    schemes = {model.names.get(path, path): info.scheme for path, info in model.info.items()}
    try:
        found.check(weights)
    except UnsupportedError as error:
        stored = [weight.name for weight in weights if schemes[weight.name] == weight.scheme and found.refusal(weight)]
        if not stored:
            raise
        way = f"`fewbit convert {model.name} DIRECTORY --to hf` decodes the model to bfloat16 first"
        raise UnsupportedError(f"{error}. {stored[0]} is quantized in {model.name} already; {way}") from error


def refusals(to: str, model: Model, plan: Plan) -> dict[str, str]:
    """Why a target cannot store planned weights exactly, by path.

    Args:
        to: the name of a target.
        model: the source, as `prepared` gives it.
        plan: its plan.
    """
    if to not in ("gguf", *(one.name for one in CONTAINERS)):
        return {}
    found, paths = {}, {model.names.get(path, path): path for path in model.info}
    if to == "gguf":  # which stores every weight [out, in]
        model = dataclasses.replace(model, transposed=frozenset())
    for weight in planned_weights(model, plan)[0]:
        reason = why_not_weight(model, weight) if to == "gguf" else container(to).refusal(weight)
        if reason is not None:
            found[paths[weight.name]] = reason
    scaled = [row.path for row in plan if row.policy is not None and row.policy.weight.tensor_scale]
    scaled = [path for path in scaled if path not in found and not is_kept(plan[path], model.info[path])]
    if to == "gguf" and scaled:
        found |= why_not_scaled(model, scaled)
    return found


def default_candidates(to: str, bits: float) -> tuple[str, ...]:
    """The default candidate schemes of a target for `bits` per weight. They have 2 to 8 bits."""
    if to != "gguf":
        return ("int3_g64", "mxfp4", "nvfp4", "int8")
    names = ("tq2_0", "mxfp4", "iq4_nl", "q8_0")
    if bits > 4.5:  # half of the weights take q5_1 (bench/results/llama_quants.json)
        names = (*names, "q5_1")
    return names


_FILES = {".gguf": "; add --to gguf, or name a directory", ".safetensors": "; name one", ".npz": "; name one"}
"""Suffixes of files, and how to get what was meant."""


def check_path(to: str, path: Path, model: Model, *, overwrite: bool) -> None:
    """Refuses an output path that may not be written, before any work."""
    if to == "gguf":
        check_gguf_output(path, overwrite=overwrite, sources=[model.path])
    else:
        if path.suffix in _FILES and not path.is_dir():
            raise QuantError(
                f"{path} is the name of a {path.suffix} file, and --to {to} writes a directory{_FILES[path.suffix]}"
            )
        kind = ORBAX if to == "orbax" else DIRECTORY
        check_output(path, overwrite=overwrite, sources=[model.path], kind=kind)


def write_tensors(to: str, job: Job, tensors: Callable[[frozenset[str]], Values]) -> Path:
    """Writes the tensors of a model in a target's layout. The directory appears complete or not at all.

    An exception leaves what is finished for the next run of the job.

    Args:
        to: the name of a target that passed `check_target`.
        job: what is written, and where.
        tensors: gives the tensors in the order of the plan, without those whose paths it gets: they are finished.

    Returns:
        The path.

    Raises:
        QuantError: when the output is refused, or writing fails.
    """
    if to == "gguf":
        return write_unfinished(
            job.model, tensors, job.out, overwrite=job.overwrite, progress=job.progress, journal=job.journal
        )
    writer, names = _writer(to, job), {path: job.model.names.get(path, path) for path in job.model.info}
    with writer:
        for path, value in tensors(frozenset(path for path, name in names.items() if name in writer.finished)):
            writer.add(names[path], job.model.stored(path, value))
    return writer.path


def _writer(to: str, job: Job) -> DirectoryWriter | OrbaxWriter | ContainerWriter:
    if to == "fewbit":
        return DirectoryWriter(job.out, **job.options)
    if to == "orbax":
        return OrbaxWriter(job.out, **job.options)
    if to == "hf":
        return ContainerWriter(job.out, HuggingFace(), weights=(), **job.options)
    weights, kept = planned_weights(job.model, job.plan)
    return ContainerWriter(job.out, container(to), weights=weights, kept=kept, **job.options)


def _check_gguf(model: Model, plan: Plan) -> None:
    """Refuses a model or weights that GGUF cannot store.

    llama.cpp has no architecture for the model, GGUF no type for a weight, or llama.cpp would ignore its tensor scale.
    """
    if (reason := why_not_model(model)) is not None:
        raise UnsupportedError(reason)
    if refused := refusals("gguf", model, plan):
        path, reason = next(iter(refused.items()))
        raise UnsupportedError(f"{model.names.get(path, path)} cannot be stored exactly: {reason}")


def prepared(to: str, model: Model) -> Model:
    """The model as a target names its tensors. For the containers it is named as a Hugging Face checkpoint.

    Embeddings that are quantized in the source, and that a container cannot store quantized, are dequantized. Stacks of experts are
    split into matrices, see `with_separate_experts`.

    Args:
        to: the name of a target.
        model: the source.

    Raises:
        QuantError: for an unknown name.
        UnsupportedError: for a source of another kind that is not a Llama, and for one with rotated inputs.
    """
    if to not in target_names():
        raise QuantError(f"--to {to!r} is not a file layout; {near_names(to, target_names())}")
    if to in ("fewbit", "gguf", "orbax"):
        return model
    model = as_hugging_face(model)
    if to not in (one.name for one in CONTAINERS):
        return model
    return _with_float_embeddings(container(to), with_separate_experts(model))


def _with_float_embeddings(target: AbstractContainer, model: Model) -> Model:
    """The model, the embeddings dequantized that the container cannot store quantized."""
    roles, floats = _roles(model), dict[str, TensorInfo]()
    for path, one in model.info.items():
        name = model.names.get(path, path)
        if one.scheme is None or roles[name] is not Role.EMBEDDING:
            continue
        if target.refusal(Weight(name, one.shape, one.dtype, one.scheme, None, Role.EMBEDDING)) is not None:
            floats[path] = dataclasses.replace(one, scheme=None)
    if not floats:
        return model

    def load(path: str) -> Value:
        value = model.load(path)
        return decoded(value) if path in floats else value

    return dataclasses.replace(model, info={**model.info, **floats}, load=load)


def fused_modules(to: str) -> tuple[tuple[str, ...], ...]:
    """The modules that the readers of a target multiply at once. They are named below one parent."""
    if to in (one.name for one in CONTAINERS):
        return container(to).fused
    return ()


def representable(to: str, value: Value) -> Value:
    """A parameter that was just quantized, with scales that a target can express; for "hf" in bfloat16."""
    if to == "hf" and isinstance(value, QArray):
        return np.asarray(decoded(value)).astype(ml_dtypes.bfloat16)
    if to in (one.name for one in CONTAINERS) and isinstance(value, QArray):
        return container(to).representable(value)
    return value


def fitted(to: str, model: Model, plan: Plan) -> Plan:
    """The plan for a target: embeddings in float that it cannot store quantized, and a row for each matrix of stacked experts.

    The reason and the bytes of such embeddings say so.

    Args:
        to: the name of a target.
        model: the source, as `prepared` returns it.
        plan: its plan.
    """
    if to not in (one.name for one in CONTAINERS):
        return plan
    plan = with_separate_rows(plan, model)
    weights = {weight.name: weight for weight in planned_weights(model, plan)[0]}
    rows = []
    for row in plan:
        weight, reason = weights.get(model.names.get(row.path, row.path)), None
        if row.policy is not None and weight is not None and weight.role is Role.EMBEDDING:
            reason = container(to).refusal(weight)
        if reason is not None:
            row = dataclasses.replace(row, policy=None, axis=(), reason=f"{to}: {reason}")
        if row.policy is None and model.info[row.path].scheme is None:  # the source may store it quantized, see `prepared`
            row = dataclasses.replace(row, bytes_after=row.size * np.dtype(row.dtype).itemsize)
        rows.append(row)
    return dataclasses.replace(plan, rows=tuple(rows))


def planned_weights(model: Model, plan: Plan) -> tuple[list[Weight], list[str]]:
    """The quantized weights of a plan, and the names of other tensors. They are known before anything is computed.

    Args:
        model: the source.
        plan: its plan.

    Returns:
        The weights, and the names of the tensors that stay arrays.
    """
    weights, kept, roles = [], [], _roles(model)
    for row in plan:
        name, info = model.names.get(row.path, row.path), model.info[row.path]
        if row.policy is not None and not is_kept(row, info):
            q = _planned(dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path), reason="", sites=()))
            shape, scheme = model.stored_form(row.path, q.shape, q.scheme)
            weights.append(Weight(name, shape, q.dtype.name, scheme, row.policy.activation, roles[name]))
        elif info.scheme is not None and row.sparsity is None:
            policy, activation = row.policy or info.policy, None
            if policy is not None:
                activation = policy.activation
            shape, scheme = model.stored_form(row.path, info.shape, info.scheme)
            weights.append(Weight(name, shape, info.dtype, scheme, activation, roles[name]))
        else:
            kept.append(name)
    return weights, kept


def _roles(model: Model) -> dict[str, Role]:
    """The role of each tensor by its name. One that no table has is a matmul's weight."""
    shapes = {model.names.get(path, path): info.shape for path, info in model.info.items()}
    kind = "safetensors" if "model_type" in model.metadata else model.kind  # a GGUF source has been renamed
    found = checkpoint_roles(shapes, model.metadata, kind=kind, use_modules=False).roles
    return {name: Role.MATMUL if one.role is Role.UNKNOWN else one.role for name, one in found.items()}


@functools.lru_cache(maxsize=1024)
def _planned(row: PlanRow) -> QArray:
    """The abstract QArray of a row."""
    x = jax.ShapeDtypeStruct(row.shape, row.dtype.replace("float64", "float32"))
    found: Any = jax.eval_shape(functools.partial(quantized_leaf, row=row), x)
    assert isinstance(found, QArray)
    return found

"""Plans how a recipe quantizes each tensor of a checkpoint."""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from .._registry import near_names
from ..array.quantize import quantize
from ..errors import QuantError, UnsupportedError
from ..io.checkpoint import TensorInfo
from ..io.safetensors.file import dtype_name
from ..models.decoder import forward
from ..models.names import params_from_paths
from ..models.roles.checkpoint import checkpoint_roles
from ..recipe.plan import Plan, recounted
from ..recipe.plan import plan as make_plan
from ..recipe.recipe import Recipe
from ..recipe.rows import PlanRow
from .model import Model, is_kept

_OTHER = "not a part of the language model"

KEEP = "keep"
"""The recipe that changes no tensor."""

RecipeSpec: TypeAlias = str | os.PathLike[str] | Recipe | Mapping[str, Any]
"""Anything that `fb.recipe` takes."""


def plan_model(model: Model, *, recipe: RecipeSpec | None = None, plan: str | os.PathLike[str] | Plan | None = None) -> Plan:
    """Plans what happens to every parameter of a model.

    A model that can be run is traced, so its matmuls decide roles and contraction axes. For other architectures
    `fewbit.models.checkpoint_roles` decides; a tensor of unknown role is not quantized unless a rule gives its path and an
    axis. A quantized tensor of the file that already has the planned scheme is kept exactly.

    Args:
        model: the model.
        recipe: anything that `fb.recipe` takes, or "keep", which changes no tensor.
        plan: a plan or its file, perhaps edited; instead of a recipe.

    Returns:
        The plan; `bytes_before` is the size in the file.

    Raises:
        QuantError: when not exactly one of `recipe` and `plan` is given, the recipe or the plan does not fit the model, or a
            tensor has a dtype that files cannot store.
        UnsupportedError: when the weights are codes of another quantizer.
    """
    if (recipe is None) == (plan is None):
        raise QuantError("pass either a recipe or a plan: exactly one of the two")
    _check_not_foreign(model)
    for path, info in model.info.items():
        if info.scheme is None:
            dtype_name(jnp.dtype(info.dtype), f"tensor {path!r} of {model.path}")
    if recipe == KEEP:
        return Plan(tuple(_kept(path, info, model.kind) for path, info in model.info.items()), KEEP)
    if recipe is not None:
        made = _resolved(model, recipe)
    elif isinstance(plan, Plan):
        made = _checked(plan, model)
    else:
        assert plan is not None
        made = _checked(Plan.load(plan), model)
    return dataclasses.replace(made, rows=tuple(_with_file_sizes(row, model.info[row.path], model.kind) for row in made))


def unknown_roles(plan: Plan) -> str | None:
    """A message that lists tensors of unknown role; None if there are none."""
    if not plan.unknown:
        return None
    listed = ", ".join(plan.unknown[:8])
    if len(plan.unknown) > 8:
        listed += f" and {len(plan.unknown) - 8} more"
    return (
        f"the role of {listed} is unknown; {'; '.join(plan.notes)}. Add a rule for each: its path and the policy null to keep "
        'it, or its path, a scheme and the contraction axis ("axis": -1 of [out, in]) to quantize it'
    )


def folded(rows: Iterable[PlanRow]) -> list[tuple[str, int, PlanRow]]:
    """Groups rows that differ only in the layer and expert numbers of their paths.

    Args:
        rows: the rows of a plan.

    Returns:
        The name (`layers/0-29/experts/0-7/up`), size and first row of each group, which has every combination of its numbers.
    """
    groups: dict[Any, list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((*split_numbers(row.path)[0], dataclasses.replace(row, path="", sites=())), []).append(row)
    complete = [part for group in groups.values() for part in _complete_groups(group)]
    order = {row.path: i for i, row in enumerate(rows)}
    return [(_group_name(group), len(group), group[0]) for group in sorted(complete, key=lambda group: order[group[0].path])]


def split_numbers(path: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text around the numbers of a path, and the numbers."""
    parts = re.split(r"(?<=[/.])(\d+)(?=[/.])", path)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _complete_groups(group: list[PlanRow]) -> Iterator[list[PlanRow]]:
    """Splits the group until each part has every combination of the numbers in its paths."""
    numbers = [split_numbers(row.path)[1] for row in group]
    places = [set(column) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, places)) == len(group):
        yield group
        return
    last = max(i for i, column in enumerate(places) if len(column) > 1)
    for number in sorted(places[last]):
        yield from _complete_groups([row for row, own in zip(group, numbers, strict=True) if own[last] == number])


def _group_name(group: list[PlanRow]) -> str:
    texts, _ = split_numbers(group[0].path)
    columns = zip(*(split_numbers(row.path)[1] for row in group), strict=True)
    ranges = [",".join(_ranges(sorted(set(column)))) for column in columns]
    return "".join(part for pair in itertools.zip_longest(texts, ranges, fillvalue="") for part in pair)


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Ranges of consecutive numbers, as `first-last`."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        yield "-".join(dict.fromkeys((str(values[0]), str(values[-1]))))


def _check_not_foreign(model: Model) -> None:
    """Refuses weights whose scales are separate tensors. They would be quantized as if codes were floats."""
    foreign = model.metadata.get("quantization_config")
    if foreign is not None:
        method = "unknown"
        if isinstance(foreign, dict):
            method = foreign.get("quant_method", method)
        raise UnsupportedError(
            f"{model.path} is quantized already (config.json's quantization_config, method {method!r}), with scales in "
            "tensors of their own; fewbit cannot dequantize that yet: start from the float checkpoint"
        )


def _resolved(model: Model, recipe: RecipeSpec) -> Plan:
    """The plan of a recipe, with rows in the order of the file.

    The recipe is resolved against the traced model, or against flat tensors.
    """
    others = dict.fromkeys(model.others)
    structs = {path: _struct(info) for path, info in model.info.items() if path not in others}
    config = model.config
    if config is None:
        shapes = {path: info.shape for path, info in model.info.items()}
        known = checkpoint_roles(shapes, model.metadata, kind=model.kind)
        plan = make_plan(None, structs, recipe=recipe, roles=known.roles)
        plan = dataclasses.replace(plan, notes=(f"the model cannot be traced ({model.why_not_run}); {known.note}",))
    else:
        tokens = jax.ShapeDtypeStruct((1, min(8, config.context)), jnp.int32)

        def logits(params: Mapping[str, jax.Array], tokens: jax.Array) -> jax.Array:
            return forward(params_from_paths(params, config), tokens, config)

        plan = make_plan(logits, structs, tokens, recipe=recipe)
    rows = {row.path: row for row in plan}
    for path in others:
        rows[path] = dataclasses.replace(_kept(path, model.info[path], model.kind), reason=_OTHER)
    return dataclasses.replace(plan, rows=tuple(rows[path] for path in model.info))


def _struct(info: TensorInfo) -> jax.ShapeDtypeStruct:
    """The parameter's shape and dtype; float64 is rounded to float32 before quantization."""
    return jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype.replace("float64", "float32")))


def _with_file_sizes(row: PlanRow, info: TensorInfo, kind: str) -> PlanRow:
    """Sets the bytes of the file, and the reason. The reason says what happens to a parameter that is stored quantized."""
    row, reason = dataclasses.replace(row, dtype=info.dtype, bytes_before=info.nbytes), ""
    after = _loaded_bytes(info, kind)
    if is_kept(row, info):
        reason = f"{info.stored} in the file, kept exactly"
    elif row.policy is not None or row.sparsity is not None:
        after = row.bytes_after
        if row.policy is None:
            after = row.size * _struct(info).dtype.itemsize
        if info.scheme is not None:
            reason = f"dequantized from {info.stored} first"
        elif info.dtype == "float64":
            reason = "float64, rounded to float32 first"
    elif info.scheme is not None:
        reason = f"stays {info.stored}, as stored in the file"
    # A saved plan has the reason already.
    parts = dict.fromkeys(part for part in (*row.reason.split("; "), *reason.split("; ")) if part)
    return dataclasses.replace(row, bytes_after=after, reason="; ".join(parts))


def _kept(path: str, info: TensorInfo, kind: str) -> PlanRow:
    after = _loaded_bytes(info, kind)
    return PlanRow(path, info.shape, info.dtype, None, (), (), (), info.nbytes, after, "kept as it is")


def _loaded_bytes(info: TensorInfo, kind: str) -> int:
    """The bytes of the loaded parameter. The file of another quantizer may store it in more or fewer."""
    if kind in ("fewbit", "orbax"):
        return info.nbytes
    loaded = jax.ShapeDtypeStruct(info.shape, jnp.dtype(info.dtype))
    if info.scheme is None:
        return loaded.size * loaded.dtype.itemsize
    nbytes = jax.eval_shape(functools.partial(quantize, scheme=info.scheme), loaded).nbytes
    if kind == "gguf" or info.stored.startswith("MLX"):
        return max(nbytes, info.nbytes)  # each expert of a stack may have a tensor scale of its own
    return nbytes


def _checked(plan: Plan, model: Model) -> Plan:
    """Checks a (possibly edited) plan against the model, and recounts its bytes."""
    rows = {row.path: row for row in plan}
    known = tuple(model.info)
    for path in rows:
        if path not in model.info:
            raise QuantError(
                f"the plan has a row for {path!r}, which {model.name} does not have; {near_names(path, known[:400])}"
            )
    if missing := [path for path in known if path not in rows]:
        raise QuantError(
            f"the plan lacks {', '.join(missing[:5])} of {model.name} ({len(missing)} rows); make a new plan for the model"
        )
    return dataclasses.replace(plan, rows=tuple(_checked_row(rows[path], info) for path, info in model.info.items()))


def _checked_row(row: PlanRow, info: TensorInfo) -> PlanRow:
    if row.shape != info.shape:
        raise QuantError(f"{row.path} has shape {info.shape}, but the plan was made for {row.shape}")
    return recounted(dataclasses.replace(row, dtype=info.dtype, bytes_before=info.nbytes))

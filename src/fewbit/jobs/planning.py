"""Plans of checkpoints: the recipe resolved against the traced network, with the real bytes of the file beside it."""

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import models
from .._registry import near_names
from ..array import is_qarray
from ..array.quantize import laid_along
from ..errors import QuantError, UnsupportedError
from ..io import TensorInfo
from ..io.safetensors_file import dtype_name
from ..recipe import Plan, PlanRow
from ..recipe import plan as make_plan
from ..recipe.matching import why_whole
from ..recipe.plan import quantized_leaf
from .model import Model

KEEP = "keep"
"""The recipe that changes no tensor."""


def plan_model(model: Model, *, recipe: Any = None, plan: str | os.PathLike[str] | Plan | None = None) -> Plan:
    """The plan for a model: what happens to every parameter.

    A network that can be run is traced, so that its products decide the axes. For flat tensors the last axis is taken for
    the contracted one, and the rows say so. Parameters that the file holds quantized are planned as the floats that they
    stand for; one whose scheme is the planned one is kept as it is.

    Args:
        model: the model.
        recipe: anything that `fb.recipe` takes, or "keep", which changes no tensor.
        plan: a plan, or the file of one, perhaps edited; takes the place of a recipe.

    Returns:
        The plan; `bytes_before` are those in the file.

    Raises:
        QuantError: when not exactly one of `recipe` and `plan` is given, when a rule matches nothing, when a tile does not
            fit where it must, when the plan is for another model, or when a tensor has a dtype that files cannot hold.
        UnsupportedError: when the weights are codes of another quantization.
    """
    if (recipe is None) == (plan is None):
        raise QuantError("pass either a recipe or a plan: exactly one of the two")
    _check_not_foreign(model)
    for path, info in model.info.items():
        if info.scheme is None:
            dtype_name(jnp.dtype(info.dtype), f"tensor {path!r} of {model.path}")
    if plan is not None:
        loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
        return _with_file_facts(_checked(loaded, model), model)
    if recipe == KEEP:
        return Plan(tuple(_kept(path, info) for path, info in model.info.items()), KEEP)
    return _with_file_facts(_resolved(model, recipe), model)


def folded(rows: Iterable[PlanRow]) -> list[tuple[str, int, PlanRow]]:
    """The rows with those that differ only in the number of their layer made one.

    Args:
        rows: the rows of a plan.

    Returns:
        For each group its name (`layers/0-29/attn/q`), how many parameters it stands for, and its first row.
    """
    groups: dict[Any, list[PlanRow]] = {}
    for row in rows:
        pattern = re.sub(r"(?<=[/.])\d+(?=[/.])", "{}", row.path)
        groups.setdefault((pattern, dataclasses.replace(row, path="", sites=())), []).append(row)
    return [(_group_name(key[0], group), len(group), group[0]) for key, group in groups.items()]


def _group_name(pattern: str, group: list[PlanRow]) -> str:
    if len(group) == 1:
        return group[0].path
    numbers = sorted(int(re.findall(r"(?<=[/.])\d+(?=[/.])", row.path)[0]) for row in group)
    return pattern.replace("{}", ",".join(_ranges(numbers)), 1)


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Runs of following numbers as `first-last`."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        yield str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def _check_not_foreign(model: Model) -> None:
    """Refuses weights whose scales stand in other tensors: quantized as they are, they would be quantized codes."""
    foreign = model.metadata.get("quantization_config")
    if foreign is not None:
        method = foreign.get("quant_method", "unknown") if isinstance(foreign, dict) else "unknown"
        raise UnsupportedError(
            f"{model.path} is quantized already (config.json's quantization_config, method {method!r}), with scales in "
            "tensors of their own; fewbit cannot decode that yet, so start from the float checkpoint"
        )


def _resolved(model: Model, recipe: Any) -> Plan:
    """The recipe resolved against the network, or against flat tensors."""
    structs = {path: _struct(info) for path, info in model.info.items()}
    config = model.config
    if config is None:
        plan = make_plan(None, structs, recipe=recipe)
        return dataclasses.replace(plan, rows=tuple(_explained(plan[path]) for path in model.info))
    tokens = jax.ShapeDtypeStruct((1, min(8, config.context)), jnp.int32)
    forward = functools.partial(_forward, config)
    plan = make_plan(forward, models.params_from_paths(structs, config), tokens, recipe=recipe)
    return dataclasses.replace(plan, rows=tuple(plan[path] for path in model.info))


def _forward(config: models.LlamaConfig, params: Any, tokens: Any) -> Any:
    return models.forward(params, tokens, config)


def _struct(info: TensorInfo) -> jax.ShapeDtypeStruct:
    """What the plan sees of a parameter; float64 is rounded to float32 before it is quantized."""
    return jax.ShapeDtypeStruct(info.shape, jnp.float32 if info.dtype == "float64" else jnp.dtype(info.dtype))


def _explained(row: PlanRow) -> PlanRow:
    """A row of a flat tensor, with what can be said without code in place of what uses it."""
    if row.policy is not None or row.sparsity is not None or row.reason.startswith("rule"):
        return row
    struct = jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype))
    return dataclasses.replace(row, reason=why_whole(struct) or "no rule matches it")


def _with_file_facts(plan: Plan, model: Model) -> Plan:
    """The plan with the bytes that the file really has, and what happens to parameters that it holds quantized."""
    return dataclasses.replace(plan, rows=tuple(_with_file_fact(row, model.info[row.path]) for row in plan))


def _with_file_fact(row: PlanRow, info: TensorInfo) -> PlanRow:
    row = dataclasses.replace(row, dtype=info.dtype, bytes_before=info.nbytes)
    if row.policy is None and row.sparsity is None:
        kept = f"stays {info.stored}, as the file holds it" if info.scheme is not None else ""
        return dataclasses.replace(row, bytes_after=info.nbytes, reason=_joined(row.reason, kept))
    if is_kept(row, info):
        return dataclasses.replace(
            row, bytes_after=info.nbytes, reason=_joined(row.reason, f"{info.stored} in the file, kept exactly")
        )
    if row.policy is None:
        row = dataclasses.replace(row, bytes_after=row.size * _struct(info).dtype.itemsize)
    if info.scheme is not None:
        return dataclasses.replace(row, reason=_joined(row.reason, f"decoded from {info.stored} first"))
    if info.dtype == "float64":
        return dataclasses.replace(row, reason=_joined(row.reason, "float64, rounded to float32 first"))
    return row


def _joined(*reasons: str) -> str:
    """The reasons that are there, each once (those of a saved plan come back)."""
    parts = [part for reason in reasons for part in reason.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def is_kept(row: PlanRow, info: TensorInfo) -> bool:
    """Whether the file holds a parameter in the planned scheme already, so that it passes through without loss."""
    if row.policy is None or info.scheme is None or row.stacked or row.sparsity is not None:
        return False
    return laid_along(row.policy.weight, row.axis, row.shape) == info.scheme


def _kept(path: str, info: TensorInfo) -> PlanRow:
    return PlanRow(path, info.shape, info.dtype, None, (), (), (), info.nbytes, info.nbytes, "kept as it is")


def _checked(plan: Plan, model: Model) -> Plan:
    """A plan from a file, in the order of the model and with its bytes counted anew, since it may have been edited."""
    rows = {row.path: row for row in plan}
    known = tuple(model.info)
    for path in rows:
        if path not in model.info:
            raise QuantError(
                f"the plan has a row for {path!r}, which {model.name} does not have; {near_names(path, known[:400])}"
            )
    if missing := [path for path in known if path not in rows]:
        raise QuantError(
            f"the plan lacks {', '.join(missing[:5])} of {model.name} ({len(missing)} rows); plan the model anew"
        )
    return dataclasses.replace(plan, rows=tuple(_checked_row(rows[path], info) for path, info in model.info.items()))


def _checked_row(row: PlanRow, info: TensorInfo) -> PlanRow:
    if row.shape != info.shape:
        raise QuantError(f"{row.path} has shape {info.shape}, but the plan was made for {row.shape}")
    if row.policy is None and row.sparsity is None:
        return row
    if not jnp.issubdtype(jnp.dtype(info.dtype), jnp.floating) or not info.shape:
        raise QuantError(
            f"the plan {'prunes' if row.policy is None else 'quantizes'} {row.path}, which is {info.dtype} of shape {info.shape}; "
            "set its policy to null"
        )
    if row.policy is not None and not row.axis:
        raise QuantError(
            f'the plan\'s row of {row.path} has a policy but no axis; write the contracted axis, as in "axis": [-1]'
        )
    try:
        after = jax.eval_shape(lambda x: quantized_leaf(x, row), _struct(info))
    except QuantError as error:
        raise QuantError(f"{row.path} {row.shape}: {error}") from error
    return dataclasses.replace(row, bytes_after=after.nbytes if is_qarray(after) else after.size * after.dtype.itemsize)

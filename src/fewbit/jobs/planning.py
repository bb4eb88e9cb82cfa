"""Plans of checkpoints: the recipe resolved against the traced network, with the real bytes of the file beside it."""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .. import models
from .._registry import near_names
from ..array.quantize import laid_along
from ..errors import QuantError, UnsupportedError
from ..io import TensorInfo
from ..io.safetensors_file import dtype_name
from ..recipe import Plan, PlanRow
from ..recipe import plan as make_plan
from ..recipe.plan import recounted
from .model import Model

KEEP = "keep"
"""The recipe that changes no tensor."""


def plan_model(model: Model, *, recipe: Any = None, plan: str | os.PathLike[str] | Plan | None = None) -> Plan:
    """The plan for a model: what happens to every parameter.

    A network that can be run is traced, so that its products decide roles and axes. For other networks the module classes of
    the architecture decide, where transformers is installed, and else a table of names, see `fewbit.models.checkpoint_roles`; a
    tensor of unknown role stays as it is unless a rule gives its path and an axis. Parameters that the file holds quantized are
    planned as the floats that they stand for; one whose scheme is the planned one is kept as it is.

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


def unknown_roles(plan: Plan) -> str | None:
    """What to say where tensors stay as they are because their roles are unknown; None where there are none.

    Args:
        plan: the plan of a model.
    """
    if not plan.unknown:
        return None
    listed = ", ".join(plan.unknown[:8]) + (f" and {len(plan.unknown) - 8} more" if len(plan.unknown) > 8 else "")
    return (
        f"the role of {listed} is unknown; {'; '.join(plan.notes)}. Give each of them a rule: its path and the policy null to leave "
        'it, or its path, a scheme and the contracted axis ("axis": -1 of [out, in]) to quantize it'
    )


def folded(rows: Iterable[PlanRow]) -> list[tuple[str, int, PlanRow]]:
    """The rows with those that differ only in the numbers of their path (layers, experts) made one.

    Args:
        rows: the rows of a plan.

    Returns:
        For each group its name (`layers/0-29/experts/0-7/up`), how many parameters it stands for, and its first row. Numbers of
        which not every combination is there are folded in the first place that differs only.
    """
    groups: dict[Any, list[PlanRow]] = {}
    for row in rows:
        groups.setdefault((*_split_numbers(row.path)[0], dataclasses.replace(row, path="", sites=())), []).append(row)
    whole = [part for group in groups.values() for part in _products(group)]
    places = {row.path: i for i, row in enumerate(rows)}
    return [(_group_name(group), len(group), group[0]) for group in sorted(whole, key=lambda group: places[group[0].path])]


def _split_numbers(path: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The text around the numbers of a path, and the numbers."""
    parts = re.split(r"(?<=[/.])(\d+)(?=[/.])", path)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def _products(group: list[PlanRow]) -> Iterator[list[PlanRow]]:
    """The group, split until each part has every combination of the numbers in its paths."""
    numbers = [_split_numbers(row.path)[1] for row in group]
    places = [set(column) for column in zip(*numbers, strict=True)]
    if math.prod(map(len, places)) == len(group):
        yield group
        return
    last = max(i for i, column in enumerate(places) if len(column) > 1)
    for number in sorted(places[last]):
        yield from _products([row for row, own in zip(group, numbers, strict=True) if own[last] == number])


def _group_name(group: list[PlanRow]) -> str:
    texts, _ = _split_numbers(group[0].path)
    columns = zip(*(_split_numbers(row.path)[1] for row in group), strict=True)
    ranges = [",".join(_ranges(sorted(set(column)))) for column in columns]
    return "".join(part for pair in itertools.zip_longest(texts, ranges, fillvalue="") for part in pair)


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
        shapes = {path: info.shape for path, info in model.info.items()}
        known = models.checkpoint_roles(shapes, model.metadata, kind=model.kind)
        plan = make_plan(None, structs, recipe=recipe, roles=known.roles)
        note = f"the network cannot be traced ({model.why_not_run}); {known.note}"
        return dataclasses.replace(_in_order(plan, model), notes=(note,))
    tokens = jax.ShapeDtypeStruct((1, min(8, config.context)), jnp.int32)
    forward = functools.partial(_forward, config)
    plan = make_plan(forward, models.params_from_paths(structs, config), tokens, recipe=recipe)
    return _in_order(plan, model)


def _in_order(plan: Plan, model: Model) -> Plan:
    """The plan with its rows in the order of the file."""
    rows = {row.path: row for row in plan}
    return dataclasses.replace(plan, rows=tuple(rows[path] for path in model.info))


def _forward(config: models.LlamaConfig, params: Any, tokens: Any) -> Any:
    return models.forward(params, tokens, config)


def _struct(info: TensorInfo) -> jax.ShapeDtypeStruct:
    """What the plan sees of a parameter; float64 is rounded to float32 before it is quantized."""
    return jax.ShapeDtypeStruct(info.shape, jnp.float32 if info.dtype == "float64" else jnp.dtype(info.dtype))


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
    return recounted(dataclasses.replace(row, dtype=info.dtype, bytes_before=info.nbytes))

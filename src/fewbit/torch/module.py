"""Quantizes a torch module in place."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..array.qarray import QArray
from ..errors import QuantError, UnsupportedError
from ..models.roles.modules import role_in_module
from ..ops.policy import Policy
from ..recipe import plan as make_plan
from ..recipe import recipe as as_recipe
from ..recipe.apply import check_storable
from ..recipe.plan import Plan
from ..recipe.quantize_row import non_finite_message, quantize_row
from ..recipe.recipe import Recipe
from ..recipe.role import Role
from ..recipe.roles import TensorRole, refined
from ..recipe.rows import PlanRow
from ..recipe.rule import Rule
from . import dlpack as handover
from .qtensor import QTensor, from_qarray
from .quantize import quantize

Rules = Sequence[Rule] | Mapping[str, str | Policy | None]
RecipeLike = str | os.PathLike[str] | Recipe | Mapping[str, Any]


def plan(module: nn.Module, recipe: RecipeLike, *, rules: Rules = ()) -> Plan:
    """Plans what `quantize_` does to each parameter of a module, and why.

    The class of a module determines the role of its parameters: `nn.Linear` (and `Conv1D` of transformers), `nn.Embedding`
    and `nn.Conv1d`, `2d`, `3d` have matmul, embedding and convolution weights. Parameters of other classes, biases and MoE
    routers (recognized by name) are not quantized, unless a rule names their role or, for an unknown role, gives the axis.

    Args:
        module: the module.
        recipe: a Recipe, or anything that `fewbit.recipe` takes: a preset's name, a scheme's name, a JSON file.
        rules: rules that come before the recipe's, or a mapping from a regular expression, matched against the full name in
            `named_parameters()`, to a scheme, a Policy or None (not quantized).

    Returns:
        The plan, a row for each of `named_parameters()`.

    Raises:
        QuantError: for a rule that matches nothing and is not optional, an unknown recipe, or lazy parameters.

    >>> from torch import nn
    >>> for row in plan(nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8)), "int4_g32"):
    ...     print(f"{row.path}: {row.kind}, {row.reason or 'a weight'}")
    0.weight: int4_g32, a weight
    0.bias: float32, a vector: no product contracts it
    1.weight: float32, a vector: no product contracts it
    1.bias: float32, a vector: no product contracts it
    """
    resolved = _with_rules(as_recipe(recipe), rules)
    if resolved.products:
        raise QuantError(
            f"recipe {resolved.name!r} has rules for products without a parameter, which torch modules do not support"
        )
    parameters = dict(module.named_parameters())
    if lazy := [name for name, parameter in parameters.items() if nn.parameter.is_lazy(parameter)]:
        raise QuantError(f"{', '.join(lazy[:5])}: lazy parameters have no shape yet; call the module on an input before")
    roles, refused = _roles(module)
    found = make_plan(None, {name: _abstract(p) for name, p in parameters.items()}, recipe=resolved, roles=roles)
    rows = {row.path: row for row in found}
    for path, reason in refused.items():
        if rows[path].policy is None:  # no rule with an axis insists
            rows[path] = dataclasses.replace(rows[path], reason=reason)
    return dataclasses.replace(found, rows=tuple(rows[name] for name in parameters))


@torch.no_grad()
def quantize_(module: nn.Module, recipe: RecipeLike | Plan, *, rules: Rules = ()) -> Plan:
    """Replaces the planned parameters of a module by QTensors, in place.

    They have no gradient. All checks precede the first replacement. Tied parameters stay tied.

    Args:
        module: the module, on a CPU or, for schemes with a Triton kernel, on CUDA.
        recipe: as for `plan`; or a Plan, such as an edited one.
        rules: as for `plan`; none with a Plan.

    Returns:
        The plan; it prints as a table of every parameter and how it is quantized, or why not.

    Raises:
        QuantError: as `plan`; for a plan of another module, or a parameter with NaN or infinite values or on the meta device.
        UnsupportedError: for a policy with delayed scaling, or if no backend supports the module's device.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8))
    >>> _ = quantize_(model, "nvfp4")
    >>> model[0].weight
    QTensor(nvfp4, float32[8, 64], 292 bytes, 4.562 bits/weight)
    """
    if isinstance(recipe, Plan) and rules:
        raise QuantError("rules cannot be combined with a Plan; a Plan has none, so edit its rows instead")
    planned = recipe if isinstance(recipe, Plan) else plan(module, recipe, rules=rules)
    parameters = dict(module.named_parameters())
    _check(planned, parameters)
    changed = {row.path: row for row in planned if row.policy is not None or row.sparsity is not None}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, name))
    for path, row in changed.items():
        parameter = parameters.pop(path)
        value = _quantized(parameter.detach(), row)
        new = nn.Parameter(value, requires_grad=parameter.requires_grad and not isinstance(value, QTensor))
        for owner, name in owners[id(parameter)]:
            setattr(owner, name, new)
    return planned


def _with_rules(recipe: Recipe, rules: Rules) -> Recipe:
    if isinstance(rules, Mapping):
        rules = [Rule(path, Policy(spec) if isinstance(spec, str) else spec) for path, spec in rules.items()]
    return dataclasses.replace(recipe, rules=(*rules, *recipe.rules))


def _abstract(parameter: torch.Tensor) -> QArray | jax.ShapeDtypeStruct:
    """The shape and dtype of a parameter, or of the leaves of a QTensor."""
    if isinstance(parameter, QTensor):
        return parameter.form.qarray(map(_abstract, parameter.leaves))
    return jax.ShapeDtypeStruct(tuple(parameter.shape), jnp.dtype(str(parameter.dtype).removeprefix("torch.")))


def _roles(module: nn.Module) -> tuple[dict[str, TensorRole], dict[str, str]]:
    """The roles of parameters, and why some are never quantized."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, TensorRole] = {}
    refused: dict[str, str] = {}
    for owner in module.modules():
        for own_name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = names[id(parameter)]
            role = role_in_module(owner, own_name, tuple(parameter.shape))
            if own_name != "bias" and (kind := _without_qtensors(owner)):
                refused[name] = f"a parameter of {kind}, which does not support QTensors"
            elif role is not None:
                found.setdefault(name, dataclasses.replace(role, source=type(owner).__name__))
    for name in refused:  # even where another module, which shares the parameter, supports it
        found.pop(name, None)
    final = refined(
        {name: role.role for name, role in found.items()} | dict.fromkeys(set(names.values()) - set(found), Role.UNKNOWN)
    )
    roles: dict[str, TensorRole] = {}
    for name, role in final.items():
        if role is Role.UNKNOWN:
            continue
        if name in found and found[name].role is role:
            roles[name] = found[name]
        else:
            roles[name] = TensorRole(role, source="its name")
    return roles, refused


def _without_qtensors(module: nn.Module) -> str | None:
    """The kind of a module that multiplies by other functions than those of a QTensor; None for others."""
    if isinstance(module, nn.MultiheadAttention | NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention"
    if isinstance(module, nn.EmbeddingBag | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        return f"nn.{type(module).__name__}"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an nn.Embedding with max_norm"
    return None


def _check(planned: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises if the plan is for another module or a parameter cannot be quantized."""
    rows = {row.path: row for row in planned}
    if set(rows) != set(parameters):
        missing, extra = sorted(set(parameters) - set(rows)), sorted(set(rows) - set(parameters))
        raise QuantError(f"the plan is for another module: it lacks {missing[:5]}, and the module lacks {extra[:5]}")
    check_storable(planned)
    for path, row in rows.items():
        if row.policy is None and row.sparsity is None:
            continue
        parameter = parameters[path]
        if tuple(parameter.shape) != row.shape:
            raise QuantError(f"{path} has shape {tuple(parameter.shape)}, but the plan was made for {row.shape}")
        if parameter.is_meta:
            advice = "load the checkpoint before, or see what becomes of each parameter by fewbit.torch.plan"
            raise QuantError(f"{path} is on the meta device, which has no numbers to quantize; {advice}")
        # Torch has no isfinite of float8.
        numbers = parameter.float() if parameter.itemsize == 1 else parameter
        if bad := int((~torch.isfinite(numbers)).sum()):
            advice = "repair the checkpoint, or exclude the parameter by a rule with None"
            raise QuantError(non_finite_message({path: (bad, parameter.numel())}, advice))


def _quantized(parameter: torch.Tensor, row: PlanRow) -> torch.Tensor:
    """One parameter, quantized by its row of the plan."""
    if handover.refusal(parameter.device) is None:
        x = handover.array(parameter if parameter.dtype in handover.FLOATS else parameter.float())
        value = quantize_row(x, row)
        if isinstance(value, QArray):
            return from_qarray(value, parameter.device).to(parameter.dtype)
        return handover.tensor(value).to(parameter.device, parameter.dtype)
    if row.sparsity is not None or row.stacked or row.policy is None or not row.policy.is_weight_only:
        reason = handover.refusal(parameter.device) or ""
        raise UnsupportedError(f"{row.path} cannot be quantized as {row.kind} here", {"jax": reason})
    return quantize(parameter, row.policy.weight, row.axis)

"""Quantizes the parameters of a torch module in place, by the same recipes and with the same plan as fewbit's in JAX."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..array import QArray
from ..errors import QuantError, UnsupportedError
from ..ops import Policy
from ..ops.uses import Use
from ..recipe import Plan, Recipe, Rule
from ..recipe import recipe as as_recipe
from ..recipe.apply import check_storable, quantize_row
from ..recipe.matching import contracted_axes, matched_rules, why_whole
from ..recipe.plan import quantized_leaf
from ..recipe.rows import PlanRow
from . import handover
from .qtensor import QTensor, from_qarray
from .quantize import quantize

Rules = Sequence[Rule] | Mapping[str, str | Policy | None]

_ROUTER = re.compile(r"(?:.*\.)?(?:routers?|router_gate)(?:\..*)?|(?:.*\.)?(?:gate|wg|gating|shared_expert_gate)")
"""Names of modules that choose experts: what follows them decides for whole tokens."""


def plan(module: nn.Module, recipe: Any, *, rules: Rules = ()) -> Plan:
    """What `quantize_` does to each parameter of a module, and why.

    The class of a module says what its parameter is: `nn.Linear` (and `Conv1D` of transformers), `nn.Embedding` and `nn.Conv1d`,
    `2d`, `3d` have weights of products and look-ups. Parameters of all other classes stay as they are, and so do biases and
    routers of experts; a rule with an axis of its own quantizes any matrix.

    Args:
        module: the module.
        recipe: a Recipe, or anything that `fewbit.recipe` takes: a preset's name, a scheme's name, a JSON file.
        rules: rules that come before the recipe's, or a mapping from a regular expression, which must match the whole name in
            `named_parameters()`, to a scheme, a Policy or None (stays as it is).

    Returns:
        The plan, a row for each of `named_parameters()`.

    Raises:
        QuantError: for a rule that matches nothing and is not optional, or an unknown recipe.

    >>> from torch import nn
    >>> for row in plan(nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8)), "int4_g32"):
    ...     print(f"{row.path}: {row.kind}, {row.reason or 'a weight'}")
    0.weight: int4_g32, a weight
    0.bias: float32, the bias of Linear
    1.weight: float32, a parameter of LayerNorm
    1.bias: float32, a parameter of LayerNorm
    """
    resolved = _with_rules(as_recipe(recipe), rules)
    if resolved.products:
        raise QuantError(
            f"recipe {resolved.name!r} has rules for products without a parameter, which a torch module does not show"
        )
    parameters, known = dict(module.named_parameters()), _known_uses(module)
    uses = {name: known[name][0] for name in parameters}
    matched = matched_rules(resolved, uses)
    rows = tuple(_row(name, parameters[name], *known[name], matched[name]) for name in parameters)
    return Plan(rows, resolved.name)


@torch.no_grad()
def quantize_(module: nn.Module, recipe: Any, *, rules: Rules = ()) -> Plan:
    """Quantizes the parameters of a module in place: each becomes a QTensor without a gradient, the rest stays.

    Everything is checked before the first parameter changes. A parameter that several modules share stays shared.

    Args:
        module: the module, on a CPU or, for schemes with a Triton kernel, on CUDA.
        recipe: as for `plan`; or a Plan, such as an edited one.
        rules: as for `plan`; not beside a Plan.

    Returns:
        The plan; printed, it is a table of every parameter: quantized how, or left alone and why.

    Raises:
        QuantError: as `plan`; for a plan of another module, or a parameter that is not finite: its name, and how many.
        UnsupportedError: for a policy with delayed scaling, and where no backend quantizes on the module's device.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8))
    >>> _ = quantize_(model, "nvfp4")
    >>> model[0].weight
    QTensor(nvfp4, float32[8, 64], 292 bytes, 4.562 bits/weight)
    """
    if isinstance(recipe, Plan) and rules:
        raise QuantError("rules come before those of a recipe; a Plan has none, so edit its rows instead")
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
    return dataclasses.replace(recipe, rules=(*rules, *recipe.rules)) if rules else recipe


def _known_uses(module: nn.Module) -> dict[str, tuple[tuple[Use, ...], str]]:
    """The uses of each parameter by the classes of the modules that have it, and why there are none."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, tuple[tuple[Use, ...], str]] = dict.fromkeys(names.values(), ((), ""))
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            uses, why_not = _uses_by(owner, path, name)
            before, _ = found[names[id(parameter)]]
            found[names[id(parameter)]] = (*before, *uses), "" if before or uses else why_not
    return found


def _uses_by(owner: nn.Module, path: str, name: str) -> tuple[tuple[Use, ...], str]:
    """How a module of a known class uses its parameter, or why that is not known."""
    kind = type(owner)
    if name != "weight":
        return (), f"the bias of {kind.__name__}" if name == "bias" and _is_known(
            owner
        ) else f"a parameter of {kind.__name__}"
    if isinstance(owner, nn.Embedding):
        return (Use("take", (-2,)),), ""
    if isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        window = tuple(range(2 - owner.weight.ndim, 0))
        return (Use("conv_general_dilated", (*window, 1 - owner.weight.ndim)),), ""
    if isinstance(owner, NonDynamicallyQuantizableLinear):
        return (), "read by nn.MultiheadAttention, not by the Linear that has it"
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    if not isinstance(owner, nn.Linear) and not is_conv1d:
        return (), f"a parameter of {kind.__name__}"
    if _ROUTER.fullmatch(path):
        return (), "a router or gate by its name; a rule with an axis quantizes it"
    return (Use("dot_general", (-2,) if is_conv1d else (-1,)),), ""


def _is_known(owner: nn.Module) -> bool:
    return isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or type(owner).__name__ == "Conv1D"


def _row(name: str, parameter: torch.Tensor, uses: tuple[Use, ...], why_not: str, rule: Rule | None) -> PlanRow:
    """The row of one parameter under the rule that matches it."""
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    ops = tuple(dict.fromkeys(use.op for use in uses))
    before = parameter.nbytes
    row = PlanRow(name, shape, dtype, None, (), (), ops, before, before)
    if isinstance(parameter, QTensor):
        return dataclasses.replace(row, reason=f"quantized already, as {parameter.scheme.name}")
    if not parameter.is_floating_point():
        return dataclasses.replace(row, reason=f"{dtype} is not floating")
    leaf = jax.ShapeDtypeStruct(shape, np.float32)
    if rule is not None and not why_not and (reason := why_whole(leaf)) is not None:
        return dataclasses.replace(row, reason=reason)
    if rule is None:
        return dataclasses.replace(row, reason=why_not or f"no rule matches it; used by {', '.join(ops)}")
    if rule.policy is None and rule.sparsity is None:
        return dataclasses.replace(row, reason=f"rule {rule.path!r} leaves it")
    axis = rule.axis or contracted_axes(name, uses)
    if axis is None or len(shape) < 2:
        return dataclasses.replace(row, reason=why_not or "no product contracts it")
    axis = tuple(a if a < 0 else a - len(shape) for a in axis)
    sparsity = rule.sparsity and dataclasses.replace(rule.sparsity, axis=rule.sparsity.axis or axis[-1:])
    row = dataclasses.replace(row, policy=rule.policy, axis=axis if rule.policy else (), sparsity=sparsity)
    planned = row
    try:
        stored = jax.eval_shape(lambda x: quantized_leaf(x, planned), leaf)
    except QuantError as error:
        raise QuantError(f"{name} {shape}: {error}") from error
    after = stored.nbytes if isinstance(stored, QArray) else before
    note = "takes more bytes than before: few elements share a scale" if after > before else ""
    return dataclasses.replace(row, bytes_after=after, reason=note)


def _check(planned: Plan, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raises before anything is changed, where the plan is for another module or a parameter cannot be quantized."""
    rows = {row.path: row for row in planned}
    if set(rows) != set(parameters):
        missing, extra = sorted(set(parameters) - set(rows)), sorted(set(rows) - set(parameters))
        raise QuantError(f"the plan is for another module: without {missing[:5]}, and with {extra[:5]} that are not here")
    check_storable(planned)
    for path, row in rows.items():
        if row.policy is None and row.sparsity is None:
            continue
        parameter = parameters[path]
        if tuple(parameter.shape) != row.shape:
            raise QuantError(f"{path} has shape {tuple(parameter.shape)}, but the plan was made for {row.shape}")
        if bad := int((~torch.isfinite(parameter)).sum()):
            raise QuantError(
                f"{path} holds {bad} values that are NaN or infinite, of {parameter.numel()}; a tile with one decodes to NaN. "
                "Repair the checkpoint, or leave the parameter out by a rule with None"
            )


def _quantized(parameter: torch.Tensor, row: PlanRow) -> torch.Tensor:
    """One parameter as its row says."""
    if handover.refusal(parameter.device) is None:
        x = handover.array(parameter if parameter.dtype in handover.FLOATS else parameter.float())
        value = quantize_row(x, row)
        if isinstance(value, QArray):
            q = from_qarray(value, parameter.device)
            return q.to(parameter.dtype) if q.dtype != parameter.dtype else q
        return handover.tensor(value).to(parameter.device, parameter.dtype)
    if row.sparsity is not None or row.stacked or row.policy is None or not row.policy.is_weight_only:
        reason = handover.refusal(parameter.device) or ""
        raise UnsupportedError(f"{row.path} cannot be quantized as {row.kind} here", {"jax": reason})
    return quantize(parameter, row.policy.weight, row.axis)

"""Quantizing a tree of parameters by a plan or a recipe."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..array import is_qarray
from ..errors import QuantError, UnsupportedError
from ..ops.uses import array_paths, parameter_paths
from .plan import Plan, quantized_leaf
from .plan import plan as make_plan
from .rows import PlanRow


def quantize_params(params: Any, plan: Any) -> Any:
    """The tree with the parameters quantized that a plan names, and pruned where it says so.

    A sparse parameter keeps the largest of its weights as they are now, whatever the schedule of its training; one that is
    masked already, such as by `fewbit.training.ModelSparsity.apply`, keeps those that its mask left.

    It can be traced: under `jax.jit`, with `out_shardings`, parameters are initialised, quantized and sharded in one program;
    `jax.eval_shape` gives the tree to restore a checkpoint into. A traced array has no values to look at: nothing is
    refused then, and a NaN or an infinity makes its tile NaN, as in `fb.quantize`.

    Args:
        params: the tree of arrays; other leaves are left as they are.
        plan: a Plan; or a recipe, or anything that `fb.recipe` takes, which is resolved without code: every parameter of two
            or more axes is taken to be contracted along its last.

    Returns:
        A tree of the same structure, QArrays in the place of quantized leaves and all others as they were.

    Raises:
        QuantError: when the plan and the tree do not have the same parameters and shapes, a parameter that the plan quantizes
            is a QArray already, or an array, not traced, holds NaN or infinity: its name, and how many.
        UnsupportedError: for a policy with delayed scaling, whose scales come from training, and for a plan that gives products
            without a parameter a policy, which no parameter can carry.

    >>> tree = quantize_params({"w": jnp.ones((4, 64)), "b": jnp.ones(4)}, "int8")
    >>> tree["w"]
    QArray(int8, float32[4, 64], 272 bytes, 8.500 bits/weight)
    """
    resolved = plan if isinstance(plan, Plan) else make_plan(None, params, recipe=plan)
    leaves = array_paths(params)
    check_storable(resolved)
    rows = {row.path: row for row in resolved}
    if set(rows) != set(leaves):
        missing, extra = sorted(set(leaves) - set(rows)), sorted(set(rows) - set(leaves))
        raise QuantError(f"the plan is for another tree: without {missing[:5]}, and with {extra[:5]} that are not here")
    treedef = jax.tree.structure(params, is_leaf=is_qarray)
    every = parameter_paths(params).items()
    return jax.tree.unflatten(treedef, [quantize_row(x, rows[path]) if path in rows else x for path, x in every])


def check_storable(plan: Plan) -> None:
    """Refuses a plan that quantized parameters cannot carry out on their own.

    Args:
        plan: the plan.

    Raises:
        UnsupportedError: for a policy with delayed scaling, and for a product without a parameter that has a policy.
    """
    if planned := [row.name for row in plan.products if row.policy is not None]:
        raise UnsupportedError(
            f"the plan quantizes products without a parameter ({', '.join(planned[:5])}), and quantized parameters cannot "
            "carry that; set their policy to null"
        )
    for row in plan:
        _check_row(row)


def _check_row(row: PlanRow) -> None:
    if row.policy is not None and row.policy.delayed is not None:
        raise UnsupportedError(
            f"{row.path}: policy {row.policy} takes its scales from the steps before, and there are none outside training; "
            "take a recipe with scales of the array at hand, such as te_fp8_currentscaling"
        )


def quantize_row(leaf: Any, row: PlanRow) -> Any:
    """One parameter as its row says: pruned and quantized after a check that it is finite, or as it is.

    Args:
        leaf: the parameter.
        row: its row of a plan.

    Returns:
        A QArray, a pruned array where the row has a sparsity only, or `leaf` where it has none of the two.

    Raises:
        QuantError: for another shape than the plan's, a QArray, or values that are not finite, unless they are traced.
        UnsupportedError: for a policy with delayed scaling.
    """
    if row.policy is None and row.sparsity is None:
        return leaf
    _check_row(row)
    if tuple(leaf.shape) != row.shape:
        raise QuantError(f"{row.path} has shape {tuple(leaf.shape)}, but the plan was made for {row.shape}")
    if is_qarray(leaf):
        raise QuantError(
            f"{row.path} is quantized already, as {leaf.scheme.name}, and the plan is for the float parameter; plan the tree as "
            "it is, which leaves QArrays as they are, or decode it by fb.dequantize"
        )
    x = jnp.asarray(leaf)
    bad = 0 if isinstance(x, Tracer) else int(jnp.sum(~jnp.isfinite(x)))  # a traced array has no values yet
    if bad:
        raise QuantError(
            f"{row.path} holds {bad} values that are NaN or infinite, of {x.size}; a tile with one decodes to NaN. "
            f"Repair the checkpoint, or leave the parameter out of recipe by a rule with policy null"
        )
    # Rows of alike layers are made equal, so that they compile once.
    alike = dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path), reason="", sites=())
    return jax.jit(quantized_leaf, static_argnums=1)(x, alike)

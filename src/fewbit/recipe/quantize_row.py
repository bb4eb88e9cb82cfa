"""Quantizes one parameter by its plan row."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize.dispatch import quantize
from ..ops.qat.serving_quantize import for_each
from ..ops.qat.serving_tiles import axis_within, cast
from .matching import Leaf
from .rows import PlanRow


def check_row(row: PlanRow) -> None:
    """Refuses a policy with delayed scaling."""
    if row.policy is not None and row.policy.delayed is not None:
        raise UnsupportedError(
            f"{row.path}: policy {row.policy} uses delayed scaling, whose scales come from earlier training steps, and "
            "there are none outside training; use a recipe with current scaling, such as te_fp8_currentscaling"
        )


def quantize_row(leaf: Leaf, row: PlanRow) -> Any:
    """Quantizes and prunes one parameter as its row of a plan says.

    Args:
        leaf: the parameter; it must be finite where it is quantized or pruned.
        row: its row of a plan.

    Returns:
        A QArray, a pruned array where the row has a sparsity only, or `leaf` where it has neither.

    Raises:
        QuantError: for another shape than the plan's, a QArray, or values that are not finite, unless they are traced.
        UnsupportedError: for a policy with delayed scaling.
    """
    if row.policy is None and row.sparsity is None:
        return leaf
    check_row(row)
    if tuple(leaf.shape) != row.shape:
        raise QuantError(f"{row.path} has shape {tuple(leaf.shape)}, but the plan was made for {row.shape}")
    if isinstance(leaf, QArray):
        raise QuantError(
            f"{row.path} is quantized already, as {leaf.scheme.name}, and the plan is for the float parameter; plan the "
            "tree as it is, which leaves QArrays unchanged, or decode it by fb.dequantize"
        )
    x = jnp.asarray(leaf)
    if not isinstance(x, Tracer) and (bad := int(jnp.sum(~jnp.isfinite(x)))):  # a traced array has no values yet
        raise QuantError(
            f"{row.path} holds {bad} values that are NaN or infinite, of {x.size}; a tile with one decodes to NaN. "
            f"Repair the checkpoint, or exclude the parameter by a rule with policy null"
        )
    return quantize_finite(x, row)


def quantize_finite(x: jax.Array, row: PlanRow) -> jax.Array | QArray:
    """Quantizes and prunes a parameter that was checked already, compiled once for identical layers.

    Args:
        x: the finite parameter.
        row: its row of a plan, of the same shape.
    """
    alike = dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path), reason="", sites=())
    return jax.jit(quantized_leaf, static_argnums=1)(x, alike)


def quantized_leaf(x: jax.Array, row: PlanRow) -> jax.Array | QArray:
    """Prunes, casts and quantizes a parameter, each element of its stacked axes on its own."""
    if row.sparsity is not None:
        x = row.sparsity.pruned(x)
    if row.policy is None:
        return x
    scheme: Scheme = row.policy.weight
    axis = axis_within(row.axis, row.stacked, len(row.shape))
    q = for_each(row.stacked, lambda x: quantize(x, scheme, axis=axis), cast(x, row.casts)).astype(x.dtype)
    if row.policy.is_weight_only:
        return q
    return dataclasses.replace(q, policy=row.policy)

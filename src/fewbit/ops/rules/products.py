"""Products and look-ups: the equations that compute from a quantized operand."""

from typing import Any

import jax
import jax.numpy as jnp

from ...array import is_qarray
from ..dot import dot_general
from ..take import take
from .rule import AbstractEvaluator, NoRuleError, Rule


def _dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    _refuse_out_sharding(params)
    numbers, precision, preferred = params["dimension_numbers"], params["precision"], params["preferred_element_type"]

    def quantized_dot_general(lhs: Any, rhs: Any) -> jax.Array:
        return dot_general(lhs, rhs, numbers, precision, preferred)

    return [evaluator.shared((numbers, precision, preferred), quantized_dot_general)(*values)]


def _refuse_out_sharding(params: Any) -> None:
    if params.get("out_sharding") is not None:
        raise NoRuleError("an out_sharding is asked of the product")


def _gather(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A gather of whole rows along one axis, as `jnp.take` and `x[ids]` make them."""
    q, indices = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axes = numbers.start_index_map
    takes_rows = (
        is_qarray(q)
        and len(axes) == 1
        and tuple(numbers.collapsed_slice_dims) == tuple(axes)
        and not numbers.operand_batching_dims
        and all(size == (1 if a == axes[0] else n) for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)))
    )
    if not takes_rows:
        raise NoRuleError("only whole rows along one axis are gathered from a quantized array")
    axis, at = axes[0], indices[..., 0]
    rows = take(q, at, axis, mode="clip")
    rows = jnp.moveaxis(rows, range(axis, axis + at.ndim), [a for a in range(rows.ndim) if a not in numbers.offset_dims])
    if eqn.params["mode"] in (None, jax.lax.GatherScatterMode.FILL_OR_DROP):
        fill = eqn.params.get("fill_value")
        is_inside = (at >= 0) & (at < q.shape[axis])  # lax counts no negative index from the end
        is_inside = jnp.expand_dims(is_inside, numbers.offset_dims)
        rows = jnp.where(is_inside, rows, jnp.full_like(rows, jnp.nan if fill is None else fill))
    return [rows]


PRODUCT: dict[str, Rule] = {"dot_general": _dot_general, "gather": _gather}
"""The rules of products and look-ups."""

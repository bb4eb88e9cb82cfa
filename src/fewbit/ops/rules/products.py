"""Products and look-ups: the equations that compute from a quantized operand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..conv import conv_general_dilated
from ..dot import dot_general, untransposed
from ..ragged import ragged_dot_general
from ..standin import stands_in
from ..take import take
from .rule import AbstractEvaluator, NoRuleError, Rule


def _dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    names = ("dimension_numbers", "precision", "preferred_element_type", "out_sharding")
    numbers, precision, preferred, sharding = (eqn.params[name] for name in names)
    lhs, rhs, numbers = untransposed(values[0], values[1], numbers)  # here, for the piece that is shared sees leaves only

    def quantized_dot_general(lhs: Any, rhs: Any) -> jax.Array:
        return dot_general(lhs, rhs, numbers, precision, preferred, out_sharding=sharding)

    return [evaluator.shared((numbers, precision, preferred, sharding), quantized_dot_general)(lhs, rhs)]


def _conv_general_dilated(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    _refuse_out_sharding(params)
    known = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")
    known = (*known, "batch_group_count", "precision", "preferred_element_type")
    settings = {name: params[name] for name in known}

    def quantized_conv(lhs: Any, rhs: Any) -> jax.Array:
        return conv_general_dilated(lhs, rhs, **settings)

    return [evaluator.shared(("conv_general_dilated", *settings.values()), quantized_conv)(*values)]


def _ragged_dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    _refuse_out_sharding(params)
    lhs, rhs, group_sizes = values
    if stands_in(group_sizes):
        raise NoRuleError("the group sizes are quantized")
    numbers, precision, preferred = (
        params[name] for name in ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")
    )
    offset = params["group_offset"]

    def quantized_ragged_dot(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        return ragged_dot_general(lhs, rhs, group_sizes, numbers, precision, preferred, offset)

    # An offset may be an array, which cannot name a piece to share.
    if offset is not None:
        return [quantized_ragged_dot(lhs, rhs, group_sizes)]
    return [evaluator.shared(("ragged_dot", numbers, precision, preferred), quantized_ragged_dot)(lhs, rhs, group_sizes)]


def _refuse_out_sharding(params: Any) -> None:
    if params.get("out_sharding") is not None:
        raise NoRuleError("an out_sharding is asked of the product")


def _gather(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return [gathered(eqn, values, lambda at, axis: take(values[0], at, axis, mode="clip"))]


def gathered(eqn: Any, values: list[Any], taken: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
    """A gather of whole rows along one axis, as `jnp.take`, `x[ids]` and `vmap` of `x[i]` make them.

    Args:
        eqn: the gather.
        values: its operands: what stands for the array, and the indices.
        taken: gives the rows at indices along an axis, those out of bounds like the nearest.

    Returns:
        What the gather gives.

    Raises:
        NoRuleError: for any other gather.
    """
    q, indices = values
    numbers = eqn.params["dimension_numbers"]
    axis = _row_axis(q, eqn)
    at = indices[..., numbers.start_index_map.index(axis)]
    rows = taken(at, axis)
    if axis not in numbers.collapsed_slice_dims:
        rows = jnp.expand_dims(rows, axis + at.ndim)
    rows = jnp.moveaxis(rows, range(axis, axis + at.ndim), [a for a in range(rows.ndim) if a not in numbers.offset_dims])
    if eqn.params["mode"] in (None, jax.lax.GatherScatterMode.FILL_OR_DROP):
        fill = eqn.params.get("fill_value")
        is_inside = (at >= 0) & (at < q.shape[axis])  # lax counts no negative index from the end
        is_inside = jnp.expand_dims(is_inside, numbers.offset_dims)
        rows = jnp.where(is_inside, rows, jnp.full_like(rows, jnp.nan if fill is None else fill))
    return rows


def _row_axis(q: Any, eqn: Any) -> int:
    """The axis of which a gather takes single elements, whole in all other axes."""
    numbers, sizes, mode = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.params["mode"]
    refusal = NoRuleError("only whole rows along one axis are gathered from a quantized array")
    if not stands_in(q) or numbers.operand_batching_dims:
        raise refusal
    indexed = numbers.start_index_map
    if len(indexed) > 1 and mode in (jax.lax.GatherScatterMode.CLIP, jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS):
        indexed = [a for a in indexed if sizes[a] != q.shape[a]]  # a whole axis can begin only at 0
    is_whole = all(size == n for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if a not in indexed)
    collapsed = set(numbers.collapsed_slice_dims)
    if len(indexed) != 1 or not is_whole or sizes[indexed[0]] != 1 or not collapsed <= set(indexed):
        raise refusal
    return indexed[0]


PRODUCT: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "ragged_dot_general": _ragged_dot_general,
    "gather": _gather,
}
"""The rules of products and look-ups."""

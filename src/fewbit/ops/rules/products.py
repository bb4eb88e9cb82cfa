"""Products and look-ups: the equations that compute from a quantized operand."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._tiles import Tile
from ...array import QArray, is_qarray
from ...kernels.quantize import dequantize
from ..conv import conv_general_dilated
from ..dot import dot_general, untransposed
from ..lookup import Lookup
from ..ragged import ragged_dot_general
from ..standin import stands_in
from .joining import is_packed_along
from .rule import AbstractEvaluator, NoRuleError, Rule, bound


def _dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    names = ("dimension_numbers", "precision", "preferred_element_type", "out_sharding")
    numbers, *settings = (eqn.params[name] for name in names)
    lhs, rhs, numbers = untransposed(values[0], values[1], numbers)  # here, because a jitted product has leaves only
    product = _jitted_dot_general if evaluator.is_traced else quantized_dot_general
    return [product(lhs, rhs, numbers, *settings)]


def quantized_dot_general(lhs: Any, rhs: Any, numbers: Any, precision: Any, preferred: Any, sharding: Any) -> jax.Array:
    """`fb.dot_general` with settings by place, which `jax.jit` takes as static."""
    return dot_general(lhs, rhs, numbers, precision, preferred, out_sharding=sharding)


_CONV_SETTINGS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"),
    *("batch_group_count", "precision", "preferred_element_type"),
)


def _conv_general_dilated(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    _refuse_out_sharding(eqn.params)
    product = _jitted_conv if evaluator.is_traced else quantized_conv
    return [product(*values, *(eqn.params[name] for name in _CONV_SETTINGS))]


def quantized_conv(lhs: Any, rhs: Any, *settings: Any) -> jax.Array:
    """`fb.conv_general_dilated` with settings by place, which `jax.jit` takes as static."""
    return conv_general_dilated(lhs, rhs, *settings)


def _ragged_dot_general(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    _refuse_out_sharding(params)
    lhs, rhs, group_sizes = values
    if stands_in(group_sizes):
        raise NoRuleError("the group sizes are quantized")
    settings = [params[name] for name in ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")]
    offset = params["group_offset"]
    # An offset may be an array, which cannot be static.
    product = _jitted_ragged_dot if evaluator.is_traced and offset is None else quantized_ragged_dot
    return [product(lhs, rhs, group_sizes, *settings, offset)]


def quantized_ragged_dot(lhs: Any, rhs: Any, group_sizes: Any, *settings: Any) -> jax.Array:
    """`fb.ops.ragged_dot_general` with settings by place, which `jax.jit` takes as static."""
    return ragged_dot_general(lhs, rhs, group_sizes, *settings)


# One function for every evaluation, so that JAX traces each product once for operands that are alike.
_jitted_dot_general = jax.jit(quantized_dot_general, static_argnums=(2, 3, 4, 5))
_jitted_conv = jax.jit(quantized_conv, static_argnums=tuple(range(2, 2 + len(_CONV_SETTINGS))))
_jitted_ragged_dot = jax.jit(quantized_ragged_dot, static_argnums=(3, 4, 5, 6))


def _refuse_out_sharding(params: Any) -> None:
    if params.get("out_sharding") is not None:
        raise NoRuleError("an out_sharding is asked of the product")


def _gather(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A look-up: only the rows taken are decoded, unless it takes elements of an axis along which codes share bytes."""
    q, indices = values
    if not is_qarray(q):
        raise NoRuleError("the indices stand for an array")
    lookup = Lookup.of(eqn)
    assert lookup is not None
    if any(is_packed_along(q, axis) for axis in (*lookup.indexed, *lookup.batch)) or not eqn.outvars[0].aval.shape:
        return bound(eqn, [dequantize(q), indices])
    return [filled(eqn, dequantize(_rows(eqn, lookup, q, indices)), indices)]


def _rows(eqn: Any, lookup: Lookup, q: QArray, indices: jax.Array) -> QArray:
    """What a look-up takes, still quantized, indices out of bounds like the nearest."""

    def on_tiles(leaf: Any) -> Any:
        return _rows(eqn, lookup, leaf, indices) if is_qarray(leaf) else gathered(eqn, leaf, indices, q.tiles)

    codes, scale = gathered(eqn, q.codes, indices, (1,) * q.ndim), on_tiles(q.scale)
    kept = {place: axis for axis, place in lookup.places.items() if axis in lookup.whole}
    tiles = [
        q.tiles[kept[place]] if place in kept else None if scale.shape[place] == 1 else 1 for place in range(codes.ndim)
    ]
    packed = q.scheme.pack_axis + q.ndim
    # An axis whose codes have bytes of their own may be gone; any other is as good then.
    pack_axis = lookup.places[packed] - codes.ndim if packed in lookup.whole else -1
    zero = None if q.zero_point is None else on_tiles(q.zero_point)
    tensor = None if q.tensor_scale is None else on_tiles(q.tensor_scale)
    scheme = q.scheme.with_tiles(tuple(tiles), pack_axis)
    return QArray(codes, scale, zero, tensor, scheme, q.dtype, q.slack, q.policy)


def gathered(eqn: Any, leaf: jax.Array, indices: jax.Array, tiles: Sequence[Tile]) -> jax.Array:
    """What a gather takes of an array that has an element for each tile of the one that it is for.

    Args:
        eqn: the gather.
        leaf: the array: its axes, some 1 long for all of the other's elements, and perhaps more behind them.
        indices: the indices.
        tiles: for each axis how many elements of the other array an element of this one is for.

    Returns:
        The elements, indices out of bounds like the nearest; 1 long along the axes of the indices where these do not matter.

    Raises:
        NoRuleError: for parts of an axis that are neither one element nor all, and for tiles along an axis of the batch.
    """
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    behind = range(len(eqn.outvars[0].aval.shape), len(eqn.outvars[0].aval.shape) + leaf.ndim - len(shape))
    own = list(leaf.shape)
    for axis in numbers.operand_batching_dims:
        if tiles[axis] not in (None, 1):
            raise NoRuleError(f"tiles run along axis {axis}, of which each element has its own indices")
    indexed = [axis for axis in range(len(shape)) if sizes[axis] != shape[axis] or axis in numbers.collapsed_slice_dims]
    for axis in (*indexed, *numbers.operand_batching_dims):
        if sizes[axis] != 1:
            raise NoRuleError(
                f"the gather takes {sizes[axis]} of {shape[axis]} elements of axis {axis}; one or all can be taken"
            )
        own[axis] = 1
    if all(leaf.shape[axis] == 1 for axis in (*indexed, *numbers.operand_batching_dims)):
        indices = jnp.zeros((*(1 for _ in indices.shape[:-1]), indices.shape[-1]), indices.dtype)
    at = []
    for place, axis in enumerate(numbers.start_index_map):
        start = jnp.clip(indices[..., place], 0, shape[axis] - sizes[axis])
        at.append(
            start // (tiles[axis] or shape[axis]) if axis in indexed and leaf.shape[axis] > 1 else jnp.zeros_like(start)
        )
    for axis, at_axis in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        if indices.shape[at_axis] != leaf.shape[axis]:
            leaf = jnp.broadcast_to(leaf, [indices.shape[at_axis] if a == axis else n for a, n in enumerate(leaf.shape)])
    numbers = numbers._replace(offset_dims=(*numbers.offset_dims, *behind))
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(leaf, jnp.stack(at, -1), numbers, tuple(own), mode=mode)


def filled(eqn: Any, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows that a gather takes, with its fill value where an index is out of bounds, if it asks for one."""
    if eqn.params["mode"] not in (None, jax.lax.GatherScatterMode.FILL_OR_DROP):
        return rows
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.invars[0].aval.shape
    last = jnp.asarray([shape[axis] - sizes[axis] for axis in numbers.start_index_map], indices.dtype)
    is_inside = jnp.all(
        (indices >= 0) & (indices <= jnp.broadcast_to(last, indices.shape)), axis=-1
    )  # lax counts no negative index from the end
    is_inside = jnp.expand_dims(is_inside, tuple(map(int, numbers.offset_dims)))
    fill = eqn.params.get("fill_value")
    return jnp.where(is_inside, rows, jnp.full_like(rows, jnp.nan if fill is None else fill))


PRODUCT: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "ragged_dot_general": _ragged_dot_general,
    "gather": _gather,
}
"""The rules of products and look-ups."""

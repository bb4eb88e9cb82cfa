"""Rules of products and look-ups with quantized operands."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ...._tiles import Tile
from ....array.leaves import with_leaves
from ....array.qarray import QArray, is_qarray
from ....kernels.quantize.dispatch import dequantize
from ...conv import conv_general_dilated
from ...dot import dot_general, picked_dot, untransposed
from ...ragged import ragged_dot_general
from ..evaluator import Evaluator, Rule, bound
from ..indices import shape_of
from ..lookup import Lookup, widened
from ..proxy import NoRuleError, is_proxy
from .concatenate import is_cut_along, spread
from .scan_slice import ScanSlice, sliced

_DOT_SETTINGS = operator.itemgetter("dimension_numbers", "precision", "preferred_element_type", "out_sharding")


def _dot_general(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    numbers, *settings = _DOT_SETTINGS(eqn.params)
    lhs, rhs, numbers = untransposed(values[0], values[1], numbers)  # here, because a jitted product has leaves only
    return [_compiled(quantized_dot_general, evaluator.is_traced)(lhs, rhs, numbers, *settings)]


def _dot_general_of_slice(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A product with one element of a stack, which kernels read in place."""
    lhs, rhs = values
    params = eqn.params
    if not isinstance(rhs, ScanSlice) or params["out_sharding"] is not None:
        return sliced(evaluator, eqn, values)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    if rhs.is_transposed:
        right, right_batch = (tuple(1 - axis for axis in axes) for axes in (right, right_batch))
    numbers = ((left, right), (left_batch, right_batch))
    settings = (numbers, params["precision"], params["preferred_element_type"])
    return [picked_dot(jnp.asarray(lhs), rhs.stack, rhs.index, *settings)]


ScanSlice.rules.update(dot_general=_dot_general_of_slice)  # type: ignore[attr-defined]


def quantized_dot_general(
    lhs: PyTree,
    rhs: PyTree,
    numbers: tuple[Any, ...],
    precision: Any,
    preferred: DTypeLike | None,
    sharding: Any,
) -> jax.Array:
    """`fb.dot_general` with positional settings, so that `jax.jit` can take them as static."""
    return dot_general(lhs, rhs, numbers, precision, preferred, out_sharding=sharding)


_CONV_SETTINGS = (
    *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count"),
    *("batch_group_count", "precision", "preferred_element_type"),
)


def _conv_general_dilated(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _refuse_out_sharding(eqn.params)
    settings = (eqn.params[name] for name in _CONV_SETTINGS)
    return [_compiled(conv_general_dilated, evaluator.is_traced)(*values, *settings)]


def _ragged_dot_general(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    params = eqn.params
    _refuse_out_sharding(params)
    lhs, rhs, group_sizes = values
    if is_proxy(group_sizes):
        raise NoRuleError("the group sizes are quantized")
    settings = [params[name] for name in ("ragged_dot_dimension_numbers", "precision", "preferred_element_type")]
    offset = params["group_offset"]
    # An offset may be an array, which cannot be static.
    product = _compiled(ragged_dot_general, evaluator.is_traced and offset is None)
    return [product(lhs, rhs, group_sizes, *settings, offset)]


# One function for all evaluations, so that JAX traces each product once for operands of equal shapes and schemes.
_JITTED: dict[Callable[..., jax.Array], Callable[..., jax.Array]] = {
    quantized_dot_general: jax.jit(quantized_dot_general, static_argnums=(2, 3, 4, 5)),
    conv_general_dilated: jax.jit(conv_general_dilated, static_argnums=tuple(range(2, 2 + len(_CONV_SETTINGS)))),
    ragged_dot_general: jax.jit(ragged_dot_general, static_argnums=(3, 4, 5, 6)),
}


def _compiled(product: Callable[..., jax.Array], is_traced: bool) -> Callable[..., jax.Array]:
    return _JITTED[product] if is_traced else product


def _refuse_out_sharding(params: Mapping[str, object]) -> None:
    if params.get("out_sharding") is not None:
        raise NoRuleError("an out_sharding is requested for the product")


def _gather(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A look-up; only the taken rows are decoded, unless it indexes the packed axis."""
    q, indices = values
    if not is_qarray(q):
        raise NoRuleError("the indices are quantized")
    lookup = Lookup.of(eqn)
    assert lookup is not None
    if any(is_cut_along(q, axis) for axis in (*lookup.indexed, *lookup.batch)) or not shape_of(eqn.outvars[0]):
        return bound(eqn, [dequantize(q), indices])
    return [filled(eqn, dequantize(_rows(eqn, lookup, q, indices)), indices)]


def _rows(eqn: jex_core.JaxprEqn, lookup: Lookup, q: QArray, indices: jax.Array) -> QArray:
    """The taken rows, still quantized; out-of-bounds indices are clipped."""

    def on_tiles(leaf: jax.Array | QArray) -> jax.Array | QArray:
        if isinstance(leaf, QArray):
            return _rows(eqn, lookup, leaf, indices)
        return gathered(eqn, leaf, indices, q.tiles)

    rows = with_leaves(q, on_tiles, codes=gathered(eqn, q.codes, indices, (1,) * q.ndim))
    tiles: list[Tile] = [None if count == 1 else 1 for count in rows.scale.shape]
    for axis in lookup.whole:
        tiles[lookup.places[axis]] = q.tiles[axis]
    # An axis whose codes are one per byte may be removed; any other serves as the packed axis then.
    packed, pack_axis = q.scheme.pack_axis + q.ndim, -1
    if packed in lookup.places:
        pack_axis = lookup.places[packed] - len(tiles)
    return dataclasses.replace(rows, scheme=q.scheme.with_tiles(tuple(tiles), pack_axis))


def gathered(eqn: jex_core.JaxprEqn, leaf: jax.Array, indices: jax.Array, tiles: Sequence[Tile]) -> jax.Array:
    """Gathers from a leaf that has one element per tile.

    The tiles are those of the indexed array, whose scales are such a leaf. The leaf has the array's axes, some of length 1,
    and perhaps trailing ones. Out-of-bounds indices are clipped; the result has length 1 along axes of indices that do not
    matter. NoRuleError for slices that take neither one element nor all of an axis, and for tiles along a batch axis.
    """
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    indices = widened(indices)
    ndim = len(shape_of(eqn.outvars[0]))
    behind = range(ndim, ndim + leaf.ndim - len(shape))
    own = list(leaf.shape)
    for axis in numbers.operand_batching_dims:
        if tiles[axis] not in (None, 1):
            raise NoRuleError(f"tiles run along axis {axis}, of which each element has its own indices")
    indexed = [axis for axis in range(len(shape)) if sizes[axis] != shape[axis] or axis in numbers.collapsed_slice_dims]
    taken = (*indexed, *numbers.operand_batching_dims)
    for axis in taken:
        if sizes[axis] != 1:
            raise NoRuleError(
                f"the gather takes {sizes[axis]} of {shape[axis]} elements of axis {axis}; one or all can be taken"
            )
        own[axis] = 1
    # Codes have tiles of 1, and are taken for each index although their axis may have length 1.
    if taken and all(leaf.shape[axis] == 1 and tiles[axis] != 1 for axis in taken):
        indices = jnp.zeros((*(1 for _ in indices.shape[:-1]), indices.shape[-1]), indices.dtype)
    at = []
    for place, axis in enumerate(numbers.start_index_map):
        start = jnp.clip(indices[..., place], 0, shape[axis] - sizes[axis])
        if axis in indexed and leaf.shape[axis] > 1:
            at.append(start // (tiles[axis] or shape[axis]))
        else:
            at.append(jnp.zeros_like(start))
    for axis, at_axis in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        leaf = spread(leaf, axis, indices.shape[at_axis])
    numbers = numbers._replace(offset_dims=(*numbers.offset_dims, *behind))
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(leaf, jnp.stack(at, -1), numbers, tuple(own), mode=mode)


def filled(eqn: jex_core.JaxprEqn, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """The rows of a gather, with its fill value (if any) for out-of-bounds indices."""
    if eqn.params["mode"] not in (None, jax.lax.GatherScatterMode.FILL_OR_DROP):
        return rows
    numbers, sizes, shape = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], shape_of(eqn.invars[0])
    indices = widened(indices)
    last = jnp.asarray([shape[axis] - sizes[axis] for axis in numbers.start_index_map], indices.dtype)
    # In lax, a negative index does not count from the end.
    is_inside = jnp.all((indices >= 0) & (indices <= jnp.broadcast_to(last, indices.shape)), axis=-1)
    is_inside = jnp.expand_dims(is_inside, tuple(map(int, numbers.offset_dims)))
    fill = eqn.params.get("fill_value")
    if fill is None:
        fill = jnp.nan
    # The NaN is NumPy's, because jax_debug_nans stops at a JAX array of NaN.
    return jnp.where(is_inside, rows, np.asarray(fill, rows.dtype))


PRODUCT: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "ragged_dot_general": _ragged_dot_general,
    "gather": _gather,
}
"""The rules of products and look-ups."""

"""Gathering from a quantized array: only the rows that are taken are decoded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._tiles import Tile, from_front
from ..array import QArray, refuse_invalid
from ..errors import QuantError
from ..kernels.quantize import dequantize

_MODES = (None, "fill", "clip", "wrap")


def take(q: QArray | ArrayLike, indices: ArrayLike, axis: int, *, mode: str | None = None) -> jax.Array:
    """`jnp.take` from an array that may be quantized, as an embedding does: `q[indices]` along one axis, decoded.

    Only the rows taken are decoded, unless `axis` is the packed one (whose bytes hold several codes), which decodes all.

    Args:
        q: the array; one that is not quantized goes to `jnp.take`.
        indices: whole numbers of any shape.
        axis: the axis that they index.
        mode: as in `jnp.take`: None or "fill" gives NaN for indices out of bounds, "clip" the nearest row, "wrap" counts
            from the other end.

    Returns:
        An array in `q.dtype`: the axes of `q` with `axis` replaced by those of `indices`.

    Raises:
        QuantError: for another mode, an axis that `q` does not have, and indices that are not whole numbers.

    >>> from fewbit.kernels.quantize import quantize
    >>> take(quantize(jnp.eye(4), "mxfp8"), jnp.array([2, 0]), 0).tolist()
    [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """
    if mode not in _MODES:
        raise QuantError(f"mode is {mode!r}; must be one of fill, clip, wrap")
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise QuantError(f"indices are {indices.dtype.name}; must be whole numbers")
    if not isinstance(q, QArray):
        return jnp.take(jnp.asarray(q), indices, axis=axis, mode=mode)
    refuse_invalid(q, "q")
    axis = from_front(axis, q.ndim)
    if axis == q.scheme.pack_axis + q.ndim:
        return jnp.take(dequantize(q), indices, axis=axis, mode=mode)
    length = q.shape[axis]
    flat = indices.reshape(-1).astype(jnp.int32)
    at = flat % length if mode == "wrap" else jnp.where(flat < 0, flat + length, flat) if mode != "clip" else flat
    rows = dequantize(taken_rows(q, jnp.clip(at, 0, length - 1), axis))
    if mode in (None, "fill"):
        is_inside = ((at >= 0) & (at < length)).reshape([-1 if a == axis else 1 for a in range(q.ndim)])
        rows = jnp.where(is_inside, rows, jnp.full_like(rows, jnp.nan))
    return rows.reshape(*q.shape[:axis], *indices.shape, *q.shape[axis + 1 :])


def taken_rows(q: QArray, at: jax.Array, axis: int) -> QArray:
    """The rows at indices within bounds along an axis that is not packed, still quantized, each with its own scale."""
    tile = q.tiles[axis] or 1

    def on_tiles(leaf: Any) -> Any:
        if leaf.shape[axis] == 1:
            return leaf
        place = at // tile
        return taken_rows(leaf, place, axis) if isinstance(leaf, QArray) else jnp.take(leaf, place, axis=axis)

    zero = None if q.zero_point is None else on_tiles(q.zero_point)
    tensor = None if q.tensor_scale is None else on_tiles(q.tensor_scale)
    tiles: list[Tile] = list(q.tiles)
    tiles[axis] = None if q.scale.shape[axis] == 1 else 1
    scheme = q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis)
    codes = jnp.take(q.codes, at, axis=axis)
    return QArray(codes, on_tiles(q.scale), zero, tensor, scheme, np.dtype(q.dtype), q.slack, q.policy)

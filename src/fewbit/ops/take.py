"""`take` from a quantized array; decodes only the taken rows."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._tiles import from_front
from ..array.leaves import taken_rows
from ..array.qarray import QArray
from ..array.validity import refuse_invalid
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize
from .interpret.lookup import widened

_MODES = (None, "fill", "clip", "wrap")


def take(q: QArray | ArrayLike, indices: ArrayLike, axis: int, *, mode: str | None = None) -> jax.Array:
    """`jnp.take` from an array that may be quantized, decoded: an embedding look-up.

    Only the taken rows are decoded, unless `axis` is the packed one (whose bytes hold several codes): then all are.

    Args:
        q: the array; a float array goes to `jnp.take`.
        indices: integers of any shape.
        axis: the axis to index.
        mode: as in `jnp.take`: None or "fill" gives NaN for indices out of bounds, "clip" the nearest row, "wrap" counts
            from the other end.

    Returns:
        An array in `q.dtype`: the axes of `q` with `axis` replaced by those of `indices`.

    Raises:
        QuantError: for another mode, an axis that `q` does not have, and indices that are not integers.

    >>> from fewbit.kernels.quantize import quantize
    >>> take(quantize(jnp.eye(4), "mxfp8"), jnp.array([2, 0]), 0).tolist()
    [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    """
    if mode not in _MODES:
        raise QuantError(f"mode is {mode!r}; must be one of fill, clip, wrap")
    indices = jnp.asarray(indices)
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise QuantError(f"indices are {indices.dtype.name}; must be integers")
    if not isinstance(q, QArray):
        return jnp.take(jnp.asarray(q), indices, axis=axis, mode=mode)
    refuse_invalid(q, "q")
    axis = from_front(axis, q.ndim)
    if axis == q.scheme.pack_axis + q.ndim:
        return jnp.take(dequantize(q), indices, axis=axis, mode=mode)
    length = q.shape[axis]
    flat = widened(indices).reshape(-1)
    at = flat
    if mode == "wrap":
        at = flat % length
    elif mode != "clip":
        at = jnp.where(flat < 0, flat + length, flat)
    rows = dequantize(taken_rows(q, jnp.clip(at, 0, length - 1).astype(jnp.int32), axis))
    if mode in (None, "fill"):
        is_inside = jnp.expand_dims((at >= 0) & (at < length), [a for a in range(q.ndim) if a != axis])
        # The NaN is a Python scalar, because jax_debug_nans stops at an array of NaN.
        rows = jnp.where(is_inside, rows, jnp.nan)
    return rows.reshape(*q.shape[:axis], *indices.shape, *q.shape[axis + 1 :])

"""Codes, scales and zero points as the C++ kernels read them (`cpp/weight.h`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..array.packing import codes_per_unit
from ..array.qarray import QArray
from ..array.quantize import dequantize, scale_values
from ..array.scheme import Scheme
from ..formats.format import AbstractFormat
from ..formats.integer import Integer

_TABLE, _SIGNED, _UNSIGNED = range(3)
_FLOATS = {"e4m3fn": (3, 2.0**8), "e5m2": (4, 1.0), "e2m3": (5, 1.0), "e3m2": (6, 1.0)}
"""The kind of a float format's codes, and how many times too small the kernels decode them."""

_NO_ZERO, _WHOLE, _OFFSET = range(3)
LEVELS = ("portable", "avx2", "avx512")
"""The instruction sets of attention."""

FLOAT_LEVELS = (*LEVELS, "amx")
"""The instruction sets of float products."""

INTEGER_LEVELS = ("portable", "avx2", "avxvnni", "avx512", "amx")
"""The instruction sets of integer products."""


def stream_order(scheme: Scheme) -> np.ndarray:
    """The code at each position of a packed group; empty if in order."""
    packing, bits = scheme.packing, scheme.format.bits
    if not packing.interleave and not packing.high_first:
        return np.zeros(0, np.int32)
    unit = codes_per_unit(bits, packing)
    group = packing.interleave or (0,)
    places = np.arange(unit)
    if packing.high_first:
        places = places.reshape(-1, 8 // bits)[:, ::-1].reshape(-1)
    return (places // len(group) * len(group) + np.asarray(group)[places % len(group)]).astype(np.int32)


def code_values(scheme: Scheme) -> tuple[int, np.ndarray, float]:
    """How the kernels decode a scheme: the kind, the 256-entry table, and a common factor."""
    fmt = scheme.format
    if isinstance(fmt, Integer) and fmt.bits >= 4 and (fmt.step == 1 or scheme.zero_point is None):
        return (_SIGNED if fmt.signed else _UNSIGNED), _table(fmt) / np.float32(fmt.step), fmt.step
    if fmt.name in _FLOATS and scheme.zero_point is None:
        kind, factor = _FLOATS[fmt.name]
        return kind, _table(fmt) / np.float32(factor), factor
    return _TABLE, _table(fmt), 1.0


def _table(fmt: AbstractFormat) -> np.ndarray:
    """The value of each of 256 codes; those of narrower formats repeat."""
    values = fmt.values().astype(np.float32)
    full = np.concatenate([values, np.repeat(values[-1:], 2**fmt.bits - len(values))])
    return np.tile(full, 256 // len(full))


def scale_buffers(q: QArray) -> tuple[jax.Array, jax.Array]:
    """The stored scales, and the table of their values if they are stored as codes."""
    stored = q.scheme.scale
    if isinstance(stored, AbstractFormat):
        return q.scale, jnp.asarray(_table(stored))
    if not isinstance(stored, Scheme):
        return q.scale, flat(None, jnp.float32)
    if stored.format.bits == 8 and q.scale.scale.size == 1 and q.scale.tensor_scale is None:
        codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 1, 256)
        every = QArray(codes, q.scale.scale, q.scale.zero_point, None, stored.with_tiles((None,) * 3, -1), q.scale.dtype)
        return q.scale.codes, dequantize(every, jnp.float32).reshape(256)
    return scale_values(q), flat(None, jnp.float32)


def stored_zeros(q: QArray) -> tuple[int, jax.Array, jax.Array]:
    """The kind of the zero points, their stored form, and their table."""
    empty = flat(None, jnp.float32)
    if q.zero_point is None:
        return _NO_ZERO, jnp.zeros((1, 1, 1), jnp.float32), empty
    # One zero point may apply to all blocks of an axis; the kernel reads one for each scale.
    zero = jnp.broadcast_to(q.zero_point, (q.zero_point.shape[0], *q.scale.shape[1:]))
    if isinstance(q.scheme.zero_point, AbstractFormat):
        return _WHOLE, zero, jnp.asarray(_table(q.scheme.zero_point))
    return _OFFSET, zero, empty


def flat(array: jax.Array | None, dtype: DTypeLike) -> jax.Array:
    """The array with one axis; an empty one of `dtype` for None."""
    if array is None:
        return jnp.zeros(0, dtype)
    return array.reshape(-1)

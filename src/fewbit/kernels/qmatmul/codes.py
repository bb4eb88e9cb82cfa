"""In which types codes are multiplied: integers in int8 into int32, 8-bit floats as they are, all others in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from ...array import QArray
from ...array.packing import unpack
from ...formats import AbstractFormat, Integer

_NATIVE = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}


def common_types(lhs: AbstractFormat, rhs: AbstractFormat) -> tuple[tuple[Any, Any], Any]:
    """The dtypes that the codes of two formats are multiplied in, and the dtype of the sum.

    Returns:
        The dtypes of the left's and the right's values, and the accumulator's. int8 holds every signed code; unsigned codes of
        8 bits do not fit, and go through float32, where sums are exact up to 2**24.
    """
    if all(isinstance(fmt, Integer) and fmt.step == 1 and fmt.max < 128 for fmt in (lhs, rhs)):
        return (jnp.int8, jnp.int8), jnp.int32
    if lhs.name in _NATIVE and rhs.name in _NATIVE:
        return (_NATIVE[lhs.name], _NATIVE[rhs.name]), jnp.float32
    return (jnp.float32, jnp.float32), jnp.float32


def code_values(q: QArray, dtype: Any) -> jax.Array:
    """The numbers that the codes stand for, without scales, in a dtype that `common_types` gives."""
    fmt, axis = q.scheme.format, q.scheme.pack_axis
    codes = unpack(q.codes, fmt.bits, q.shape[axis], q.scheme.packing, axis=axis)
    if _NATIVE.get(fmt.name) == dtype:
        return jax.lax.bitcast_convert_type(codes, dtype)
    return fmt.decode(codes).astype(dtype)

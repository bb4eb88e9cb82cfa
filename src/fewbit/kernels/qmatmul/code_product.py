"""Multiplies quantized operands by their codes.

With codes `c` and `d`, zero points `z` and `w` and scales `s` and `t` that are constant along the contraction, a bilinear `P` is

    P(s (c - z), t (d - w)) = s t (P(c, d) - z P(1, d) - w P(c, 1) + z w P(1, 1))

where `1` is an operand of ones, reduced to length one where `P` allows it. With integer codes every term is an exact int32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...array.packing import unpack
from ...array.qarray import QArray
from ...array.quantize import expanded_scale, expanded_zero_point
from ...errors import UnsupportedError
from ...formats.format import FORMATS, AbstractFormat
from .integer_codes import fits_int32, is_whole, shift

Axes: TypeAlias = tuple[int, ...]

_NATIVE = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}


@dataclasses.dataclass(frozen=True)
class CodeProduct:
    """A bilinear op described for integer and FP8 code multiplication.

    Attributes:
        product: multiplies two arrays of the operands' shapes and sums in a dtype.
        placed: broadcasts a scale of one operand (True: the left) to the result; None where the scale varies along the contraction.
        contracted: the contracted axes of the left and of the right operand.
        thin: the axes of each operand that may have length one instead, and then do so in the result.
        takes_two_types: whether both operands may have different dtypes.
    """

    product: Callable[[jax.Array, jax.Array, Any], jax.Array]
    placed: Callable[[jax.Array, bool], Any]
    contracted: tuple[Axes, Axes]
    thin: tuple[Axes, Axes]
    takes_two_types: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CodeOperand:
    """One operand as arrays: decoded codes, expanded scales, and zero points or None."""

    values: Any
    scale: Any
    zero: Any


def code_product(pairing: CodeProduct, lhs: QArray, rhs: QArray, asked: str | None = None) -> jax.Array | None:
    """Multiplies two quantized operands by their codes, in float32.

    Returns None where scales vary along the contraction, or no accumulator is exact for these codes. The accumulator dtype
    `asked` is int32 for integers and float32 for others if None.

    Raises:
        UnsupportedError: when these codes cannot be summed in `asked`.
    """
    types = sum_types(lhs, rhs, pairing, asked)
    scales = expanded_scale(lhs), expanded_scale(rhs)
    if types is None or any(pairing.placed(s, is_left) is None for s, is_left in zip(scales, (True, False), strict=True)):
        return None
    dtypes, accumulator = types
    left, right = (side(q, dtype) for q, dtype in zip((lhs, rhs), dtypes, strict=True))
    return scaled_sums(pairing, left, right, accumulator)


def scaled_sums(pairing: CodeProduct, left: CodeOperand, right: CodeOperand, accumulator: np.dtype) -> jax.Array:
    """The product of codes, corrected for zero points and scaled; float32."""
    sums = pairing.product(left.values, right.values, accumulator)
    ones = [_ones(s.values, axes) for s, axes in zip((left, right), pairing.thin, strict=True)]
    zeros: list[Any] = [None, None]
    for at, operand in enumerate((left, right)):
        if operand.zero is not None:
            zeros[at] = pairing.placed(operand.zero, at == 0)
    if zeros[0] is not None:
        sums = sums - zeros[0] * pairing.product(ones[0], right.values, accumulator)
    if zeros[1] is not None:
        sums = sums - zeros[1] * pairing.product(left.values, ones[1], accumulator)
    if zeros[0] is not None and zeros[1] is not None:
        sums = sums + zeros[0] * zeros[1] * pairing.product(ones[0], ones[1], accumulator)
    wide = sums.astype(jnp.float32)
    if accumulator == jnp.bfloat16:
        wide = jax.lax.reduce_precision(wide, 8, 7)  # under jit XLA would elide the rounding to bfloat16 and back
    return wide * pairing.placed(left.scale, True) * pairing.placed(right.scale, False)


def sum_types(lhs: QArray, rhs: QArray, pairing: CodeProduct, asked: str | None) -> tuple[tuple[Any, Any], Any] | None:
    """The dtypes in which codes are multiplied and summed. None if none is exact.

    int8 represents every signed code, and every unsigned 8-bit code minus 128 if zero points are shifted too. Other integers
    use float32, where sums are exact up to 2**24; so do formats for which XLA has no product.

    Raises:
        UnsupportedError: when `asked` is not a dtype that these codes can be summed in.
    """
    if is_whole(lhs.scheme) and is_whole(rhs.scheme):
        counts = [int(np.prod([q.shape[a] for a in axes])) for q, axes in zip((lhs, rhs), pairing.contracted, strict=True)]
        if not fits_int32(lhs.scheme, rhs.scheme, min(counts)):
            return None
        return (jnp.int8, jnp.int8), _granted(asked, ("int32",), "sums of integer codes are exact in int32")
    if lhs.zero_point is not None or rhs.zero_point is not None:
        return None
    native = [native_float(q.scheme.format) for q in (lhs, rhs)]
    if None not in native and (pairing.takes_two_types or native[0] == native[1]):
        reason = "8-bit floats are summed in float32 or bfloat16"
        return (native[0], native[1]), _granted(asked, ("float32", "bfloat16"), reason)
    reason = (
        f"XLA has no product of {lhs.scheme.format.name} and {rhs.scheme.format.name} here, so both are converted to float32"
    )
    return (jnp.float32, jnp.float32), _granted(asked, ("float32",), reason)


def refuse_accumulator(asked: str | None) -> None:
    """Raises UnsupportedError for an accumulator other than float32, which dequantized operands need."""
    reason = "an operand is a float array or its scales vary along the contraction, so operands are dequantized to float32"
    _granted(asked, ("float32",), reason)


def _granted(asked: str | None, possible: tuple[str, ...], reason: str) -> np.dtype:
    """The accumulator dtype: `asked`, or the first possible one."""
    if asked is not None and asked not in possible:
        raise UnsupportedError("a product cannot follow its policy", {f"accumulator={asked!r}": reason})
    return jnp.dtype(asked or possible[0])


def side(q: QArray, dtype: DTypeLike, *, but: int | None = None) -> CodeOperand:
    """An operand's arrays; scales along the axis `but` stay one per block."""
    zero = None
    if q.zero_point is not None:
        zero = expanded_zero_point(q, but=but) - shift(q.scheme)
    return CodeOperand(code_values(q, dtype), expanded_scale(q, but=but), zero)


def code_values(q: QArray, dtype: DTypeLike) -> jax.Array:
    """The decoded codes without scales, in a dtype of `sum_types`."""
    fmt, axis = q.scheme.format, q.scheme.pack_axis
    codes = unpack(q.codes, fmt.bits, q.shape[axis], q.scheme.packing, axis=axis)
    if native_float(fmt) == dtype or (dtype == jnp.int8 and fmt == FORMATS["int8"]):
        return jax.lax.bitcast_convert_type(codes, dtype)
    return (fmt.decode(codes) - shift(q.scheme)).astype(dtype)


def native_float(fmt: AbstractFormat) -> Any:
    """The JAX dtype of an 8-bit float format; None if JAX has none."""
    return _NATIVE.get(fmt.name)


def _ones(values: jax.Array, thin: Axes) -> jax.Array:
    """Ones in place of `values`, of length one along the axes `thin`."""
    shape = list(values.shape)
    for axis in thin:
        shape[axis] = 1
    return jnp.ones(shape, values.dtype)

"""How codes are multiplied: in which types, summed in which, and what scales and zero points make of the sum.

With codes `c` and `d`, zero points `z` and `w` and scales `s` and `t` that are constant along what a product `P` sums,

    P(s (c - z), t (d - w)) = s t (P(c, d) - z P(1, d) - w P(c, 1) + z w P(1, 1))

where `1` is an operand of ones, as thin as the product allows. With whole codes every term is an exact int32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray, Scheme
from ...array.packing import unpack
from ...array.quantize import expanded_scale, expanded_zero_point
from ...errors import UnsupportedError
from ...formats import AbstractFormat, Integer

Axes: TypeAlias = tuple[int, ...]

_NATIVE = {
    "e4m3fn": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e4m3fnuz": jnp.float8_e4m3fnuz,
    "e5m2fnuz": jnp.float8_e5m2fnuz,
}


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A product as codes meet in it.

    Attributes:
        product: gives the product of two arrays of the operands' shapes, summed in a dtype.
        placed: lays an array beside the result that varies along what its operand does not contract (True: the left's); None
            where it cannot.
        contracted: the axes of the left and of the right operand that are summed.
        thin: the axes of each operand that may have one element instead, which gives the result one there.
        takes_two_types: whether both operands may have different dtypes.
    """

    product: Callable[[jax.Array, jax.Array, Any], jax.Array]
    placed: Callable[[jax.Array, bool], Any]
    contracted: tuple[Axes, Axes]
    thin: tuple[Axes, Axes]
    takes_two_types: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """One operand as arrays: what its codes stand for, the scale of each element, and its zero point or None."""

    values: Any
    scale: Any
    zero: Any


def code_product(meeting: Meeting, lhs: QArray, rhs: QArray, asked: str | None = None) -> jax.Array | None:
    """The product of two quantized operands, computed from their codes.

    Args:
        meeting: the product.
        lhs: the left operand.
        rhs: the right operand.
        asked: the dtype to sum in; None takes int32 for integers and float32 for all others.

    Returns:
        The product in float32; None where scales vary along what is summed, or the codes do not meet in one type of sum.

    Raises:
        UnsupportedError: when these codes cannot be summed in the dtype that is asked for.
    """
    types = sum_types(lhs, rhs, meeting, asked)
    scales = expanded_scale(lhs), expanded_scale(rhs)
    if types is None or any(meeting.placed(s, is_left) is None for s, is_left in zip(scales, (True, False), strict=True)):
        return None
    dtypes, accumulator = types
    left, right = (side(q, dtype) for q, dtype in zip((lhs, rhs), dtypes, strict=True))
    return scaled_sums(meeting, left, right, accumulator)


def scaled_sums(meeting: Meeting, left: Side, right: Side, accumulator: Any) -> jax.Array:
    """The product of both operands' codes, less what their zero points make of it, times both scales; float32."""
    sums = meeting.product(left.values, right.values, accumulator)
    ones = [_ones(s.values, axes) for s, axes in zip((left, right), meeting.thin, strict=True)]
    zeros = [None if s.zero is None else meeting.placed(s.zero, s is left) for s in (left, right)]
    if zeros[0] is not None:
        sums = sums - zeros[0] * meeting.product(ones[0], right.values, accumulator)
    if zeros[1] is not None:
        sums = sums - zeros[1] * meeting.product(left.values, ones[1], accumulator)
    if zeros[0] is not None and zeros[1] is not None:
        sums = sums + zeros[0] * zeros[1] * meeting.product(ones[0], ones[1], accumulator)
    wide = sums.astype(jnp.float32)
    if accumulator == jnp.bfloat16:
        wide = jax.lax.reduce_precision(wide, 8, 7)  # under jit XLA would leave out the rounding to bfloat16 and back
    return wide * meeting.placed(left.scale, True) * meeting.placed(right.scale, False)


def sum_types(lhs: QArray, rhs: QArray, meeting: Meeting, asked: str | None) -> tuple[tuple[Any, Any], Any] | None:
    """The dtypes that codes are multiplied in, and the dtype of their sum; None where they meet in none.

    int8 holds every signed code, and every unsigned one of 8 bits less 128 where zero points can move along. Other integers
    go through float32, where sums are exact up to 2**24; so do all formats that XLA has no products of.

    Raises:
        UnsupportedError: when `asked` is not a dtype that these codes can be summed in.
    """
    if is_whole(lhs.scheme) and is_whole(rhs.scheme):
        counts = [int(np.prod([q.shape[a] for a in axes])) for q, axes in zip((lhs, rhs), meeting.contracted, strict=True)]
        if not fits_int32(lhs.scheme, rhs.scheme, min(counts)):
            return None
        return (jnp.int8, jnp.int8), _granted(asked, ("int32",), "sums of integer codes are exact in int32")
    if lhs.zero_point is not None or rhs.zero_point is not None:
        return None
    native = [native_float(q.scheme.format) for q in (lhs, rhs)]
    if None not in native and (meeting.takes_two_types or native[0] == native[1]):
        reason = "8-bit floats are summed in float32 or bfloat16"
        return (native[0], native[1]), _granted(asked, ("float32", "bfloat16"), reason)
    reason = (
        f"XLA has no product of {lhs.scheme.format.name} and {rhs.scheme.format.name} here, so both are widened to float32"
    )
    return (jnp.float32, jnp.float32), _granted(asked, ("float32",), reason)


def refuse_accumulator(asked: str | None) -> None:
    """Refuses a dtype of sums that a product of decoded arrays, in float32, does not have."""
    _granted(
        asked, ("float32",), "an operand is floating or its scales vary along the sum, so decoded arrays are multiplied"
    )


def _granted(asked: str | None, possible: tuple[str, ...], reason: str) -> np.dtype:
    """The dtype to sum in: what is asked for, or the first that is possible."""
    if asked is not None and asked not in possible:
        raise UnsupportedError("a product cannot follow its policy", {f"accumulator={asked!r}": reason})
    return jnp.dtype(asked or possible[0])


def side(q: QArray, dtype: Any, *, but: int | None = None) -> Side:
    """An operand's arrays, its codes in a dtype that `sum_types` gives; along the axis `but`, one scale a tile."""
    zero = None if q.zero_point is None else expanded_zero_point(q, but=but) - shift(q.scheme)
    return Side(code_values(q, dtype), expanded_scale(q, but=but), zero)


def code_values(q: QArray, dtype: Any) -> jax.Array:
    """The numbers that the codes stand for, without scales, in a dtype that `sum_types` gives."""
    fmt, axis = q.scheme.format, q.scheme.pack_axis
    codes = unpack(q.codes, fmt.bits, q.shape[axis], q.scheme.packing, axis=axis)
    if native_float(fmt) == dtype:
        return jax.lax.bitcast_convert_type(codes, dtype)
    return (fmt.decode(codes) - shift(q.scheme)).astype(dtype)


def native_float(fmt: AbstractFormat) -> Any:
    """JAX's own dtype of an 8-bit float's codes; None for formats that it has no dtype for."""
    return _NATIVE.get(fmt.name)


def shift(scheme: Scheme) -> int:
    """What unsigned codes of 8 bits lose to fit in int8; their zero points lose as much."""
    return 128 if scheme.zero_point is not None and scheme.format.max > 127 else 0


def is_whole(scheme: Scheme) -> bool:
    """Whether codes and zero points are integers that fit in int8."""

    def fits(fmt: AbstractFormat) -> bool:
        return isinstance(fmt, Integer) and fmt.step == 1 and fmt.max - shift(scheme) < 128

    holder = scheme.zero_point
    has_whole_zero = holder is None or (isinstance(holder, AbstractFormat) and fits(holder))
    return fits(scheme.format) and has_whole_zero


def fits_int32(lhs: Scheme, rhs: Scheme, length: int) -> bool:
    """Whether every sum of `length` products of whole codes, less their zero points, is an int32."""
    return _reach(lhs) * _reach(rhs) * length < 2**31


def _reach(scheme: Scheme) -> int:
    """The largest magnitude of a code less its zero point."""
    fmt, holder = scheme.format, scheme.zero_point
    if not isinstance(holder, AbstractFormat):
        return int(max(-fmt.min, fmt.max))
    return int(max(fmt.max - holder.min, holder.max - fmt.min))


def _ones(values: jax.Array, thin: Axes) -> jax.Array:
    """Ones of a shape that meets the other operand like `values`, one element long where it may be."""
    return jnp.ones([1 if a in thin else n for a, n in enumerate(values.shape)], values.dtype)

"""Schemes whose codes are multiplied as int8."""

from ...array.scheme import Scheme
from ...formats.format import AbstractFormat
from ...formats.integer import Integer


def shift(scheme: Scheme) -> int:
    """The offset subtracted from unsigned 8-bit codes and their zero points to fit int8."""
    return 128 if scheme.zero_point is not None and scheme.format.max > 127 else 0


def is_whole(scheme: Scheme) -> bool:
    """True if codes and zero points are integers that fit in int8."""

    def fits(fmt: AbstractFormat) -> bool:
        return isinstance(fmt, Integer) and fmt.step == 1 and fmt.max - shift(scheme) < 128

    stored = scheme.zero_point
    return fits(scheme.format) and (stored is None or (isinstance(stored, AbstractFormat) and fits(stored)))


def fits_int32(lhs: Scheme, rhs: Scheme, length: int) -> bool:
    """True if any sum of `length` products of codes minus zero points fits in int32."""
    return _reach(lhs) * _reach(rhs) * length < 2**31


def _reach(scheme: Scheme) -> int:
    """The largest magnitude of a code minus its zero point."""
    fmt, zero = scheme.format, scheme.zero_point
    if not isinstance(zero, AbstractFormat):
        return int(max(-fmt.min, fmt.max))
    return int(max(fmt.max - zero.min, zero.max - fmt.min))

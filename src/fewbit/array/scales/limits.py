"""How large scales may be, so that every finite array decodes to finite numbers.

A code times its scale may exceed float32 although the element does not: the largest magnitude of a full int8 tile is 127.5
steps, and code -128 stands for more; a power of two is up to twice what is needed. So scales end where the largest code stands
for the largest float32, which loses nothing: no element is larger. Only tiles near the end of float32's range see it.

A range `low .. high` may be twice as wide as float32. With whole zero points each side of zero counts for itself: codes reach
`zero` steps below and `max - zero` steps above it, so the scale ends where half of the codes fit on the longer side, and
`Target.stored_zero` keeps the zero point where both sides fit. Float offsets are added to `code * scale`, which must be finite
by itself: a range wider than float32 is narrowed about 0 to what fits.
"""

import functools

import numpy as np

from ...formats import AbstractFormat

LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""

OFFSET_END = float(np.float32(0.99 * LARGEST))
"""How far a range with a float offset reaches: the rest is for the rounding of its scale and offset, in bfloat16 too."""


@functools.cache
def largest_scale(fmt: AbstractFormat, has_whole_zero: bool = False) -> float:
    """The largest float32 scale under which no code stands for more than float32 holds.

    Args:
        fmt: the format of the codes.
        has_whole_zero: whether a zero point in units of codes is subtracted, which lies in the middle of the range here.

    >>> [largest_scale(fb.FORMATS[name]) for name in ("nf4", "int8")]
    [3.4028234663852886e+38, 2.6584558331135067e+36]
    """
    return _largest_factor((fmt.max - fmt.min + 1) // 2 if has_whole_zero else max(fmt.max, -fmt.min))


@functools.cache
def largest_step(fmt: AbstractFormat) -> float:
    """The largest float32 scale under which the whole range of the codes, from end to end, is finite."""
    return _largest_factor(fmt.max - fmt.min)


@functools.cache
def largest_unit(fmt: AbstractFormat, stored: float) -> float:
    """The largest tensor scale under which no code times the largest stored scale exceeds float32."""
    return _largest_factor(max(fmt.max, -fmt.min), stored)


def _largest_factor(*others: float) -> float:
    """The largest float32 whose product with other numbers is finite, whatever is multiplied first, each product rounded."""
    factors = [np.float32(other) for other in others]
    factor = np.float32(LARGEST)
    for other in factors:
        factor = np.minimum(factor / other, np.float32(LARGEST))
    with np.errstate(over="ignore"):
        while not np.isfinite(functools.reduce(np.multiply, reversed(factors), factor)):
            factor = np.nextafter(factor, np.float32(0))
    return float(factor)

"""Upper limits of scales: decoded numbers stay finite.

A code times its scale may exceed float32 although no element does: int8 maps the largest magnitude to 127.5 steps, and code
-128 decodes to more; a power-of-two scale is up to twice as large as needed. So scales are limited to where the largest code
decodes to the largest float32. That affects only tiles near the end of float32's range, and clips no element.

A range `low .. high` may be twice as wide as float32. With integer zero points, codes reach `zero` steps below zero and
`max - zero` steps above: the scale is limited so that half of the codes fit on the longer side, and `Target.stored_zero`
clips the zero point. Float offsets are added to `code * scale`, which must be finite itself: a wider range is
narrowed about 0.
"""

import functools

import numpy as np

from ...formats.format import AbstractFormat

LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""

OFFSET_END = float(np.float32(0.99 * LARGEST))
"""The end of a range with a float offset. The margin is for rounding scale and offset, in bfloat16 too."""


@functools.cache
def largest_scale(fmt: AbstractFormat, has_whole_zero: bool = False) -> float:
    """The largest float32 scale under which every code decodes to a finite number.

    Args:
        fmt: the format of the codes.
        has_whole_zero: whether an integer zero point, here the middle of the range, is subtracted.

    >>> [largest_scale(fb.FORMATS[name]) for name in ("nf4", "int8")]
    [3.4028234663852886e+38, 2.6584558331135067e+36]
    """
    if has_whole_zero:
        return _largest_factor((fmt.max - fmt.min + 1) // 2)
    return _largest_factor(max(fmt.max, -fmt.min))


@functools.cache
def largest_step(fmt: AbstractFormat) -> float:
    """The largest float32 scale under which `(max - min) * scale` is finite."""
    return _largest_factor(fmt.max - fmt.min)


@functools.cache
def largest_unit(fmt: AbstractFormat, stored: float) -> float:
    """The largest tensor scale under which every code times the largest stored scale is finite."""
    return _largest_factor(max(fmt.max, -fmt.min), stored)


def _largest_factor(*others: float) -> float:
    """The largest float32 whose product with the others is finite, in any order of multiplication."""
    factors = [np.float32(other) for other in others]
    factor = np.float32(LARGEST)
    for other in factors:
        factor = np.minimum(factor / other, np.float32(LARGEST))
    with np.errstate(over="ignore"):
        while not np.isfinite(functools.reduce(np.multiply, reversed(factors), factor)):
            factor = np.nextafter(factor, np.float32(0))
    return float(factor)

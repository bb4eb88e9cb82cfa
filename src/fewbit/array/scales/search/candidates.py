"""Bounds on scales of least squared error.

`G` is the set of the format's numbers; under a scale `s` the error `e_s(x)` of an element is its distance to `s G`. Between
the points where rounding changes, `e_s(x)**2 - e_t(x)**2` is linear in `x` for any two scales (the squares cancel), so its
extremes are at those points, and a finite check proves a bound for all elements.

**Upwards.** If `2 G`, up to the largest number, is a subset of `G` (floats with subnormals, integers), doubling a scale that
saturates nothing reduces no element's error: scales from twice the smallest such scale on are unnecessary if their half can
be stored. Otherwise scales are tried until every element is nearer to zero than to any other number.

**Downwards.** The largest element saturates. Halving a scale under which it already does costs it `b a - 3/4 b**2` (`a` its
magnitude, `b` the number it saturates at, in units of the scale), while each of the other `K - 1` gains at most a constant.
"""

import functools

import numpy as np

from ....formats.format import AbstractFormat

_ALL_EXPONENTS = 254
"""The number of E8M0 scales, all tried where no bound is proven."""


@functools.cache
def numbers_of(fmt: AbstractFormat) -> np.ndarray:
    """The distinct numbers that `encode` yields, ascending, float64."""
    values = fmt.values()
    return np.unique(values[(values >= fmt.min) & (values <= fmt.max)])


@functools.cache
def midpoints(fmt: AbstractFormat) -> np.ndarray:
    """The magnitudes of midpoints, `[side, j]`, positive side first, padded with infinity."""
    numbers = numbers_of(fmt)
    middles = (numbers[1:] + numbers[:-1]) / 2
    sides = [np.sort(middles[middles > 0]), np.sort(-middles[middles < 0])]
    table = np.full((2, max(1, *map(len, sides))), np.inf, np.float32)
    for row, side in zip(table, sides, strict=True):
        row[: len(side)] = side
    return table


def _squared_error(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The squared distance of each `x` to the nearest number."""
    middles = (numbers[1:] + numbers[:-1]) / 2
    return (numbers[np.searchsorted(middles, x)] - x) ** 2


def _largest_gain(fmt: AbstractFormat, factor: float) -> float:
    """The largest decrease of an unsaturated element's squared error when scale 1 becomes `factor`."""
    numbers = numbers_of(fmt)
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    points = np.concatenate([points, points * factor, [fmt.bound]])
    points = points[(points >= fmt.min) & (points <= fmt.bound)]
    return float((_squared_error(points, numbers) - _squared_error(points, numbers * factor)).max())


@functools.cache
def is_nested(fmt: AbstractFormat) -> bool:
    """Whether doubling a scale that saturates nothing reduces no element's error."""
    return _largest_gain(fmt, 2.0) <= 0


@functools.cache
def largest_useful_ratio(fmt: AbstractFormat) -> float:
    """The largest useful float scale, relative to the smallest that saturates nothing."""
    if is_nested(fmt):
        return 2.0
    return 2 * fmt.bound / fmt.smallest


@functools.cache
def needed_doublings(fmt: AbstractFormat) -> int:
    """How often the smallest power of two that saturates nothing may have to be doubled."""
    if is_nested(fmt):
        return 0
    return int(np.ceil(np.log2(largest_useful_ratio(fmt))))


@functools.cache
def needed_halvings(fmt: AbstractFormat, elements: int) -> int:
    """How often the smallest power of two that saturates nothing may have to be halved.

    For tiles of `K` elements the smallest `J >= 1` with `(K - 1) g <= b a - 3/4 b**2` for `a = max 2**(J - 1)`, where `g` is
    the largest gain of an element from halving, and `b` either end of the format.

    >>> e2m1 = fb.FORMATS["e2m1"]
    >>> [needed_halvings(e2m1, elements) for elements in (16, 32, 145, 146, 721, 722)]
    [1, 1, 1, 2, 2, 3]
    """
    gain = (elements - 1) * _largest_gain(fmt, 0.5)
    ends = [b for b in (fmt.max, -fmt.min) if b > 0]

    def is_enough(halvings: int) -> bool:
        return all(b * fmt.max * 2.0 ** (halvings - 1) - 0.75 * b * b >= gain for b in ends)

    return next((n for n in range(1, _ALL_EXPONENTS) if is_enough(n)), _ALL_EXPONENTS)


def stored_scales(holder: AbstractFormat) -> np.ndarray:
    """The positive numbers of a scale format, ascending, float64."""
    values = holder.values()
    return np.unique(values[np.isfinite(values) & (values > 0)])


@functools.cache
def last_useful_scale(fmt: AbstractFormat, holder: AbstractFormat) -> np.ndarray:
    """The index of the largest useful scale, for each stored scale.

    The stored scale is taken as the smallest that saturates nothing.

    >>> last_useful_scale(fb.FORMATS["e2m1"], fb.FORMATS["e4m3fn"])[[0, 7, 20]].tolist()
    [14, 14, 27]
    """
    scales = stored_scales(holder)
    if not is_nested(fmt):
        return np.searchsorted(scales, scales * largest_useful_ratio(fmt)).clip(max=len(scales) - 1)
    halves = np.where(np.isin(scales / 2, scales), scales / 2, 0.0)
    needed = (halves[None] < scales[:, None]) & (scales[None] >= scales[:, None])
    return len(scales) - 1 - needed[:, ::-1].argmax(1)

"""Which scales can be optimal at all: bounds that follow from a format's numbers, proven once and for every tile.

Everything here is about squared error. `G` is the set of the format's numbers; under a scale `s` the error `e_s(x)` of an
element is its distance to `s G`. Between the points where rounding changes, `e_s(x)**2 - e_t(x)**2` is linear in `x` for any
two scales (the squares cancel), so its extremes lie at those points, and a finite check proves a bound for all elements.

**Upwards.** Where `2 G`, as far as `G` reaches, is a part of `G` (floats with subnormals, integers), doubling a scale that
saturates nothing makes no element's error smaller: no scale from twice the smallest such scale on is needed, provided that
its half can be stored. Otherwise scales are needed until every element is nearer to zero than to any other number.

**Downwards.** The largest element saturates. Halving a scale under which it already does costs it `b a - 3/4 b**2` (`a` its
magnitude, `b` the number it saturates at, in units of the scale), while each of the other `K - 1` gains at most a constant.
"""

import functools

import numpy as np

from ...formats import AbstractFormat

_ALL_EXPONENTS = 254
"""How many powers of two E8M0 scales can be: what is tried where nothing is proven."""


@functools.cache
def numbers_of(fmt: AbstractFormat) -> np.ndarray:
    """The different numbers that codes can take, ascending, float64."""
    values = fmt.values()
    return np.unique(values[(values >= fmt.min) & (values <= fmt.max)])


@functools.cache
def midpoints(fmt: AbstractFormat) -> np.ndarray:
    """The magnitudes of the midpoints between numbers, `[side, j]`, those of positive numbers first; infinite ones fill up."""
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
    """The most that the squared error of an element within the bound falls when its scale 1 is replaced by `factor`."""
    numbers = numbers_of(fmt)
    points = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    points = np.concatenate([points, points * factor, [fmt.bound]])
    points = points[(points >= fmt.min) & (points <= fmt.bound)]
    return float((_squared_error(points, numbers) - _squared_error(points, numbers * factor)).max())


@functools.cache
def is_nested(fmt: AbstractFormat) -> bool:
    """Whether doubling a scale that saturates nothing makes no element's error smaller."""
    return _largest_gain(fmt, 2.0) <= 0


@functools.cache
def largest_useful_ratio(fmt: AbstractFormat) -> float:
    """How many times the smallest scale that saturates nothing a scale need be at most, where every scale can be had."""
    return 2.0 if is_nested(fmt) else 2 * fmt.bound / fmt.smallest


@functools.cache
def needed_doublings(fmt: AbstractFormat) -> int:
    """How many doublings of the smallest power of two that saturates nothing can be optimal."""
    return 0 if is_nested(fmt) else int(np.ceil(np.log2(largest_useful_ratio(fmt))))


@functools.cache
def needed_halvings(fmt: AbstractFormat, elements: int) -> int:
    """How many halvings of the smallest power of two that saturates nothing can be optimal for tiles of so many elements.

    The smallest `J >= 1` with `(K - 1) g <= b a - 3/4 b**2` for `a = max 2**(J - 1)`, where `g` is the most that an element
    gains by a halving and `b` either end of the format.

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
    """The positive numbers of a format that holds scales, ascending, float64."""
    values = holder.values()
    return np.unique(values[np.isfinite(values) & (values > 0)])


@functools.cache
def last_useful_scale(fmt: AbstractFormat, holder: AbstractFormat) -> np.ndarray:
    """For each stored scale, as the smallest that saturates nothing, the place of the largest that can be optimal.

    >>> last_useful_scale(fb.FORMATS["e2m1"], fb.FORMATS["e4m3fn"])[[0, 7, 20]].tolist()
    [14, 14, 27]
    """
    scales = stored_scales(holder)
    if not is_nested(fmt):
        return np.searchsorted(scales, scales * largest_useful_ratio(fmt)).clip(max=len(scales) - 1)
    halves = np.where(np.isin(scales / 2, scales), scales / 2, 0.0)
    needed = (halves[None] < scales[:, None]) & (scales[None] >= scales[:, None])
    return len(scales) - 1 - needed[:, ::-1].argmax(1)

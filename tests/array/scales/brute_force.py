"""The oracle of the scale searches: float64 errors of every scale there is, on blocks that are hard."""

import numpy as np

from fewbit.formats import FORMATS

KINDS = ("gaussian", "student", "sparse", "adversarial", "special")

CHUNK = 2048
"""Rows that are worked on at a time, so that they stay in cache."""

SLACK = 1 + 2.0**-15
"""Errors within 2**-16 are a tie; two float32 sums of 128 squares are off by 2**-16 at most together, of more elements rarely."""


def numbers_of(fmt: str) -> np.ndarray:
    """The numbers that codes of a format can take, ascending."""
    values = FORMATS[fmt].values()
    return np.unique(values[(values >= FORMATS[fmt].min) & (values <= FORMATS[fmt].max)])


def stored(holder: str) -> np.ndarray:
    """The positive numbers of a format that holds scales; from 2**-126 on, the smallest that is used."""
    values = FORMATS[holder].values()
    return np.unique(values[np.isfinite(values) & (values >= 2.0**-126)])


def nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest of ascending numbers to each element; of two, either one.

    Equal steps are rounded to, and few magnitudes that have both signs are counted through: a thirtieth of a search.
    """
    step = numbers[1] - numbers[0]
    if np.array_equal(numbers, np.arange(len(numbers)) * step + numbers[0]) and numbers[0] % step == 0:
        return (np.rint(x / step) * step).clip(numbers[0], numbers[-1])
    magnitudes = numbers[numbers >= 0]
    if len(magnitudes) > 32 or not is_mirrored(numbers):
        return numbers[np.searchsorted(middles_all(numbers), x)]
    size, rank = np.abs(x), np.zeros(x.shape, np.uint8)
    for middle in middles_all(magnitudes):
        rank += (size > middle).view(np.uint8)
    return np.copysign(magnitudes.take(rank), x)


def is_mirrored(numbers: np.ndarray) -> bool:
    """Whether each number is there with both signs."""
    return np.array_equal(numbers, -numbers[::-1])


def every_error(x: np.ndarray, scales: np.ndarray, fmt: str, weights: np.ndarray | None = None) -> np.ndarray:
    """The (weighted) error of each row under each scale: `[row, scale]`."""
    x, numbers = x.astype(np.float64), numbers_of(fmt)
    w = np.ones_like(x) if weights is None else weights.astype(np.float64)
    errors = np.empty((len(x), len(scales)))
    for first in range(0, len(x), CHUNK):
        rows = slice(first, first + CHUNK)
        for i, scale in enumerate(scales.astype(np.float64)):
            off = nearest(x[rows] / scale, numbers) * scale - x[rows]
            errors[rows, i] = np.einsum("ij,ij,ij->i", w[rows], off, off)
    return errors


def best_continuous(x: np.ndarray, fmt: str, weights: np.ndarray | None = None) -> np.ndarray:
    """The least (weighted) error of each row over all positive scales, from every breakpoint of its rounding."""
    x = x.astype(np.float64)
    w = np.ones_like(x) if weights is None else weights.astype(np.float64)
    starts = range(0, len(x), CHUNK)
    return np.concatenate([_best_continuous(x[i : i + CHUNK], w[i : i + CHUNK], numbers_of(fmt)) for i in starts])


def _best_continuous(x: np.ndarray, w: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    middles = middles_all(numbers)
    if is_mirrored(numbers):  # a sign changes no error
        x, middles = np.abs(x), middles[middles > 0]
    best = (w * x * x).sum(1)
    for i in range(x.shape[1]):
        for middle in middles[middles != 0]:
            scale = x[:, i] / middle * (1 - 1e-12)
            good = scale > 0
            q = nearest(x / np.where(good, scale, 1)[:, None], numbers)
            products, squares = np.einsum("ij,ij,ij->i", w, x, q), np.einsum("ij,ij,ij->i", w, q, q)
            fit = np.where((squares > 0) & (products > 0), products / np.where(squares > 0, squares, 1), 0)
            off = x - fit[:, None] * q
            error = np.einsum("ij,ij,ij->i", w, off, off)
            best = np.where(good & (error < best), error, best)
    return best


def middles_all(numbers: np.ndarray) -> np.ndarray:
    """The midpoints between neighbours."""
    return (numbers[1:] + numbers[:-1]) / 2


def blocks(kind: str, tile: int, count: int, fmt: str, scales: np.ndarray | None = None) -> np.ndarray:
    """Rows of one tile each, float32, at magnitudes that spread over the scales that can be stored."""
    rng = np.random.default_rng(tile + len(kind))
    if kind == "special":
        return special(tile)
    if kind == "adversarial":
        # Elements on the midpoints of the numbers at a random scale, where another scale gains most, and a large one.
        numbers = numbers_of(fmt)
        middles = middles_all(numbers)
        x = rng.choice(middles[: max(len(middles) // 2, 2)] if numbers[0] >= 0 else middles, (count, tile))
        few = rng.choice(middles, (count, 2))
        x = np.where(rng.random((count, tile)) < 0.8, few[np.arange(count)[:, None], rng.integers(0, 2, (count, tile))], x)
        x[:, 0] = rng.uniform(0.4, 1.2, count) * FORMATS[fmt].max
    else:
        x = rng.standard_normal((count, tile)) if kind != "student" else rng.standard_t(2, (count, tile))
        if kind == "sparse":
            x *= rng.random((count, tile)) < 0.15
    if scales is None:
        return (x * 2.0 ** rng.uniform(-12, 8, (count, 1))).astype(np.float32)
    bound = FORMATS[fmt].bound
    factor = (
        rng.choice(scales, (count, 1)) * (1 if kind == "adversarial" else bound / 3) * rng.choice([1, rng.uniform(0.5, 2)])
    )
    return (x * factor).astype(np.float32)


def special(tile: int) -> np.ndarray:
    """All zero, constant, denormal, huge, one outlier: one row each."""
    x = np.zeros((8, tile), np.float32)
    x[1], x[2], x[3] = 0.002, 1.0, 1e-42
    x[4] = np.where(np.arange(tile) % 2, 1e38, -3e38)
    x[5], x[6, 3], x[7] = 0.01, 7.0, 3e-30
    x[5, 1] = 900.0
    return x

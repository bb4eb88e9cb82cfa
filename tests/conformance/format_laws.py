"""What every number format promises, as functions of a format: the tests call them, and so may the test of a new one."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fewbit.formats import AbstractFormat, format_from_json, format_to_json

TieRule = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From the lower and upper number at a tie and their codes: whether the upper one is taken."""

BFLOAT16 = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
"""Every bfloat16 number there is."""

ALL_NUMBERS = BFLOAT16[~np.isnan(BFLOAT16.astype(np.float32))].astype(np.float32)
"""Every bfloat16 number that is not NaN, in float32: both zeros and both infinities are among them."""


def repeated(x: np.ndarray, length: int) -> np.ndarray:
    """The array again and again up to a length that all formats share, so that each operation is compiled once for all."""
    return np.resize(x, length)


def numbers_of(fmt: AbstractFormat) -> tuple[np.ndarray, np.ndarray]:
    """The different numbers that `encode` may yield, ascending, and a code of each."""
    values = fmt.values()
    codes = np.flatnonzero(np.isfinite(values) & (values >= fmt.min) & (values <= fmt.max))
    numbers, first = np.unique(values[codes], return_index=True)
    return numbers, codes[first]


def neighbours(fmt: AbstractFormat, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The indices into `numbers_of` of the numbers around each `x`, equal ends for what lies outside."""
    numbers, _ = numbers_of(fmt)
    inside = np.clip(x.astype(np.float64), numbers[0], numbers[-1])
    upper = np.searchsorted(numbers, inside, side="left")
    lower = np.searchsorted(numbers, inside, side="right") - 1
    return lower, upper


def check_codes(fmt: AbstractFormat) -> None:
    """Every code decodes to its number of `values()`, in every float dtype, and the derived facts are true."""
    values = fmt.values()
    assert values.dtype == np.float64
    assert len(values) <= 2**fmt.bits <= 256
    codes = jnp.asarray(repeated(np.arange(len(values), dtype=np.uint8), 256))
    assert_same_numbers(fmt.decode(codes), repeated(values, 256).astype(np.float32))
    assert np.array_equal(values.astype(np.float32).astype(np.float64), values, equal_nan=True), "not exact in float32"
    for dtype in (jnp.bfloat16, jnp.float16):
        expected = jnp.asarray(repeated(values, 256), jnp.float32).astype(dtype)
        assert_same_numbers(fmt.decode(codes, dtype), np.asarray(expected))
    numbers, _ = numbers_of(fmt)
    assert (fmt.min, fmt.max) == (numbers[0], numbers[-1])
    assert fmt.is_signed == (numbers[0] < 0)
    assert fmt.has_nan == bool(np.isnan(values).any())
    assert fmt.smallest == min(abs(v) for v in values if v and np.isfinite(v))
    assert fmt.bound > 0
    assert hash(fmt) == hash(dataclasses.replace(fmt)) and fmt == dataclasses.replace(fmt)


def check_identity(fmt: AbstractFormat) -> None:
    """Encoding a number of the format gives a code of that very number, with or without a key."""
    values = fmt.values()
    values = repeated(values[np.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)].astype(np.float32), 1024)
    codes = fmt.encode(jnp.asarray(values))
    assert codes.dtype == jnp.uint8
    assert int(codes.max()) < 2**fmt.bits
    assert_same_numbers(fmt.decode(codes), values)
    assert np.array_equal(fmt.encode(jnp.asarray(values), key=jax.random.key(0)), codes)


def check_nearest(fmt: AbstractFormat, tie: TieRule | None = None, x: np.ndarray = ALL_NUMBERS) -> None:
    """The nearest number by float64 arithmetic is taken; at a tie the one that the rule names, or either without one.

    Float32 subnormals count as zero, since devices may flush them.
    """
    numbers, codes = numbers_of(fmt)
    flushed = np.where(np.abs(x) < 2.0**-126, 0, x)
    lower, upper = neighbours(fmt, flushed)
    inside = np.clip(flushed.astype(np.float64), numbers[0], numbers[-1])
    middle = (numbers[lower] + numbers[upper]) / 2
    got = np.asarray(fmt.decode(fmt.encode(jnp.asarray(x))), np.float64)
    is_tie = (inside == middle) & (lower != upper)
    takes_upper = inside > middle
    if tie is None:
        assert ((got == numbers[lower]) | (got == numbers[upper]))[is_tie].all()
        takes_upper = np.where(is_tie, got == numbers[upper], takes_upper)
    else:
        takes_upper = np.where(is_tie, tie(numbers[lower], numbers[upper], codes[lower], codes[upper]), takes_upper)
    searched = np.asarray(fmt.nearest(jnp.asarray(x)))
    assert searched.dtype == np.float32
    assert_same_numbers(searched.astype(np.float64), got)
    wrong = got != np.where(takes_upper, numbers[upper], numbers[lower])
    assert not wrong.any(), f"{x[wrong][:5]} became {got[wrong][:5]}"


def check_saturation(fmt: AbstractFormat) -> None:
    """Beyond the ends stands the end, infinity and stochastic rounding included; NaN is NaN or a finite number."""
    beyond = np.float32([fmt.max * 1.5 + 1, 3e38, np.inf])
    below = np.float32([min(fmt.min * 1.5, 0) - 1, -3e38, -np.inf])
    for key in (None, jax.random.key(0)):
        assert (np.asarray(fmt.decode(fmt.encode(jnp.asarray(beyond), key=key))) == fmt.max).all()
        assert (np.asarray(fmt.decode(fmt.encode(jnp.asarray(below), key=key))) == fmt.min).all()
        of_nan = np.asarray(fmt.decode(fmt.encode(jnp.full(3, jnp.nan), key=key)))
        assert np.isnan(of_nan).all() if fmt.has_nan else np.isfinite(of_nan).all()


def check_input_dtypes(fmt: AbstractFormat) -> None:
    """Every float dtype is widened first: the codes are those of the float32 numbers."""
    numbers = jnp.asarray(BFLOAT16)
    assert np.array_equal(fmt.encode(numbers), fmt.encode(numbers.astype(jnp.float32)))
    halves = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(np.float16))
    assert np.array_equal(fmt.encode(halves), fmt.encode(halves.astype(jnp.float32)))


def check_transforms(fmt: AbstractFormat) -> None:
    """jit gives the bytes that eager evaluation gives, vmap those of each row, with and without a key."""
    x = jnp.asarray(np.resize(between_numbers(fmt, np.linspace(0.1, 0.9, 7)), (3, 256)))
    keys = jax.random.split(jax.random.key(3), 3)
    codes = jnp.arange(2**fmt.bits, dtype=jnp.uint8)

    def all_of_it(x: jax.Array, keys: jax.Array, codes: jax.Array) -> tuple[jax.Array, ...]:
        return fmt.encode(x), jax.vmap(lambda row, key: fmt.encode(row, key=key))(x, keys), fmt.decode(codes)

    compiled = jax.jit(all_of_it)(x, keys, codes)
    assert np.array_equal(compiled[0], fmt.encode(x))
    assert np.array_equal(compiled[1], [fmt.encode(row, key=key) for row, key in zip(x, keys, strict=True)])
    assert_same_numbers(compiled[2], np.asarray(fmt.decode(codes)))


def between_numbers(fmt: AbstractFormat, fractions: np.ndarray) -> np.ndarray:
    """Float32 numbers at these fractions of every interval between two numbers of the format, `[fraction, interval]`."""
    numbers, _ = numbers_of(fmt)
    # float32 subnormals are flushed by devices, so the intervals that touch them are left out.
    numbers = numbers[(np.abs(numbers) >= 2.0**-126) | (numbers == 0)]
    return (numbers[:-1] + fractions[:, None] * np.diff(numbers)).astype(np.float32)


def check_stochastic(fmt: AbstractFormat, draws: int = 2**18, seed: int = 0) -> None:
    """With a key, only the neighbours of a number come, and its expectation is the number itself.

    In each interval one number, at a random fraction `p`, is rounded many times. The share of the upper neighbour is a mean
    of Bernoulli trials: it must lie within 6 standard deviations `sqrt(p * (1 - p) / n)`, and the sum over all intervals
    within 5 of its own, which sees a bias that is too small for one interval.
    """
    lower = between_numbers(fmt, np.zeros(1))[0].astype(np.float64)
    upper = between_numbers(fmt, np.ones(1))[0].astype(np.float64)
    fraction = np.random.default_rng(seed).uniform(0.1, 0.9, len(lower))
    x = (lower + fraction * (upper - lower)).astype(np.float32)
    p = (x - lower) / (upper - lower)
    n = draws // len(x)
    drawn = fmt.encode(jnp.asarray(repeated(x, draws)), key=jax.random.key(seed))
    got = np.asarray(fmt.decode(drawn), np.float64)[: n * len(x)].reshape(n, len(x))
    is_upper = got == upper
    assert (is_upper | (got == lower)).all()
    deviation = is_upper.mean(0) - p
    sigma = np.sqrt(p * (1 - p) / n)
    assert (np.abs(deviation) <= 6 * sigma).all(), f"at {x[np.abs(deviation) > 6 * sigma]}"
    assert abs(deviation.sum()) <= 5 * np.sqrt(np.sum(sigma**2))
    again = fmt.encode(jnp.asarray(repeated(x, draws)), key=jax.random.key(seed))
    other = fmt.encode(jnp.asarray(repeated(x, draws)), key=jax.random.key(seed + 1))
    assert np.array_equal(drawn, again) and not np.array_equal(drawn, other)


def check_json(fmt: AbstractFormat) -> None:
    """The JSON form reads back as the same format."""
    assert format_from_json(format_to_json(fmt)) == fmt


def assert_same_numbers(got: jax.Array | np.ndarray, expected: np.ndarray) -> None:
    """Equal numbers, equal NaNs, equal signs of zero."""
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(got, expected)
    zero = expected == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(expected[zero]))


def check_format(fmt: AbstractFormat, tie: TieRule | None = None) -> None:
    """All laws in one call."""
    check_codes(fmt)
    check_identity(fmt)
    check_nearest(fmt, tie)
    check_saturation(fmt)
    check_input_dtypes(fmt)
    check_transforms(fmt)
    check_stochastic(fmt)
    check_json(fmt)

"""Rounding tables of formats, for kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .format import AbstractFormat


@dataclasses.dataclass(frozen=True, eq=False)
class RoundingTable:
    """`encode` without a key, as a table of codes and thresholds.

    It is `codes[number of thresholds below x]`, with special codes for -0 and NaN.

    Attributes:
        numbers: the numbers that `encode` yields, ascending, distinct, float32.
        codes: the code of each, uint8.
        thresholds: float32, one fewer. An element above `thresholds[i]` rounds to `numbers[i + 1]` or higher, ties included.
        minus_zero: the code of negative elements that round to zero; None if the format has no -0.
        nan: the code of NaN.
        values: the float32 number of every code.
    """

    numbers: np.ndarray
    codes: np.ndarray
    thresholds: np.ndarray
    minus_zero: int | None
    nan: int
    values: np.ndarray

    @property
    def zero(self) -> int | None:
        """The code of 0, or None if the format has no zero."""
        return next(map(int, self.codes[self.numbers == 0]), None)


@functools.lru_cache(maxsize=64)
def rounding_table(fmt: AbstractFormat) -> RoundingTable:
    """The rounding table of a format, cached. Its ties and NaN come from `fmt.encode` itself.

    >>> from fewbit.formats import FORMATS
    >>> table = rounding_table(FORMATS["e2m1"])
    >>> table.numbers.tolist()[7:11], table.codes.tolist()[7:11], table.minus_zero
    ([0.0, 0.5, 1.0, 1.5], [0, 1, 2, 3], 8)
    """
    values = fmt.values()
    encoded = np.flatnonzero(np.isfinite(values) & (values >= fmt.min) & (values <= fmt.max))
    numbers = np.unique(values[encoded]) + 0.0  # which makes 0 of -0
    codes = _encoded(fmt, numbers)
    middles = (numbers[1:] + numbers[:-1]) / 2
    low = middles.astype(np.float32)
    low = np.where(low > middles, np.nextafter(low, np.float32(-np.inf)), low)
    goes_up = _encoded(fmt, low) != codes[:-1]
    thresholds = np.where(goes_up, np.nextafter(low, np.float32(-np.inf)), low)
    minus_zero, nan = _encoded(fmt, np.array([-0.0, np.nan])).tolist()
    if 0 not in numbers or minus_zero == codes[numbers == 0][0]:
        minus_zero = None
    return RoundingTable(numbers.astype(np.float32), codes, thresholds, minus_zero, nan, values.astype(np.float32))


def _encoded(fmt: AbstractFormat, numbers: np.ndarray) -> np.ndarray:
    """The codes of the numbers, computed now even while JAX is tracing."""
    with jax.ensure_compile_time_eval():
        return np.asarray(fmt.encode(jnp.asarray(numbers, jnp.float32)))

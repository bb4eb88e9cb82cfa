"""A format's rounding as a table, for code that is not JAX: numbers, codes, and the thresholds between them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .format import AbstractFormat


@dataclasses.dataclass(frozen=True, eq=False)
class RoundingTable:
    """What `encode` does without a key: `codes[number of thresholds below x]`, with a rule for -0 and one for NaN.

    Attributes:
        numbers: the numbers that `encode` yields, ascending, float32; 0 stands once.
        codes: the code of each, uint8.
        thresholds: float32, one fewer. An element above `thresholds[i]` is nearer to `numbers[i + 1]`, or as near and a tie
            goes there; one at it or below is not.
        minus_zero: the code of -0, which an element with a sign that rounds to zero takes; None where there is none.
        nan: the code that NaN takes.
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
        """The code of 0, or None where the format has no zero."""
        found = self.codes[self.numbers == 0]
        return int(found[0]) if found.size else None


@functools.lru_cache(maxsize=64)
def rounding_table(fmt: AbstractFormat) -> RoundingTable:
    """The table of a format. Nothing is restated: which way a tie goes, and what NaN becomes, is asked of its `encode`.

    Args:
        fmt: the format.

    Returns:
        Its table; the same object for an equal format.

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
    minus_zero = int(_encoded(fmt, np.array([-0.0]))[0]) if 0 in numbers else None
    has_minus_zero = minus_zero is not None and minus_zero != codes[numbers == 0][0]
    nan = int(_encoded(fmt, np.array([np.nan]))[0])
    return RoundingTable(
        numbers.astype(np.float32), codes, thresholds, minus_zero if has_minus_zero else None, nan, values.astype(np.float32)
    )


def _encoded(fmt: AbstractFormat, numbers: np.ndarray) -> np.ndarray:
    """The codes that the format gives to float32 numbers; now, also where a program is being traced."""
    with jax.ensure_compile_time_eval():
        return np.asarray(fmt.encode(jnp.asarray(numbers, jnp.float32)))

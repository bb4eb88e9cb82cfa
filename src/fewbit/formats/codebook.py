"""Lookup-table formats: NF4, bitsandbytes' FP4, IQ4_NL, custom tables."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from ..errors import QuantError
from .format import FORMATS, AbstractFormat, looked_up, widened

# Up to this many thresholds are compared one by one, which vectorizes; more are found by binary search.
_COUNTED_THRESHOLDS = 32


@dataclasses.dataclass(frozen=True)
class Codebook(AbstractFormat):
    """A lookup table: code `i` decodes to `table[i]`, exactly.

    Encoding rounds to the nearest entry, ties to the smaller number (bitsandbytes' rule), exactly: each threshold is the
    largest float32 not above the true midpoint. It saturates; NaN encodes as the entry nearest zero. Of equal entries the
    first code is used; the sign of -0 is kept when the table has both zeros.

    Attributes:
        table: 2 to 256 finite numbers, in code order, not necessarily sorted.

    >>> nf4.encode(jnp.array([-1.0, 0.03, 0.05, 2.0])).tolist()
    [0, 7, 8, 15]
    """

    kind: ClassVar[str] = "codebook"
    table: tuple[float, ...] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not 2 <= len(self.table) <= 256:
            raise QuantError(f"format {self.name!r}: a table has 2 to 256 numbers, this one has {len(self.table)}")
        # A table given as float32 and one given in decimal must be equal formats, so the numbers are rounded to float32.
        with np.errstate(over="ignore"):
            object.__setattr__(self, "table", tuple(np.asarray(self.table, np.float32).tolist()))
        if not np.isfinite(self.table).all():
            raise QuantError(f"format {self.name!r}: every number of a table must be finite in float32")
        if len(set(self.table)) < 2:
            raise QuantError(f"format {self.name!r}: a table needs at least two numbers that differ in float32")

    @property
    def bits(self) -> int:
        return max((len(self.table) - 1).bit_length(), 1)

    @property
    def max(self) -> float:
        return max(self.table)

    @property
    def min(self) -> float:
        return min(self.table)

    @property
    def bound(self) -> float:
        """`max(abs(max), abs(min))`: a symmetric scale maps the largest element there."""
        return max(abs(self.max), abs(self.min))

    @functools.cached_property
    def sorted_numbers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The distinct numbers in ascending order, the code of each, and the thresholds between them."""
        numbers, codes = np.unique(np.asarray(self.table, np.float64), return_index=True)
        middles = (numbers[1:] + numbers[:-1]) / 2
        thresholds = middles.astype(np.float32)
        too_high = thresholds.astype(np.float64) > middles
        thresholds[too_high] = np.nextafter(thresholds[too_high], np.float32(-np.inf))
        return numbers.astype(np.float32), codes.astype(np.uint8), thresholds

    @property
    def zero_codes(self) -> tuple[int, int] | None:
        """The codes of 0 and -0 when the table has both, else None."""
        code_of = {bool(np.signbit(v)): i for i, v in reversed(list(enumerate(self.table))) if v == 0}
        if len(code_of) == 2:
            return code_of[False], code_of[True]
        return None

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        numbers, codes, thresholds = self.sorted_numbers
        x = widened(x)
        x = jnp.where(jnp.isnan(x), 0.0, x)
        if key is None:
            rank = _count_below(x, thresholds)
        else:
            inside = jnp.clip(x, numbers[0], numbers[-1])
            lower = _count_below(inside, numbers[1:-1], operator.ge)
            low, high = looked_up(numbers, lower), looked_up(numbers[1:], lower)
            noise = jax.random.uniform(key, x.shape, jnp.float32)
            rank = lower + (noise * (high - low) < inside - low).astype(jnp.uint8)
        code = rank
        if not np.array_equal(codes, np.arange(len(codes))):
            code = looked_up(codes, rank)
        if self.zero_codes is None:
            return code
        plus, minus = self.zero_codes
        zero = jnp.where(jnp.signbit(x), jnp.uint8(minus), jnp.uint8(plus))
        return jnp.where((code == plus) | (code == minus), zero, code)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        return looked_up(np.asarray(self.table, np.float32), codes).astype(dtype)

    def values(self) -> np.ndarray:
        return np.asarray(self.table, np.float64)

    def in_int8(self) -> "Codebook":
        """The table, with numbers rounded to 127ths of the largest magnitude. Kernels can then multiply int8 numbers.

        >>> [round(127 * number) for number in nf4.in_int8().table[:4]]
        [-127, -88, -67, -50]
        """
        steps = np.rint(self.values() / self.bound * 127)
        return Codebook(f"{self.name}_int8", tuple((steps / 127 * self.bound).tolist()))


def _count_below(
    x: Float[Array, "*s"], thresholds: np.ndarray, passes: Callable[..., jax.Array] = operator.gt
) -> UInt8[Array, "*s"]:
    """How many of the ascending thresholds each `x` passes."""
    if len(thresholds) <= _COUNTED_THRESHOLDS:
        count = jnp.zeros_like(x, jnp.uint8)
        for threshold in thresholds:
            count = count + passes(x, jnp.float32(threshold)).astype(jnp.uint8)
        return count
    # Binary search by hand: `jnp.searchsorted` refuses arrays with an explicit sharding.
    width = 2 ** len(thresholds).bit_length()
    table = np.append(thresholds, np.full(width - len(thresholds), np.inf)).astype(np.float32)
    count = jnp.zeros_like(x, jnp.int32)
    while width := width // 2:
        threshold = looked_up(table, count + (width - 1))
        count = count + jnp.where(passes(x, threshold), width, 0)
    return count.astype(jnp.uint8)


def _dynamic_map() -> tuple[float, ...]:
    """bitsandbytes' signed 8-bit "dynamic" map. It has seven decades, each with twice the fractions of the one below it."""
    # In float32 from both ends towards the middle, as torch.linspace does, so that the numbers are bit-exact.
    numbers = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        place = np.arange(count + 1)
        step = np.float64((np.float32(1) - np.float32(0.1)) / np.float32(count))
        from_below = (np.float64(np.float32(0.1)) + step * place).astype(np.float32)
        from_above = (1 - step * (count - place)).astype(np.float32)
        edges = np.where(place < (count + 1) // 2, from_below, from_above)
        means = np.float32(10.0 ** (decade - 6)) * ((edges[1:] + edges[:-1]) / np.float32(2))
        numbers += [*means.tolist(), *(-means).tolist()]
    return tuple(sorted(numbers))


# fmt: off
_nf4_table = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_bnb_fp4_twelfths = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
_iq4_nl_table = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

nf4 = Codebook("nf4", _nf4_table)
"""NormalFloat 4: quantiles of a normal distribution, with 0. QLoRA (arXiv 2305.14314), appendix E."""

bnb_fp4 = Codebook("bnb_fp4", tuple(sign * v / 12 for sign in (1, -1) for v in _bnb_fp4_twelfths))
"""bitsandbytes' FP4, which is not E2M1."""

iq4_nl = Codebook("iq4_nl", _iq4_nl_table)
"""The table of ggml's IQ4_NL and IQ4_XS."""

dynamic8 = Codebook("dynamic8", _dynamic_map())
"""bitsandbytes' dynamic 8-bit map (arXiv 1511.04561), for the scales of its double quantization."""

for _codebook in (nf4, bnb_fp4, iq4_nl, dynamic8):
    FORMATS.add(_codebook.name, _codebook)

"""The interface of number formats, and their registry."""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Key, UInt8

from .._registry import Registry


@dataclasses.dataclass(frozen=True)
class AbstractFormat(abc.ABC):
    """A finite set of numbers with uint8 codes `0 .. 2**bits - 1`.

    Subclasses are frozen dataclasses. An instance registered in `FORMATS` works with packing, scale searches, files and
    the conformance tests, which check for every registered format:

    - `decode(encode(v)) == v` for every value `v` between `min` and `max`;
    - `encode` takes the nearest value; the subclass defines ties;
    - `encode` saturates: numbers beyond `max` (infinity too) become `max`, likewise `min`;
    - with a `key`, `encode` rounds stochastically: the mean of the decoded values is `x` between `min` and `max`.

    Attributes:
        name: the name in the registry, in JSON and on the command line.
        is_power_of_two: whether all numbers are powers of two.
    """

    name: str
    kind: ClassVar[str]
    is_power_of_two: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits per code, 1 to 8."""

    @property
    @abc.abstractmethod
    def max(self) -> float:
        """The largest number that `encode` yields."""

    @property
    @abc.abstractmethod
    def min(self) -> float:
        """The smallest number that `encode` yields."""

    @property
    def bound(self) -> float:
        """The magnitude that a symmetric scale maps the largest element to. `max` by default."""
        return self.max

    @property
    def is_signed(self) -> bool:
        """Whether the format has negative numbers."""
        return self.min < 0

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return bool(np.isnan(self.values()).any())

    @property
    def smallest(self) -> float:
        """The smallest magnitude of the format above zero."""
        magnitudes = np.abs(self.values())
        return float(magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)].min())

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        """The code of the nearest number, in the low `bits` bits.

        Args:
            x: real floating numbers; converted to float32 first.
            key: a JAX random key for stochastic rounding; None rounds to the nearest.
        """

    @abc.abstractmethod
    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        """The number of each code, exact in float32, rounded once when `dtype` is narrower."""

    def nearest(self, x: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The nearest number, float32: `decode(encode(x))` but for NaN. Scale searches use it."""
        return self.decode(self.encode(x))

    @abc.abstractmethod
    def values(self) -> np.ndarray:
        """The number of each code in code order, float64, NaN included."""


FORMATS: Registry[AbstractFormat] = Registry("format")
"""Every named format; `fb.FORMATS.names()` lists them, `fb.FORMATS.add` registers a new one."""


def widened(x: jax.Array) -> Float[Array, "*s"]:
    """The array as float32, the dtype of all code and scale arithmetic."""
    return jnp.asarray(x).astype(jnp.float32)


def rounded(x: Float[Array, "*s"], key: Key[Array, ""] | None) -> Float[Array, "*s"]:
    """Rounds to integers: to nearest even without a key, stochastically with one.

    With a key, `P(ceil(x)) = x - floor(x)`, so the expectation is `x`; the fraction is exact in float32, the noise has
    23 bits.
    """
    if key is None:
        return jnp.round(x)
    floor = jnp.floor(x)
    noise = jax.random.uniform(key, x.shape, jnp.float32)
    return floor + (noise < x - floor).astype(jnp.float32)


def quotient(x: Float[Array, "*s"], divisor: jax.Array) -> Float[Array, "*s"]:
    """`x / divisor`, correctly rounded, for finite `x`; NaN for infinity or NaN."""
    # XLA turns a division by a broadcast divisor into a product with its reciprocal, which rounds twice, gives zeros for
    # divisors above 2**126 and depends on jit. Adding `x * 0` makes the divisor differ per element, which prevents that.
    return x / (divisor + x * 0)


def rough_quotient(x: Float[Array, "*s"], divisor: jax.Array) -> Float[Array, "*s"]:
    """`x * (1 / divisor)`, rounded twice. It takes one division per tile instead of one per element.

    For scale searches, where dividing each element would double the cost. Exact for powers of two.
    """
    largest = jnp.float32(2.0**126)  # the reciprocals of larger divisors are subnormal: those take two steps
    reciprocal = 1 / jnp.minimum(divisor, largest)
    return x * reciprocal * (largest / jnp.maximum(divisor, largest))


def looked_up(table: np.ndarray, index: Integer[Array, "*s"]) -> jax.Array:
    """`table[index]`, clipped to the last entry and sharded like the index."""
    return jnp.asarray(table).at[index].get(mode="clip", out_sharding=jax.typeof(index).sharding)


def settled(product: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The product, rounded before anything is added to it."""
    # Under jit XLA may fuse product and sum into one FMA; a lower bound between the two, which changes nothing, prevents it.
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def power_of_two(exponent: jax.Array) -> Float[Array, "*s"]:
    """`2.0 ** exponent`, exact, for int32 exponents in -126..127. `jnp.exp2` is inexact on CPU."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def exponent_of(x: Float[Array, "*s"]) -> jax.Array:
    """`floor(log2(|x|))`, exact, int32. -127 below 2**-126 and for zero, 128 for Inf and NaN."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) & 0xFF) - 127


def is_exact_cast(dtype: DTypeLike, other: DTypeLike) -> bool:
    """Whether a cast to `dtype` is exact for every number of `other`. True where `other` is not floating.

    >>> is_exact_cast("float32", "bfloat16"), is_exact_cast("bfloat16", "float16"), is_exact_cast("bfloat16", "int32")
    (True, False, True)
    """
    if dtype == other or not jnp.issubdtype(other, jnp.floating):
        return True
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other)
    return wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp and wide.minexp <= narrow.minexp

"""What a number format is: a finite set of numbers, each with a code of at most eight bits."""

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
    """A finite set of numbers with codes `0 .. 2**bits - 1`, each held in a `uint8`.

    A subclass is a frozen dataclass that says how its numbers are encoded and decoded; registering an instance in
    `FORMATS` is all that packing, scale searches, files and the conformance tests need.

    Laws that the conformance tests walk, for every registered format:

    - `decode(encode(v)) == v` for every value `v` between `min` and `max`;
    - `encode` takes the nearest value; what happens at a tie is the subclass's to say;
    - `encode` saturates: what lies beyond `max` (infinity too) becomes `max`, likewise `min`;
    - with a `key`, `encode` rounds stochastically: the mean of the decoded values is `x` between `min` and `max`.

    Attributes:
        name: the name in the registry, in JSON and on the command line.
    """

    name: str
    kind: ClassVar[str]

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """How many bits one code takes, 1 to 8."""

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
        """The magnitude that a symmetric scale maps the largest element to; `max` unless the format says otherwise."""
        return self.max

    @property
    def is_signed(self) -> bool:
        """Whether the format has negative numbers."""
        return self.min < 0

    @property
    def has_nan(self) -> bool:
        """Whether some code means NaN."""
        return bool(np.isnan(self.values()).any())

    @property
    def smallest(self) -> float:
        """The smallest magnitude of the format above zero."""
        magnitudes = np.abs(self.values())
        return float(magnitudes[(magnitudes > 0) & np.isfinite(magnitudes)].min())

    @abc.abstractmethod
    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        """The code of the format's number nearest to each element.

        Args:
            x: real floating numbers; they are widened to float32 first.
            key: a JAX random key for stochastic rounding; None rounds to the nearest.

        Returns:
            One code an element, in the low `bits` bits.
        """

    @abc.abstractmethod
    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        """The number that each code stands for, exact in float32 and rounded once when `dtype` is narrower."""

    def nearest(self, x: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The format's number nearest to each element, `decode(encode(x))` but for NaN: what a search for scales tries.

        Args:
            x: as for `encode`.

        Returns:
            Float32 numbers of the format.
        """
        return self.decode(self.encode(x))

    @abc.abstractmethod
    def values(self) -> np.ndarray:
        """Every number in the order of its code, float64; NaN where a code means NaN."""


FORMATS: Registry[AbstractFormat] = Registry("format")
"""Every named format; `fb.FORMATS.names()` lists them, and `fb.FORMATS.add` takes a new one."""


def widened(x: jax.Array) -> Float[Array, "*s"]:
    """The array in float32, in which every code and scale is computed."""
    return jnp.asarray(x).astype(jnp.float32)


def rounded(x: Float[Array, "*s"], key: Key[Array, ""] | None) -> Float[Array, "*s"]:
    """Whole numbers: the nearest (ties to even) without a key, and with one the floor or the ceiling by chance.

    With a key, `P(ceil(x)) = x - floor(x)`, so the expectation is `x`; the fraction is exact in float32, and the noise has
    23 bits.
    """
    if key is None:
        return jnp.round(x)
    floor = jnp.floor(x)
    noise = jax.random.uniform(key, x.shape, jnp.float32)
    return floor + (noise < x - floor).astype(jnp.float32)


def quotient(x: Float[Array, "*s"], divisor: jax.Array) -> Float[Array, "*s"]:
    """`x / divisor`, rounded once, as IEEE 754 has it, for finite `x`; NaN for an infinity or a NaN.

    XLA turns a division by a broadcast divisor into a product with its reciprocal. That rounds twice, gives zeros for
    divisors above 2**126, and happens in other places under jit than without. A divisor that differs from element to element
    is left alone, so zero times the element is added to it here.
    """
    return x / (divisor + x * 0)


def rough_quotient(x: Float[Array, "*s"], divisor: jax.Array) -> Float[Array, "*s"]:
    """`x / divisor` by the divisor's reciprocal, which rounds twice: for searches, that compare errors of many candidates.

    A division for each element costs as much as all the rest of a search; one for each tile does not. It is exact for powers
    of two. Divisors above 2**126, whose reciprocals are subnormal, are taken in two steps.
    """
    largest = jnp.float32(2.0**126)
    reciprocal = 1 / jnp.minimum(divisor, largest)
    return x * reciprocal * (largest / jnp.maximum(divisor, largest))


def looked_up(table: np.ndarray, index: Integer[Array, "*s"]) -> jax.Array:
    """`table[index]`; an index beyond the table reads its last entry. The result is sharded as the index is."""
    return jnp.asarray(table).at[index].get(mode="clip", out_sharding=jax.typeof(index).sharding)


def settled(product: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The product, rounded before anything is added to it.

    XLA may round a product and a sum once, as one fused operation, and does so under jit but not without; a lower bound
    between the two, which nothing falls below, keeps them apart.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def power_of_two(exponent: jax.Array) -> Float[Array, "*s"]:
    """`2.0 ** exponent` for int32 exponents in -126..127, built from the bits, since `jnp.exp2` is inexact on CPU."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def exponent_of(x: Float[Array, "*s"]) -> jax.Array:
    """`floor(log2(|x|))` as int32 from the bits; -127 for zero and the numbers below 2**-126, 128 for Inf and NaN."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return ((bits >> 23) & 0xFF) - 127

"""Floating-point formats: e5m2, e4m3fn, e2m1, ..."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from ..errors import QuantError
from .format import FORMATS, AbstractFormat, exponent_of, power_of_two, rounded, widened

Specials = Literal["ieee", "fn", "fnuz", "none"]


@dataclasses.dataclass(frozen=True)
class Minifloat(AbstractFormat):
    """Floating-point numbers with any split into exponent and mantissa bits.

    Code `s, e, m` decodes to `(-1)**s * 2**(max(e, 1) - bias) * (m / 2**mantissa + (e > 0))`. `specials` says which codes
    are not numbers:

    - "ieee": the largest exponent encodes infinity (mantissa 0) and NaN (e5m2, e4m3, e3m4);
    - "fn": no infinity; the code of all ones is NaN (e4m3fn);
    - "fnuz": no infinity and no -0; the code of -0 is NaN (e4m3fnuz, e5m2fnuz, e4m3b11fnuz);
    - "none": every code is a finite number (e2m1, e2m3, e3m2 of the OCP MX specification).

    Encoding rounds to the nearest number, ties to the even code, subnormals included. It saturates: numbers beyond `max`,
    infinity included, become `max` (PTX's `satfinite`). NaN encodes as one fixed NaN code, or as 0 if there is none. -0 is
    kept if the format has it. Unsigned formats encode negative numbers as 0. Float32 subnormals count as zero, as XLA
    flushes them.

    Attributes:
        exponent: exponent bits, 1 to 8.
        mantissa: mantissa bits, 0 to 7.
        bias: the exponent bias; the smallest normal number is `2**(1 - bias)`.
        specials: which codes are not numbers, see above.
        signed: whether there is a sign bit.

    References: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0, section 5.3; ml_dtypes.

    >>> e2m1.encode(jnp.array([0.25, 0.75, 2.5, 7.0, -0.0])).tolist()
    [0, 2, 4, 7, 8]
    """

    kind: ClassVar[str] = "minifloat"
    exponent: int
    mantissa: int
    bias: int
    specials: Specials = "none"
    signed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.exponent < 1 or self.mantissa < 0:
            raise QuantError(
                f"format {self.name!r}: sign, exponent and mantissa take {self.bits} bits "
                f"({self.signed:d} + {self.exponent} + {self.mantissa}); they must fit in 8, with an exponent of at least 1"
            )
        if self.specials not in ("ieee", "fn", "fnuz", "none"):
            raise QuantError(f"format {self.name!r}: specials is {self.specials!r}; must be ieee, fn, fnuz or none")
        if self.specials == "ieee" and not self.mantissa:
            raise QuantError(f"format {self.name!r}: ieee needs at least 1 mantissa bit, to distinguish NaN from infinity")
        if self.specials == "fnuz" and not self.signed:
            raise QuantError(f"format {self.name!r}: fnuz encodes NaN as -0, so it needs a sign")
        largest_exponent = 2**self.exponent - 1 - self.bias
        if 1 - self.bias - self.mantissa < -126 or largest_exponent > min(127, 126 + self.mantissa) or self.bias < -80:
            raise QuantError(f"format {self.name!r}: its numbers must be normal float32 numbers; the bias is {self.bias}")

    @property
    def bits(self) -> int:
        return self.signed + self.exponent + self.mantissa

    @property
    def max(self) -> float:
        return float(self.values()[self.max_code])

    @property
    def min(self) -> float:
        if not self.signed:
            return 0.0
        return -self.max

    @property
    def max_code(self) -> int:
        """The code of the largest finite number, without its sign."""
        codes = 2 ** (self.exponent + self.mantissa)
        return {"ieee": codes - 2**self.mantissa - 1, "fn": codes - 2}.get(self.specials, codes - 1)

    @property
    def nan_code(self) -> int | None:
        """The code that NaN encodes to, or None."""
        sign_bit = 2 ** (self.exponent + self.mantissa)
        quiet_bit = 2 ** max(self.mantissa - 1, 0)
        codes = {"ieee": self.max_code + 1 + quiet_bit, "fn": sign_bit - 1, "fnuz": sign_bit}
        return codes.get(self.specials)

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = widened(x)
        magnitude = jnp.minimum(jnp.abs(x), jnp.float32(self.max))
        if key is None:
            code = self._nearest_code(magnitude)
        else:
            code = self._stochastic_code(magnitude, key)
        code = self._with_sign(jnp.minimum(code, self.max_code), x)
        return jnp.where(jnp.isnan(x), self.nan_code or 0, code).astype(jnp.uint8)

    def nearest(self, x: Float[Array, "*s"]) -> Float[Array, "*s"]:
        x = widened(x)
        magnitude = jnp.minimum(jnp.abs(x), jnp.float32(self.max))
        dropped = 23 - self.mantissa
        normal = jax.lax.bitcast_convert_type((self._rounded_bits(magnitude) >> dropped) << dropped, jnp.float32)
        # XLA would cancel the shifter in floating point, so the steps are counted in integers.
        subnormal = self._steps(magnitude).astype(jnp.float32) * jnp.float32(2.0 ** (1 - self.bias - self.mantissa))
        value = jnp.where(magnitude < self._smallest_normal, subnormal, normal)
        value = jnp.minimum(value, jnp.float32(self.max))
        if not self.signed:
            return jnp.where(jnp.signbit(x), jnp.zeros_like(value), value)
        signed = jnp.copysign(value, x)
        if self.specials == "fnuz":
            return jnp.where(value == 0, value, signed)
        return signed

    @property
    def _smallest_normal(self) -> np.float32:
        return np.float32(2.0 ** (1 - self.bias))

    @property
    def _shifter(self) -> np.float32:
        """The float32 whose last place is the smallest step. Adding it rounds a subnormal to whole steps."""
        return np.float32(2.0 ** (1 - self.bias - self.mantissa + 23))

    def _nearest_code(self, magnitude: Float[Array, "*s"]) -> jax.Array:
        """The code of the number nearest to a magnitude.

        It is the float32's upper bits, or a count of steps for subnormals.
        """
        dropped = 23 - self.mantissa
        # A carry of the rounding propagates from the mantissa into the exponent.
        normal = (self._rounded_bits(magnitude) >> dropped) - self._rebias
        return jnp.where(magnitude < self._smallest_normal, self._steps(magnitude), normal)

    def _steps(self, magnitude: Float[Array, "*s"]) -> jax.Array:
        """The magnitude in units of the smallest step, rounded; for subnormals."""
        return jax.lax.bitcast_convert_type(magnitude + self._shifter, jnp.int32) - int(self._shifter.view(np.int32))

    @property
    def _rebias(self) -> int:
        """The difference of the exponent biases, in place. float32 bits minus this are a code."""
        return (127 - self.bias) << self.mantissa

    def _rounded_bits(self, magnitude: Float[Array, "*s"]) -> jax.Array:
        """The float32 bits plus half a unit of the last kept place. Truncation then rounds to nearest even."""
        dropped = 23 - self.mantissa
        bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
        is_odd = ((bits >> dropped) - self._rebias) & 1
        return bits + ((1 << (dropped - 1)) - 1) + is_odd

    def _stochastic_code(self, magnitude: Float[Array, "*s"], key: Key[Array, ""]) -> jax.Array:
        """The code of the number below or above, chosen in units of the last place."""
        smallest_exponent = 1 - self.bias
        exponent = jnp.maximum(exponent_of(magnitude), smallest_exponent)
        steps = rounded(magnitude * power_of_two(self.mantissa - exponent), key).astype(jnp.int32)
        return ((exponent - smallest_exponent) << self.mantissa) + steps

    def _with_sign(self, code: jax.Array, x: jax.Array) -> jax.Array:
        """The code with the sign of `x`. 0 for negative numbers in an unsigned format."""
        negative = jnp.signbit(x)
        if not self.signed:
            return jnp.where(negative, 0, code)
        if self.specials == "fnuz":
            negative = negative & (code > 0)
        return code + (negative.astype(jnp.int32) << (self.exponent + self.mantissa))

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        code = codes.astype(jnp.int32)
        field = (code >> self.mantissa) & (2**self.exponent - 1)
        is_normal = field > 0
        significand = (code & (2**self.mantissa - 1)) + (is_normal.astype(jnp.int32) << self.mantissa)
        # No intermediate is a subnormal float32, so a device that flushes them decodes the same.
        value = significand.astype(jnp.float32) * power_of_two(jnp.maximum(field, 1) - self.bias - self.mantissa)
        if self.signed:
            negative = (code >> (self.exponent + self.mantissa)) & 1 > 0
            value = jnp.where(negative, -value, value)
        return self._with_specials(value, code).astype(dtype)

    def _with_specials(self, value: jax.Array, code: jax.Array) -> jax.Array:
        """The decoded values with NaN and infinity at their codes."""
        unsigned = code & (2 ** (self.exponent + self.mantissa) - 1)
        if self.specials == "ieee":
            infinity = jnp.where(value < 0, -jnp.inf, jnp.inf)
            value = jnp.where(unsigned == self.max_code + 1, infinity, value)
            return jnp.where(unsigned > self.max_code + 1, jnp.nan, value)
        if self.specials == "fn":
            return jnp.where(unsigned > self.max_code, jnp.nan, value)
        if self.specials == "fnuz":
            return jnp.where(code == self.nan_code, jnp.nan, value)
        return value

    def values(self) -> np.ndarray:
        code = np.arange(2 ** (self.exponent + self.mantissa))
        field, fraction = code >> self.mantissa, (code % 2**self.mantissa) / 2**self.mantissa
        positive = 2.0 ** (np.maximum(field, 1) - self.bias) * (fraction + (field > 0))
        if self.specials in ("ieee", "fn"):
            positive[self.max_code + 1 :] = np.nan
        if self.specials == "ieee":
            positive[self.max_code + 1] = np.inf
        if not self.signed:
            return positive
        values = np.concatenate([positive, -positive])
        if self.specials == "fnuz":
            values[self.nan_code] = np.nan
        return values


def _add(name: str, exponent: int, mantissa: int, bias: int, specials: Specials = "none", signed: bool = True) -> Minifloat:
    minifloat = Minifloat(name, exponent, mantissa, bias, specials, signed)
    FORMATS.add(name, minifloat)
    return minifloat


e5m2 = _add("e5m2", 5, 2, 15, "ieee")
e4m3fn = _add("e4m3fn", 4, 3, 7, "fn")
e4m3fnuz = _add("e4m3fnuz", 4, 3, 8, "fnuz")
e5m2fnuz = _add("e5m2fnuz", 5, 2, 16, "fnuz")
e4m3b11fnuz = _add("e4m3b11fnuz", 4, 3, 11, "fnuz")
e4m3 = _add("e4m3", 4, 3, 7, "ieee")
e3m4 = _add("e3m4", 3, 4, 3, "ieee")
e3m2 = _add("e3m2", 3, 2, 3)
e2m3 = _add("e2m3", 2, 3, 1)
e2m1 = _add("e2m1", 2, 1, 1)
ue4m3 = _add("ue4m3", 4, 3, 7, "fn", signed=False)
ue5m3 = _add("ue5m3", 5, 3, 15, signed=False)
ue4m4 = _add("ue4m4", 4, 4, 7, signed=False)

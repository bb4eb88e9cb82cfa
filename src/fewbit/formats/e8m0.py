"""E8M0: power-of-two scales of the OCP Microscaling formats."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from .format import FORMATS, AbstractFormat, exponent_of, widened


@dataclasses.dataclass(frozen=True)
class E8M0(AbstractFormat):
    """Powers of two `2**(code - 127)` for codes 0 to 254. 255 is NaN. No zero, sign or infinity.

    Encoding rounds to the nearest power of two, ties (1.5 times a power) to the even code. Zero, negative numbers and all
    below 2**-126 (subnormal in float32, so devices may read them as zero) become code 0; infinity and numbers above
    2**127 become 254; NaN becomes 255. Stochastic rounding chooses between the two nearest powers, without bias.

    Code 0 decodes, from its bits, to 2**-127: a subnormal float32, which devices may flush to zero. So `dequantize`
    multiplies in two steps.

    Reference: OCP Microscaling Formats 1.0, section 5.4.1.

    >>> e8m0.encode(jnp.array([0.0, 1.0, 1.5, 3.0, 1e30, jnp.nan])).tolist()
    [0, 127, 128, 128, 227, 255]
    """

    kind: ClassVar[str] = "e8m0"
    is_power_of_two: ClassVar[bool] = True
    bits: ClassVar[int] = 8
    max: ClassVar[float] = 2.0**127
    min: ClassVar[float] = 2.0**-127

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = widened(x)
        positive = jnp.clip(x, 2.0**-126, 2.0**127)
        code = exponent_of(positive) + 127
        mantissa = jax.lax.bitcast_convert_type(positive, jnp.int32) & 0x7FFFFF
        if key is None:
            half = 1 << 22
            up = (mantissa > half) | ((mantissa == half) & (code % 2 == 1))
        else:
            up = jax.random.randint(key, x.shape, 0, 1 << 23) < mantissa
        # Below 2**-126 the float32 numbers are subnormal; everything there is nearest to 2**-127 or treated as zero.
        code = jnp.where(x < 2.0**-126, 0, jnp.minimum(code + up.astype(jnp.int32), 254))
        return jnp.where(jnp.isnan(x), 255, code).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        code = codes.astype(jnp.int32)
        bits = jnp.where(code == 0, 1 << 22, code << 23)
        bits = jnp.where(code == 255, 0x7FC00000, bits)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)

    def values(self) -> np.ndarray:
        values = 2.0 ** (np.arange(256) - 127.0)
        values[255] = np.nan
        return values


e8m0 = E8M0("e8m0")
"""The scale format of OCP Microscaling."""

FORMATS.add("e8m0", e8m0)

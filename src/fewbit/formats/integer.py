"""Integer formats, signed and unsigned, 1-8 bits."""

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from ..errors import QuantError
from .format import FORMATS, AbstractFormat, rounded, widened


@dataclasses.dataclass(frozen=True)
class Integer(AbstractFormat):
    """Integers of `width` bits, times `step`.

    Signed codes are two's complement. Their range follows one of two conventions:

    - "full": codes `-2**(b-1) .. 2**(b-1) - 1`; a symmetric scale maps the largest element to `2**(b-1) - 0.5`
      (Qwix, compressed-tensors), so that both ends of the range are used;
    - "narrow": codes `-(2**(b-1) - 1) .. 2**(b-1) - 1`; the largest element maps to the largest code (AQT, eFormer, GGUF).
      The most negative code is never encoded, and decodes to its two's complement value.

    Ties round to the even integer. Numbers beyond the range, infinity included, saturate. NaN and -0 encode as 0.

    Attributes:
        width: bits per code, 1 to 8.
        signed: whether negative numbers exist.
        narrow: whether the range is "narrow"; needs a signed format of at least 2 bits.
        step: the number of code 1, a power of two: 2**-6 for the elements of MXINT8, else 1. All numbers must be normal in float32.

    >>> int4.encode(jnp.array([-9.0, -1.0, 0.5, 1.5, 7.4])).tolist()
    [8, 15, 0, 2, 7]
    """

    kind: ClassVar[str] = "integer"
    width: int
    signed: bool = True
    narrow: bool = False
    step: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.width <= 8:
            raise QuantError(f"format {self.name!r}: width is {self.width}, must be 1 to 8 bits")
        if self.narrow and (not self.signed or self.width < 2):
            raise QuantError(f"format {self.name!r}: the narrow range needs a signed format of at least 2 bits")
        if not 2.0**-126 <= self.step <= 2.0 ** (127 - self.width) or math.frexp(self.step)[0] != 0.5:
            raise QuantError(
                f"format {self.name!r}: step is {self.step}, must be a power of two whose codes are normal float32 numbers"
            )

    @property
    def bits(self) -> int:
        return self.width

    @property
    def max(self) -> float:
        return (2.0 ** (self.width - self.signed) - 1) * self.step

    @property
    def min(self) -> float:
        if not self.signed:
            return 0.0
        return -self.max - self.step * (not self.narrow)

    @property
    def bound(self) -> float:
        """`qmax + 0.5` for a full signed range, else `qmax` (times the step)."""
        is_full = self.signed and not self.narrow
        return self.max + 0.5 * is_full * self.step

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = widened(x)
        if self.step != 1:
            x = x * jnp.float32(1 / self.step)
        x = jnp.clip(x, self.min / self.step, self.max / self.step)
        whole = rounded(jnp.where(jnp.isnan(x), 0.0, x), key).astype(jnp.int8 if self.signed else jnp.uint8)
        return whole.astype(jnp.uint8) & jnp.uint8(2**self.width - 1)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        spare = 8 - self.width
        if self.signed:  # the left shift moves the sign bit to the top, the arithmetic right shift extends it
            codes = (codes << spare).astype(jnp.int8) >> spare
        return (codes.astype(jnp.float32) * jnp.float32(self.step)).astype(dtype)

    def values(self) -> np.ndarray:
        codes = np.arange(2**self.width)
        is_negative = self.signed & (codes >= 2 ** (self.width - 1))
        return (codes - 2**self.width * is_negative) * float(self.step)


for _bits in range(1, 9):
    FORMATS.add(f"int{_bits}", Integer(f"int{_bits}", _bits))
    FORMATS.add(f"uint{_bits}", Integer(f"uint{_bits}", _bits, signed=False))
    if _bits > 1:
        FORMATS.add(f"int{_bits}_narrow", Integer(f"int{_bits}_narrow", _bits, narrow=True))

int4, int8 = FORMATS["int4"], FORMATS["int8"]
mxint8_element = FORMATS.add("mxint8_element", Integer("mxint8_element", 8, narrow=True, step=2.0**-6))

"""Whole numbers of 1 to 8 bits, signed and unsigned, in two's complement."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from ..errors import QuantError
from .format import FORMATS, AbstractFormat, rounded, widened


@dataclasses.dataclass(frozen=True)
class Integer(AbstractFormat):
    """The integers of `width` bits, times `step`.

    A signed format's codes are two's complement. Its range is a matter of convention, and both are in use:

    - "full": codes `-2**(b-1) .. 2**(b-1) - 1`, and a symmetric scale maps the largest element to `2**(b-1) - 0.5`
      (Qwix, compressed-tensors), so that both ends of the range are used;
    - "narrow": codes `-(2**(b-1) - 1) .. 2**(b-1) - 1`, the largest element at the largest code (AQT, eFormer, GGUF).
      The most negative code is never encoded, and decodes to its two's complement value.

    Ties round to the even integer. Beyond the range (and at infinity) the nearest end is taken. NaN encodes as 0, and -0
    as 0, since the format has neither.

    Attributes:
        width: bits a code, 1 to 8.
        signed: whether negative numbers exist.
        narrow: whether the range is "narrow"; a signed format of at least 2 bits.
        step: the number that code 1 stands for: 2**-6 for the elements of MXINT8, else 1. A power of two.

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
        if not self.step > 0 or np.frexp(self.step)[0] != 0.5:
            raise QuantError(f"format {self.name!r}: step is {self.step}, must be a power of two")

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
        return -self.max if self.narrow else -self.max - self.step

    @property
    def bound(self) -> float:
        """`qmax + 0.5` for a full signed range, else `qmax` (times the step)."""
        half = 0.5 if self.signed and not self.narrow else 0.0
        return self.max + half * self.step

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = widened(x) if self.step == 1 else widened(x) * jnp.float32(1 / self.step)
        x = jnp.clip(x, self.min / self.step, self.max / self.step)
        whole = rounded(jnp.where(jnp.isnan(x), 0.0, x), key).astype(jnp.int8 if self.signed else jnp.uint8)
        return whole.astype(jnp.uint8) & jnp.uint8(2**self.width - 1)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        # The sign bit sits at the top of a byte after the left shift, and the arithmetic right shift extends it.
        spare = 8 - self.width
        if self.signed:
            codes = (codes << spare).astype(jnp.int8) >> spare
        return (codes.astype(jnp.float32) * jnp.float32(self.step)).astype(dtype)

    def values(self) -> np.ndarray:
        codes = np.arange(2**self.width)
        wrapped = codes - 2**self.width * (codes >= 2 ** (self.width - 1)) if self.signed else codes
        return wrapped * self.step


for _bits in range(1, 9):
    FORMATS.add(f"int{_bits}", Integer(f"int{_bits}", _bits))
    FORMATS.add(f"uint{_bits}", Integer(f"uint{_bits}", _bits, signed=False))
    if _bits > 1:
        FORMATS.add(f"int{_bits}_narrow", Integer(f"int{_bits}_narrow", _bits, narrow=True))

int4, int8 = FORMATS["int4"], FORMATS["int8"]
mxint8_element = FORMATS.add("mxint8_element", Integer("mxint8_element", 8, narrow=True, step=2.0**-6))

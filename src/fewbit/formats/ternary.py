"""Binary {-1, +1} and ternary {-1, 0, +1}."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, UInt8

from .format import FORMATS, AbstractFormat, rounded, widened


@dataclasses.dataclass(frozen=True)
class Binary(AbstractFormat):
    """The numbers -1 (code 0) and +1 (code 1), one bit each.

    0, -0 and NaN encode as +1. With a key the result is +1 with probability `(1 + x) / 2` for `x` in [-1, 1].

    >>> binary.encode(jnp.array([-0.1, 0.0, 3.0])).tolist()
    [0, 1, 1]
    """

    kind: ClassVar[str] = "binary"
    bits: ClassVar[int] = 1
    max: ClassVar[float] = 1.0
    min: ClassVar[float] = -1.0

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = widened(x)
        if key is None:
            return (~(x < 0)).astype(jnp.uint8)
        noise = jax.random.uniform(key, x.shape, jnp.float32)
        return (~(noise >= (x + 1) / 2)).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        return (codes.astype(jnp.float32) * 2 - 1).astype(dtype)

    def values(self) -> np.ndarray:
        return np.array([-1.0, 1.0])


@dataclasses.dataclass(frozen=True)
class Ternary(AbstractFormat):
    """The numbers -1, 0 and +1 (codes 0, 1, 2), two bits each.

    `clip(round(x), -1, 1)`, ties to zero, BitNet b1.58's rule. NaN encodes as 0. Code 3 is never encoded; it decodes to 2.

    Reference: Ma et al., The Era of 1-bit LLMs (arXiv 2402.17764), equation 1.

    >>> ternary.encode(jnp.array([-2.0, -0.5, 0.4, 0.6])).tolist()
    [0, 1, 1, 2]
    """

    kind: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2
    max: ClassVar[float] = 1.0
    min: ClassVar[float] = -1.0

    def encode(self, x: Float[Array, "*s"], *, key: Key[Array, ""] | None = None) -> UInt8[Array, "*s"]:
        x = jnp.clip(widened(x), -1.0, 1.0)
        whole = rounded(jnp.where(jnp.isnan(x), 0.0, x), key)
        return (whole + 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*s"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*s"]:
        return (codes.astype(jnp.float32) - 1).astype(dtype)

    def values(self) -> np.ndarray:
        return np.array([-1.0, 0.0, 1.0])


binary, ternary = Binary("binary"), Ternary("ternary")
FORMATS.add("binary", binary)
FORMATS.add("ternary", ternary)

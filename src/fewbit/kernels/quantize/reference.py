"""The reference backends of quantize and dequantize."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ...array.qarray import QArray
from ...array.quantize import dequantized, quantized
from ..backend import AbstractBackend
from .problem import Decoding, Quantization


@dataclasses.dataclass(frozen=True)
class ReferenceQuantizer(AbstractBackend[Quantization]):
    """Plain JAX, on any device, for any scheme."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Quantization) -> str | None:
        return None

    def run(self, problem: Quantization, *operands: PyTree) -> QArray:
        x, weights, key, scale, offset = operands
        return quantized(x, problem.scheme, weights, key, scale, offset, problem.shared_noise)


@dataclasses.dataclass(frozen=True)
class ReferenceDequantizer(AbstractBackend[Decoding]):
    """Plain JAX, on any device, for any scheme."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Decoding) -> str | None:
        return None

    def run(self, problem: Decoding, *operands: PyTree) -> jax.Array:
        return dequantized(*operands, jnp.dtype(problem.dtype))

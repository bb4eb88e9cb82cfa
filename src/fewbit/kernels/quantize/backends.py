"""The registries of quantize and dequantize, and their reference backends."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..._registry import Registry
from ...array import QArray
from ...array.quantize import dequantized, quantized
from ..backend import AbstractBackend
from .problem import Decoding, Quantization

QUANTIZERS: Registry[AbstractBackend[Quantization]] = Registry("quantize")
"""The backends of quantize; the last that supports the problem is chosen."""

DEQUANTIZERS: Registry[AbstractBackend[Decoding]] = Registry("dequantize")
"""The backends of dequantize; the last that supports the problem is chosen."""


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


QUANTIZERS.add("reference", ReferenceQuantizer())
DEQUANTIZERS.add("reference", ReferenceDequantizer())

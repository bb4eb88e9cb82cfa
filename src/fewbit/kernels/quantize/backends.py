"""The backends of quantize and dequantize, and the first of each: `fewbit.array`'s own, in plain JAX."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from ..._registry import Registry
from ...array.quantize import dequantized, quantized
from ..select import AbstractBackend
from .problem import Decoding, Quantization

QUANTIZERS: Registry[AbstractBackend[Quantization]] = Registry("quantize")
"""The backends of quantize; the last that can is taken, the reference when no other can."""

DEQUANTIZERS: Registry[AbstractBackend[Decoding]] = Registry("dequantize")
"""The backends of dequantize; the last that can is taken, the reference when no other can."""


@dataclasses.dataclass(frozen=True)
class ReferenceQuantizer(AbstractBackend[Quantization]):
    """Plain JAX, on any device, for any scheme."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Quantization) -> str | None:
        return None

    def run(self, problem: Quantization, *operands: Any) -> Any:
        x, weights, key, scale, offset = operands
        return quantized(x, problem.scheme, weights, key, scale, offset, problem.shared_noise)


@dataclasses.dataclass(frozen=True)
class ReferenceDequantizer(AbstractBackend[Decoding]):
    """Plain JAX, on any device, for any scheme."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Decoding) -> str | None:
        return None

    def run(self, problem: Decoding, *operands: Any) -> Any:
        return dequantized(*operands, jnp.dtype(problem.dtype))


QUANTIZERS.add("reference", ReferenceQuantizer())
DEQUANTIZERS.add("reference", ReferenceDequantizer())

"""Quantize on TPUs by a Pallas kernel."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ...._tiles import tile_counts
from ....array.packing import Packing, packed_length
from ....array.qarray import QArray
from ....array.quantize import assembled, tensor_scale_of
from ....array.scheme import Scheme
from ....formats.codebook import Codebook
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ....formats.minifloat import Minifloat
from ...backend import AbstractBackend
from ...lowering import split_refusal
from ..problem import Quantization
from .scales import unchosen
from .tiles import tile_length, tile_refusal, tiled_axis


@dataclasses.dataclass(frozen=True)
class PallasTPUQuantizer(AbstractBackend[Quantization]):
    """A Pallas kernel for TPUs; gives the bytes of the reference, except where a TPU's division rounds differently.

    Attributes:
        interpret: whether JAX evaluates the kernel step by step instead of compiling it; for tests, on any platform.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str] = "tpu"
    experimental: ClassVar[bool] = True
    interpret: bool = False

    def unsupported(self, problem: Quantization) -> str | None:
        if problem.is_stochastic or problem.is_given or problem.is_weighted:
            return "stochastic rounding, given scales and weighted errors: use backend='reference'"
        if problem.dtype not in ("float32", "bfloat16"):
            return f"the array is {problem.dtype}, must be float32 or bfloat16"
        refusal = _scheme_refusal(problem.scheme) or tile_refusal(problem.shape, problem.scheme)
        return refusal or unchosen(problem.scheme, tile_length(problem.shape, problem.scheme))

    def not_chosen(self, problem: Quantization) -> str | None:
        return split_refusal()

    def run(self, problem: Quantization, *operands: PyTree) -> QArray:
        return _quantized(problem.scheme, self.interpret, operands[0])


def _scheme_refusal(scheme: Scheme) -> str | None:
    """Why the kernel cannot encode a scheme; None when it can."""
    fmt = scheme.format
    if scheme.packing != Packing():
        return "interleaved or high-first packing: use backend='reference'"
    if not (isinstance(fmt, Integer | Minifloat) or _is_ordered(fmt)):
        return f"it cannot encode {fmt.name}; it encodes integers, minifloats and codebooks in ascending order"
    return None


def _is_ordered(fmt: AbstractFormat) -> bool:
    """Whether a codebook has up to 16 numbers in ascending order, with one zero."""
    if not isinstance(fmt, Codebook) or len(fmt.table) > 16 or 0.0 not in fmt.values():
        return False
    codes = fmt.sorted_numbers[1]
    return fmt.zero_codes is None and list(codes) == list(range(len(codes)))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _quantized(scheme: Scheme, interpret: bool, x: jax.Array) -> QArray:
    from .quantize import quantized_tiles  # importing Pallas takes half a second

    tiles = scheme.tiles(x.ndim)
    axis = tiled_axis(x.shape, tiles, scheme)
    assert axis is not None
    is_last, tile = axis == -1, tiles[axis] or x.shape[axis]
    batch = 1 if is_last else math.prod(x.shape[:-2])
    matrices = x.reshape(batch, -1, x.shape[-1])
    unit = tensor_scale_of(x, scheme)
    codes, scale, zero = quantized_tiles(matrices, scheme, tile, unit, is_last=is_last, interpret=interpret)
    packed, counts = list(x.shape), tile_counts(x.shape, tiles)
    packed[axis] = packed_length(x.shape[axis], scheme.format.bits)
    if zero is not None:
        zero = zero.reshape(counts)
    if unit is not None:
        unit = unit.reshape((1,) * x.ndim)
    return assembled(x, scheme, codes.reshape(packed), scale.reshape(counts), zero, unit)

"""Quantize on TPUs by the Pallas kernel in `quantize.py`."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
from jaxtyping import PyTree

from ...._tiles import Tile, tile_counts
from ....array import QArray, Scheme
from ....array.packing import Packing, codes_per_unit, packed_length
from ....array.quantize import assembled, quantized, tensor_scale_of
from ....formats import AbstractFormat, Codebook, Integer, Minifloat
from ...backend import AbstractBackend
from ...devices import split_refusal
from ...platforms import on_platform
from ..backends import QUANTIZERS
from ..problem import Quantization
from .scales import unchosen

LONGEST_TILE = 4096


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
        return _quantized(self, problem, operands[0])


def tile_refusal(shape: tuple[int, ...], scheme: Scheme) -> str | None:
    """Why the kernels do not support this shape and these tiles; None when they do."""
    tiles = scheme.tiles(len(shape))
    axis = tiled_axis(shape, tiles, scheme)
    if axis is None:
        return f"tiles {tiles} extend over several axes, or not along one of the last two"
    tile, group = tile_length(shape, scheme), codes_per_unit(scheme.format.bits)
    if tile < shape[axis] and tile % group:
        return f"tiles of {tile} on axis {axis}; the length must be a multiple of {group}, the codes that fill whole bytes"
    if tile > LONGEST_TILE:
        return f"tiles of {tile}; up to {LONGEST_TILE} fit in VMEM"
    return None


def tile_length(shape: tuple[int, ...], scheme: Scheme) -> int:
    """The tile (block) size of an array whose tiles extend along one axis."""
    tiles = scheme.tiles(len(shape))
    axis = tiled_axis(shape, tiles, scheme)
    assert axis is not None
    return min(tiles[axis] or shape[axis], shape[axis])


def tiled_axis(shape: tuple[int, ...], tiles: tuple[Tile, ...], scheme: Scheme) -> int | None:
    """The axis along which tiles extend, -1 or -2; None for another or several axes."""
    extended = [a - len(shape) for a, tile in enumerate(tiles) if tile != 1 and shape[a] > 1]
    if extended not in ([], [scheme.pack_axis]) or scheme.pack_axis < -2:
        return None
    return scheme.pack_axis


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


@functools.partial(jax.jit, static_argnames=("backend", "problem"), inline=True)
def _quantized(backend: PallasTPUQuantizer, problem: Quantization, x: jax.Array) -> QArray:
    """The kernel on TPUs, the reference elsewhere; derivatives are the reference's."""

    def reference(x: jax.Array) -> QArray:
        return quantized(x, problem.scheme, None, None, None, None)

    native = functools.partial(_by_kernel, problem.scheme, backend.interpret)
    if backend.interpret:
        return native(x)
    return on_platform("tpu", native, reference)(x)


def _by_kernel(scheme: Scheme, interpret: bool, x: jax.Array) -> QArray:
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


QUANTIZERS.add(PallasTPUQuantizer.name, PallasTPUQuantizer())

"""Dequantize on TPUs by a Pallas kernel, which stands in `pallas_dequantize.py`, inside the program that JAX compiles."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._tiles import tile_counts
from ...array import QArray, Scheme
from ...array.packing import Packing
from ...array.quantize import dequantized
from ...formats import Codebook
from ..devices import split_refusal
from ..platforms import on_platform
from ..select import AbstractBackend
from .backends import DEQUANTIZERS
from .problem import Decoding
from .tpu import tile_length, tile_refusal, tiled_axis


@dataclasses.dataclass(frozen=True)
class PallasTPUDequantizer(AbstractBackend[Decoding]):
    """A Pallas kernel for TPUs, of the same numbers as the reference but for E8M0 scales of 2**-127, which it takes as 0.

    Attributes:
        interpret: whether JAX evaluates the kernel step by step instead of compiling it; for tests, on any platform.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str] = "tpu"
    experimental: ClassVar[bool] = True
    interpret: bool = False

    def unsupported(self, problem: Decoding) -> str | None:
        scheme, shape = problem.scheme, problem.shape
        if problem.dtype not in ("float32", "bfloat16"):
            return f"the array is {problem.dtype}, must be float32 or bfloat16"
        if scheme.packing != Packing() or isinstance(scheme.scale, Scheme):
            return "other orders of packing, and scales that are quantized themselves, are left to the reference"
        if isinstance(scheme.format, Codebook) and len(scheme.format.table) > 16:
            return f"{scheme.format.name} is a table of {len(scheme.format.table)} numbers; 16 are decoded without a gather"
        tiles = scheme.tiles(len(shape))
        if any(min(a or n, n) != min(b or n, n) for a, b, n in zip(problem.tiles, tiles, shape, strict=True)):
            return f"its tiles are {problem.tiles}, where the scheme has {tiles}"
        return tile_refusal(shape, scheme)

    def passed_over(self, problem: Decoding) -> str | None:
        return split_refusal()

    def run(self, problem: Decoding, *operands: Any) -> jax.Array:
        return _decoded(self, problem, operands[0])


DEQUANTIZERS.add(PallasTPUDequantizer.name, PallasTPUDequantizer())


@functools.partial(jax.jit, static_argnames=("backend", "problem"), inline=True)
def _decoded(backend: PallasTPUDequantizer, problem: Decoding, q: QArray) -> jax.Array:
    """The kernel on TPUs, the reference elsewhere; derivatives are the reference's."""
    dtype = jnp.dtype(problem.dtype)

    def reference(q: QArray) -> jax.Array:
        return dequantized(q, dtype)

    native = functools.partial(_by_kernel, dtype, backend.interpret)
    return native(q) if backend.interpret else on_platform("tpu", native, reference)(q)


def _by_kernel(dtype: Any, interpret: bool, q: QArray) -> jax.Array:
    from .pallas_dequantize import decoded_tiles  # importing Pallas takes half a second

    scheme, tiles = q.scheme, q.scheme.tiles(q.ndim)
    axis = tiled_axis(q.shape, tiles, scheme)
    assert axis is not None
    is_last, counts = axis == -1, tile_counts(q.shape, tiles)
    batch = 1 if is_last else math.prod(q.shape[:-2])

    def matrices(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(batch, -1, leaf.shape[-1])

    def beside(leaf: jax.Array) -> jax.Array:
        """With the tiles' axis first; float16, which TPUs lack, as its bits."""
        wide = matrices(jnp.broadcast_to(leaf, counts))
        wide = wide.swapaxes(1, 2) if is_last else wide
        return jax.lax.bitcast_convert_type(wide, jnp.uint16) if wide.dtype == jnp.float16 else wide

    assert not isinstance(q.scale, QArray)
    held = {"scale": beside(q.scale)}
    if q.zero_point is not None:
        held["zero_point"] = beside(q.zero_point)
    if q.tensor_scale is not None:
        held["tensor_scale"] = q.tensor_scale.reshape(1, 1)
    length, tile = q.shape[axis], tile_length(q.shape, scheme)
    rows = decoded_tiles(matrices(q.codes), held, scheme, length, tile, dtype, is_last=is_last, interpret=interpret)
    return rows.reshape(q.shape)

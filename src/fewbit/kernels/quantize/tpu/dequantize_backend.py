"""Dequantize on TPUs by a Pallas kernel."""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ...._tiles import tile_counts
from ....array.packing import Packing
from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....formats.codebook import Codebook
from ...backend import AbstractBackend
from ...lowering import split_refusal
from ..problem import Decoding
from .tiles import tile_length, tile_refusal, tiled_axis


@dataclasses.dataclass(frozen=True)
class PallasTPUDequantizer(AbstractBackend[Decoding]):
    """A Pallas kernel for TPUs; gives the numbers of the reference, except that E8M0 scales of 2**-127 count as 0.

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
            return "interleaved or high-first packing, or quantized scales: use backend='reference'"
        if isinstance(scheme.format, Codebook) and len(scheme.format.table) > 16:
            return f"{scheme.format.name} is a codebook of {len(scheme.format.table)} numbers; up to 16 are decoded"
        tiles = scheme.tiles(len(shape))
        if any(min(a or n, n) != min(b or n, n) for a, b, n in zip(problem.tiles, tiles, shape, strict=True)):
            return f"its tiles are {problem.tiles}, and the scheme's are {tiles}; they must agree"
        return tile_refusal(shape, scheme)

    def not_chosen(self, problem: Decoding) -> str | None:
        return split_refusal()

    def run(self, problem: Decoding, *operands: PyTree) -> jax.Array:
        return _decoded(jnp.dtype(problem.dtype), self.interpret, operands[0])


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _decoded(dtype: DTypeLike, interpret: bool, q: QArray) -> jax.Array:
    from .dequantize import decoded_tiles  # importing Pallas takes half a second

    scheme, tiles = q.scheme, q.scheme.tiles(q.ndim)
    axis = tiled_axis(q.shape, tiles, scheme)
    assert axis is not None
    is_last, counts = axis == -1, tile_counts(q.shape, tiles)
    batch = 1 if is_last else math.prod(q.shape[:-2])

    def matrices(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(batch, -1, leaf.shape[-1])

    def by_tile(leaf: jax.Array) -> jax.Array:  # [batch, tiles, others]
        wide = matrices(jnp.broadcast_to(leaf, counts))
        if is_last:
            wide = wide.swapaxes(1, 2)
        if wide.dtype == jnp.float16:  # TPUs have no float16: its bits
            wide = jax.lax.bitcast_convert_type(wide, jnp.uint16)
        return wide

    assert not isinstance(q.scale, QArray)
    scales = {"scale": by_tile(q.scale)}
    if q.zero_point is not None:
        scales["zero_point"] = by_tile(q.zero_point)
    if q.tensor_scale is not None:
        scales["tensor_scale"] = q.tensor_scale.reshape(1, 1)
    length, tile = q.shape[axis], tile_length(q.shape, scheme)
    rows = decoded_tiles(matrices(q.codes), scales, scheme, length, tile, dtype, is_last=is_last, interpret=interpret)
    return rows.reshape(q.shape)

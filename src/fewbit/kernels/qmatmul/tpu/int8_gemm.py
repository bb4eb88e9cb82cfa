"""TPU kernel for two quantized operands: int8 or FP8 matmul, then scaling.

**Tiling.** The grid is (rows of x, N, K). A step unpacks a block of weight codes to bytes in VMEM and multiplies it, one scale
tile of K at a time, with the bytes of x. The sums of a tile are exact int32 (float32 for FP8); they are scaled and added to a
float32 accumulator in VMEM scratch. With one scale along K the accumulator is int32, and it is scaled once, in the last step.

**Bound.** Few rows: the bytes of the weight, each read once as stored. Many rows: the matrix unit (MXU), which multiplies int8
twice as fast as bfloat16 on v5e, v5p and v6e. Codes are never converted to float before they are summed.

**Nibbles to bytes without planes.** The bytes of a register are stacked along sublanes, and so are the two nibbles of a byte in
an int4 register: byte i has the rows 2i (low) and 2i + 1 (high), which is fewbit's packing. So `pltpu.bitcast` gives `[K, N]`
numbers from `[K/2, N]` bytes without an operation, one conversion makes bytes of them, and x stays in order. Bytes packed along
lanes are transposed first. Unsigned codes are shifted by half their range with one XOR of the byte, and so are their zero
points.

**Scales** are passed as float32, laid out like the result: one per tile and column of it, one per tile and row of x. Scaling
costs `M x N` operations of the vector unit per tile, the bound for many rows; so per-row scales of x are applied to the
accumulator. Tiles shorter than the depth of the MXU (128 codes on v5e, 256 on v6e) leave the rest of it idle.

**Zero points.** With codes c and d and zero points z and w, `sum((c - z) (d - w)) = sum(c d) - w sum(c - z) - z sum(d)`. The
sums of x are computed before the kernel; those of the weight's codes by a product with ones, which are zero past the end of K.
All of it is exact in int32.

**Any shape.** x is zero-padded to full blocks, so values past the weight's end do not count: an integer times zero is zero. FP8
bytes, which may be NaN there, are replaced by zeros.

v4 is not supported: Mosaic has no int8 matmul there. Cycle counts and attempts that did not pay:
docs/design/kernels-accelerators.md.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....array.qarray import QArray
from ....array.quantize import expanded_scale, expanded_zero_point
from ....formats.format import AbstractFormat
from ..code_product import native_float
from ..matrix_view import contracted_axis
from .blocks import PAIRS, Block, Config
from .int8_blocks import Pair
from .kernel import AbstractProduct, Arrays, Part, Refs, matmul, nibbles, stacked


def paired_stacks(
    x: QArray, q: QArray, *, contracts_last: bool, result: DTypeLike, config: Config = PAIRS, interpret: bool = False
) -> jax.Array:
    """`AbstractKernel.paired`; other arguments as in `gemm.stacked_product`.

    x `[B, M, K]` has one code per byte and tiles along K only; if scales vary along K on both sides, their tiles are equal.
    Integer sums are exact within a tile; tiles are added in float32.
    """
    pair = Pair.of(x, q, contracts_last=contracts_last, result=result, config=config)
    return stacked(PairedProduct(pair), x, q, interpret=interpret).astype(result)


@dataclasses.dataclass(frozen=True)
class PairedProduct(AbstractProduct):
    """Codes times packed codes: one part per scale tile along K.

    Attributes:
        pair: the product in blocks.
    """

    name: ClassVar[str] = "fewbit_paired_qmatmul"
    vmem_limit_bytes: ClassVar[int | None] = 32 << 20
    pair: Pair

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.pair.grid

    @property
    def sums(self) -> np.dtype:
        if self.pair.is_whole and self.pair.tiles == 1:
            return np.dtype(np.int32)
        return np.dtype(np.float32)

    def arrays(self, x: QArray, q: QArray) -> Arrays:
        """Bytes, float32 scales and int32 zero points."""
        pair = self.pair
        at, wide = contracted_axis(pair.contracts_last), pair.grid[2] * pair.blocks[1]
        arrays = {"x": jnp.pad(_numbers(pair.left, x.codes), ((0, 0), (0, 0), (0, wide - pair.k))), "codes": q.codes}
        arrays["x_scale"] = _along(expanded_scale(x, but=2), 2, pair.lengths[0])
        arrays["scale"] = _along(expanded_scale(q, but=at), at, pair.lengths[2])
        x_zero, zero, offset = None, jnp.zeros((1, 1, 1), jnp.int32), 0
        if x.zero_point is not None:
            x_zero = expanded_zero_point(x, but=2)
        if pair.is_whole and q.scheme.format.min == 0:
            offset = 2 ** (q.scheme.format.bits - 1)  # `_decoded` subtracts it
        if q.zero_point is not None:
            zero = expanded_zero_point(q, but=at)
        if q.zero_point is not None or offset:
            arrays["x_sums"] = _along(_sums(pair, x.codes, x_zero), 2, pair.lengths[0])
            arrays["zero"] = _along(zero - offset, at, pair.lengths[2])
        if x_zero is not None:
            arrays["x_zero"] = _along(x_zero, 2, pair.lengths[0])
            arrays["ones"] = jnp.broadcast_to((jnp.arange(wide, dtype=jnp.int32) < pair.k).astype(jnp.int8), (1, 8, wide))
        return arrays

    def blocks(self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[Block]:
        read = (self.pair.array(name, array.dtype, array.shape[1]) for name, array in arrays.items())
        return [*read, self.pair.array("y", self.pair.result, 1)]

    def scales(self, inputs: Refs) -> Arrays:
        """As they broadcast to the result: those of x are columns."""
        names = [name for name in inputs if name not in ("x", "codes", "ones")]
        return {name: inputs[name][...].T if name.startswith("x_") else inputs[name][...] for name in names}

    def parts(self, inputs: Refs, scales: Arrays, scratch: Sequence[jax.Ref], step: jax.Array) -> Iterator[Part]:
        pair = self.pair
        codes, axis = _decoded(pair, inputs["codes"][...], step)
        for i in range(pair.block_tiles):
            tile = slice(i * (pair.tile or 0), min((i + 1) * (pair.tile or pair.blocks[1]), pair.blocks[1]))
            own = jax.lax.slice_in_dim(codes, tile.start, tile.stop, axis=axis)
            of_codes = None
            if "x_zero" in inputs:
                of_codes = matmul(inputs["ones"][:, tile], own, axis)[:1]
            yield Part(inputs["x"][:, tile], own, axis, ..., functools.partial(self._tile_sums, scales, of_codes, i, step))

    def _tile_sums(self, scales: Arrays, of_codes: jax.Array | None, i: int, step: jax.Array, sums: jax.Array) -> jax.Array:
        """The sums of tile `i`, scaled unless the accumulator is; `of_codes` are those of the weight's codes."""
        pair = self.pair
        if of_codes is not None:
            sums = sums - _of_tile("x_zero", scales, i) * of_codes
        if pair.tiles == 1:
            return sums
        scaled = _scaled(sums, scales, i, but_rows=_has_one_per_row(scales))
        if pair.tiles % pair.block_tiles:
            return jnp.where(step * pair.block_tiles + i < pair.tiles, scaled, 0.0)
        return scaled

    def finished(self, sums: jax.Array, scales: Arrays) -> jax.Array:
        if self.pair.tiles == 1:
            return _scaled(sums, scales, 0)
        if _has_one_per_row(scales):
            return sums * scales["x_scale"]
        return sums

    def joined(self, y: jax.Array) -> jax.Array:
        return y[..., : self.pair.n]


# --- a block ---


def _has_one_per_row(scales: Arrays) -> bool:
    """Whether x has one scale per row: then the accumulator is scaled by it, not the sums of each tile."""
    return scales["x_scale"].shape[1] == 1


def _of_tile(name: str, scales: dict[str, jax.Array], tile: int) -> jax.Array:
    """The scales of one tile: a column for x, a row else."""
    scale, axis = scales[name], int(name.startswith("x_"))
    at = min(tile, scale.shape[axis] - 1)
    return jax.lax.slice_in_dim(scale, at, at + 1, axis=axis)


def _scaled(sums: jax.Array, scales: dict[str, jax.Array], tile: int, *, but_rows: bool = False) -> jax.Array:
    """Scales the sums of one tile (`but_rows`: not by x's scales), less zero points."""
    if "zero" in scales:
        sums = sums - _of_tile("x_sums", scales, tile) * _of_tile("zero", scales, tile)
    sums = sums.astype(jnp.float32)
    if not but_rows:
        sums = sums * _of_tile("x_scale", scales, tile)
    return sums * _of_tile("scale", scales, tile)


def _decoded(pair: Pair, packed: jax.Array, step: jax.Array) -> tuple[jax.Array, int]:
    """The unpacked codes of a block of bytes, and their contracted axis."""
    k_axis = int(pair.contracts_last)
    if not pair.is_whole:
        if pair.grid[2] * pair.blocks[1] > pair.lengths[1]:
            place = jax.lax.broadcasted_iota(jnp.int32, packed.shape, k_axis) + step * pair.blocks[1]
            packed = jnp.where(place < pair.k, packed.astype(jnp.int32), 0).astype(jnp.uint8)
        return _numbers(pair.right, packed), k_axis
    is_signed = pair.right.min < 0
    if pair.codes == 1:
        return _numbers(pair.right, packed if is_signed else packed ^ jnp.uint8(0x80)), k_axis
    if pair.packs_last:
        packed, k_axis = packed.T, 1 - k_axis
    return nibbles(packed, is_signed=is_signed).astype(jnp.int8), k_axis


# --- arrays as the kernel reads them ---


def _along(scale: jax.Array, at: int, length: int) -> jax.Array:
    """Scales of an operand contracted along `at`, as zero-padded `[B, tiles, length]`."""
    if at == 2:
        scale = scale.swapaxes(1, 2)
    if scale.shape[2] == 1:
        return jnp.broadcast_to(scale, (*scale.shape[:2], length))
    return jnp.pad(scale, ((0, 0), (0, 0), (0, length - scale.shape[2])))


def _sums(pair: Pair, codes: jax.Array, zero: jax.Array | None) -> jax.Array:
    """The sums of x's codes minus zero points in each tile, `[B, M, tiles]`."""
    tile = pair.tile or pair.k
    numbers = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32)
    cut = jnp.pad(numbers, ((0, 0), (0, 0), (0, -pair.k % tile))).reshape(*numbers.shape[:2], -1, tile)
    lengths = np.minimum(tile, pair.k - tile * np.arange(pair.tiles, dtype=np.int32)).astype(np.int32)
    sums = cut.sum(3)  # [B, M, tiles]
    if zero is not None:
        sums = sums - zero * jnp.asarray(lengths)[None, None]
    return sums


def _numbers(fmt: AbstractFormat, codes: jax.Array) -> jax.Array:
    """Bytes as int8 or an 8-bit float."""
    dtype = native_float(fmt)
    if dtype is None:
        dtype = jnp.int8
    return jax.lax.bitcast_convert_type(codes, dtype)

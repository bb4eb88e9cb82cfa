"""The quantize kernel for TPUs: scales, codes and packing in one read.

**Layout.** A block has the tiled axis along sublanes: the amax of a tile is a maximum over registers, its scale a
broadcast. If tiles run along the last axis, input blocks and packed codes are transposed in VMEM. Codes that share bytes
are adjacent along the tiled axis, so codes are written to scratch and each *plane* (every second row, say) is read with a
stride. With 3, 5, 6 and 7 bits a group of codes fills several bytes (four 6-bit codes in three bytes), and each byte of the
group is also a plane, written with a stride. Scales and zero points are written with the tiled axis first; they are a
sixteenth to a hundredth of the array's bytes, and XLA transposes them.

**Scales** are computed by `scales.py`. Codes come from the format's `encode`, except codebooks, whose code is the
number of thresholds below the element. A tensor scale needs the amax of the whole array first: XLA reads the input once for
it, the kernel again.

**A short last tile** is padded with zeros, as in the reference: in VMEM if the axis is one block; else the last block
extends beyond the array, and its undefined values are replaced. Missing codes of a partial last byte are zero bits.

**Bound**: the input, read once, 4 or 2 bytes an element (twice with a tensor scale); codes and scales are written once.

Experimental, not measured on a TPU: values are compared in interpret mode, the kernel is lowered in CI and compiled where
libtpu is installed. TPU division may not round correctly, so a code may differ from the CPU's where a quotient is between
two codes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....array.packing import codes_per_unit, packed_length
from ....array.quantize import in_units
from ....array.scheme import ScaleHolder, Scheme
from ....formats.codebook import Codebook
from ....formats.format import AbstractFormat
from .scales import chosen

LANES, SUBLANES, ROWS = 128, 32, 2048


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of matrices `[B, K, N]` or `[B, N, K]` with tiles along K.

    Attributes:
        length: K.
        others: N.
        tile: the tile (block) size, a multiple of the codes that fill whole bytes.
        bits: of a code.
        is_last: whether K is the last axis.
    """

    length: int
    others: int
    tile: int
    bits: int
    is_last: bool

    @classmethod
    def of(cls, length: int, others: int, tile: int, bits: int, *, is_last: bool) -> "Blocks":
        """The blocks; a tile not shorter than the axis is the axis, rounded up to whole bytes of codes."""
        if tile >= length:
            group = codes_per_unit(bits)
            tile = -(-length // group) * group
        return cls(length, others, tile, bits, is_last)

    @property
    def group(self) -> int:
        """The number of codes that fill whole bytes."""
        return codes_per_unit(self.bits)

    @property
    def tiles(self) -> int:
        """The number of scales along K."""
        return -(-self.length // self.tile)

    @property
    def rows(self) -> int:
        """Elements along K in a block: whole tiles, and whole registers of bytes and of scales; or all of K."""
        unit = math.lcm(LANES * self.group, SUBLANES * self.tile)
        if self.length <= max(ROWS, unit):
            return self.length
        return max(ROWS // unit, 1) * unit

    @property
    def filled(self) -> int:
        """`rows` with a full last tile."""
        return -(-self.rows // self.tile) * self.tile

    @property
    def columns(self) -> int:
        """Elements along N in a block: the width that Mosaic reads with a stride, also for a smaller N."""
        return LANES

    @property
    def grid(self) -> tuple[int, int]:
        """The number of blocks along N and along K."""
        return -(-self.others // self.columns), -(-self.length // self.rows)

    @property
    def in_bytes(self) -> tuple[int, int]:
        """The bytes of K, and of a block along K."""
        return packed_length(self.length, self.bits), packed_length(self.rows, self.bits)

    @property
    def in_tiles(self) -> int:
        """The scales of a block along K."""
        return self.filled // self.tile

    def spec(self, rows: int, *, is_last: bool) -> pl.BlockSpec:
        """The block spec of an array with this many elements along K in a block."""
        if is_last:
            return pl.BlockSpec((None, self.columns, rows), lambda b, n, k: (b, n, k))
        return pl.BlockSpec((None, rows, self.columns), lambda b, n, k: (b, k, n))

    def shape(self, batch: int, along: int, *, is_last: bool) -> tuple[int, int, int]:
        """The shape of an array with this many elements along K."""
        return (batch, self.others, along) if is_last else (batch, along, self.others)

    def turned(self, x: jax.Array) -> jax.Array:
        """A block with K first from one of the array, or the reverse."""
        return x.T if self.is_last else x


def quantized_tiles(
    x: jax.Array, scheme: Scheme, tile: int, unit: jax.Array | None = None, *, is_last: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Quantizes matrices.

    Args:
        x: `[B, N, K]` with tiles along its last axis, or `[B, K, N]`.
        scheme: a scheme that `PallasTPUQuantizer.unsupported` accepts.
        tile: the tile (block) size; the last tile may be short.
        unit: the tensor scale, one float32, if the scheme has one.
        is_last: whether tiles run along the last axis.
        interpret: whether to interpret the kernel, on any device, instead of compiling it.

    Returns:
        Packed codes, uint8 of the shape of `x` with K in bytes; stored scales with K in tiles; stored zero points like
        scales, or None if the scheme has none.
    """
    batch, (length, others) = len(x), x.shape[:0:-1] if is_last else x.shape[1:]
    cut = Blocks.of(length, others, tile, scheme.format.bits, is_last=is_last)
    bytes_along, bytes_in_block = cut.in_bytes
    operands, in_specs = [x], [cut.spec(cut.rows, is_last=is_last)]
    if unit is not None:
        operands.append(unit.reshape(1, 1))
        in_specs.append(pl.BlockSpec((1, 1), lambda b, n, k: (0, 0)))
    holders = [holder for holder in (scheme.scale, scheme.zero_point) if holder is not None]
    codes_shape = jax.ShapeDtypeStruct(cut.shape(batch, bytes_along, is_last=is_last), np.uint8)
    scales_shape = (batch, cut.tiles, others)
    codes, *rest = pl.pallas_call(
        functools.partial(_kernel, cut, scheme),
        grid=(batch, *cut.grid),
        in_specs=in_specs,
        out_specs=[cut.spec(bytes_in_block, is_last=is_last), *[cut.spec(cut.in_tiles, is_last=False)] * len(holders)],
        out_shape=[codes_shape, *(jax.ShapeDtypeStruct(scales_shape, _stored_dtype(holder)) for holder in holders)],
        scratch_shapes=[pltpu.VMEM((cut.filled, cut.columns), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=64 << 20),
        interpret=interpret,
        name="fewbit_quantize",
    )(*operands)
    if is_last:
        rest = [a.swapaxes(1, 2) for a in rest]
    return codes, rest[0], rest[1] if len(rest) > 1 else None


def _stored_dtype(holder: ScaleHolder) -> np.dtype:
    if isinstance(holder, AbstractFormat):
        return np.dtype(np.uint8)
    return np.dtype(holder)  # type: ignore[arg-type]


def _kernel(cut: Blocks, scheme: Scheme, x: Any, *refs: Any) -> None:
    """Quantizes one block."""
    unit = None
    if scheme.tensor_scale:
        unit, refs = refs[0][...].reshape(1, 1, 1), refs[1:]
    codes, *scales, scratch = refs
    values, is_real = _filled(cut, cut.turned(x[...].astype(jnp.float32)))
    tiles = values.reshape(-1, cut.tile, cut.columns)  # [tiles, K, columns]
    found = chosen(tiles, None if is_real is None else _is_real(cut, tiles.shape), scheme, unit)
    scales[0][...] = found.stored.reshape(scales[0].shape)
    if found.zero is not None:
        scales[1][...] = found.zero.reshape(scales[1].shape)
    made = _codes(in_units(tiles, found.divisor, found.offset), scheme.format).reshape(scratch.shape)
    if is_real is not None:
        made = jnp.where(is_real, made, 0)
    scratch[...] = made
    codes[...] = cut.turned(_packed(cut, scratch)[: cut.in_bytes[1]]).astype(jnp.uint8)


def _filled(cut: Blocks, values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The values, padded with zeros, and which of them are elements of the array; None: all."""
    if cut.length % cut.filled == 0:
        return values, None
    if cut.filled > cut.rows:
        spare = jnp.zeros((cut.filled - cut.rows, cut.columns), jnp.float32)
        values = jnp.concatenate([values, spare], axis=0)
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) + pl.program_id(2) * cut.rows
    return jnp.where(place < cut.length, values, 0.0), place < cut.length


def _is_real(cut: Blocks, shape: tuple[int, ...]) -> jax.Array:
    """Which values of a block's tiles are elements of the array."""
    tile, within = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return tile * cut.tile + within + pl.program_id(2) * cut.rows < cut.length


def _packed(cut: Blocks, scratch: Any) -> jax.Array:
    """Packs the codes in scratch, int32; byte b of a group has the bits from `8 b` on of its codes' bit stream."""
    if cut.group == 1:
        return scratch[...]
    count = cut.filled // cut.group
    part = [scratch[pl.ds(i, count, stride=cut.group), :] for i in range(cut.group)]
    made = []
    for byte in range(cut.group * cut.bits // 8):
        first, last = 8 * byte // cut.bits, (8 * byte + 7) // cut.bits
        shifts = [(i, i * cut.bits - 8 * byte) for i in range(first, last + 1)]
        moved = [part[i] << by if by >= 0 else part[i] >> -by for i, by in shifts]
        made.append(functools.reduce(jnp.bitwise_or, moved) & 255)
    if len(made) == 1:
        return made[0]
    for byte, those in enumerate(made):
        scratch[pl.ds(byte, count, stride=len(made)), :] = those
    return scratch[: count * len(made), :]


def _codes(y: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The codes of elements divided by their scales, int32."""
    if not isinstance(fmt, Codebook):
        return fmt.encode(y).astype(jnp.int32)
    thresholds = fmt.sorted_numbers[2].tolist()
    number = jnp.where(jnp.isnan(y), 0.0, y)
    return functools.reduce(jnp.add, (jnp.where(number > threshold, 1, 0) for threshold in thresholds))

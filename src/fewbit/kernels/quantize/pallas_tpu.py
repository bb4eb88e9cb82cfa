"""Quantizing on TPUs: scales, codes and packing in one read of the input, in VMEM.

**Layout.** A block has the tiles' axis along sublanes: a tile's maximum is one of registers, and its scale a broadcast of them.
An array whose tiles lie along its last axis comes by blocks that are transposed in VMEM, and its codes are transposed back as
bytes. Codes that share bytes are neighbours along the tiles' axis, so they are written to scratch, from where each *plane*
(every second row, say) is read with a stride. Of 3, 5, 6 and 7 bits several bytes hold a group of codes (three bytes four codes
of 6 bits), and each byte of the group is a plane, too, written with a stride. Scales and zero points leave with the tiles' axis
first, whatever the array's order; they are a sixteenth to a hundredth of its bytes, and XLA turns them.

**Scales** are chosen by `pallas_scales.py`. Codes are the format's own `encode`, but for tables, whose thresholds are counted. A
tensor scale needs the largest magnitude of all before the first code: XLA reads the input once for it, and the kernel
again; a single number goes in beside the blocks.

**A short last tile** is filled with zeros, as the reference does: where the axis is one block, in VMEM; where it is several, the
last one reaches beyond the array, and what lies there, which may be anything, is replaced. Of a last byte that is not
full, the codes that are not there are zero bits.

**What bounds it**: the input, read once, 4 or 2 bytes an element (twice with a tensor scale); codes and scales are written once.

Nothing here was measured on a TPU: values are compared in interpret mode, the kernel is lowered in CI, and compiled by libtpu where
it is installed. A TPU's division is not said to round correctly, so that its codes may differ from a CPU's where a quotient lies
at the border between two.
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

from ...array import Scheme
from ...array.packing import codes_per_unit, packed_length
from ...array.quantize import in_units
from ...formats import AbstractFormat, Codebook
from .pallas_scales import chosen

LANES, SUBLANES, ROWS = 128, 32, 2048


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How matrices `[B, K, N]`, or `[B, N, K]`, with tiles along K are cut.

    Attributes:
        length: K.
        others: N.
        tile: how many elements share a scale; whole bytes of codes.
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
        """The blocks of tiles; a tile that is not shorter than the axis has its length, in whole bytes of codes."""
        group = codes_per_unit(bits)
        return cls(length, others, tile if tile < length else -(-length // group) * group, bits, is_last)

    @property
    def group(self) -> int:
        """How many codes fill whole bytes."""
        return codes_per_unit(self.bits)

    @property
    def tiles(self) -> int:
        """How many scales lie along K."""
        return -(-self.length // self.tile)

    @property
    def rows(self) -> int:
        """Elements along K in a block: whole tiles, whole registers of bytes and of scales; or all."""
        unit = math.lcm(LANES * self.group, SUBLANES * self.tile)
        return self.length if self.length <= max(ROWS, unit) else max(ROWS // unit, 1) * unit

    @property
    def filled(self) -> int:
        """The same with the last tile full."""
        return self.tiles * self.tile if self.rows == self.length else self.rows

    @property
    def columns(self) -> int:
        """Elements along N in a block: as wide as what Mosaic reads with a stride, so that a small N lies in part of a block."""
        return LANES

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks lie along N and along K."""
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
        """The blocks of an array with so many elements of a block along K."""
        columns = self.columns
        if is_last:
            return pl.BlockSpec((None, columns, rows), lambda b, n, k: (b, n, k))
        return pl.BlockSpec((None, rows, columns), lambda b, n, k: (b, k, n))


def quantized_tiles(
    x: jax.Array, scheme: Scheme, tile: int, unit: jax.Array | None = None, *, is_last: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Packed codes, stored scales and stored zero points of matrices.

    Args:
        x: `[B, N, K]` with tiles along its last axis, or `[B, K, N]`.
        scheme: how it is quantized; `PallasTPUQuantizer.unsupported` says which can be.
        tile: how many elements share a scale; the last tile may be short.
        unit: the tensor scale, one float32, where the scheme has one.
        is_last: whether tiles lie along the last axis.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        Codes, uint8 of the shape of `x` with K in bytes, and scales likewise with K in tiles; zero points like scales, or
        None where the scheme has none.
    """
    batch, (length, others) = len(x), x.shape[:0:-1] if is_last else x.shape[1:]
    cut = Blocks.of(length, others, tile, scheme.format.bits, is_last=is_last)
    (bytes_along, bytes_in_block), beside = cut.in_bytes, cut.spec(cut.in_tiles, is_last=False)
    held = [scheme.scale] if scheme.zero_point is None else [scheme.scale, scheme.zero_point]
    out_shape = [
        jax.ShapeDtypeStruct((batch, others, bytes_along) if is_last else (batch, bytes_along, others), np.uint8),
        *(jax.ShapeDtypeStruct((batch, cut.tiles, others), _stored_dtype(holder)) for holder in held),
    ]
    units = [] if unit is None else [unit.reshape(1, 1)]
    codes, *rest = pl.pallas_call(
        functools.partial(_kernel, cut, scheme),
        grid=(batch, *cut.grid),
        in_specs=[cut.spec(cut.rows, is_last=is_last), *(pl.BlockSpec((1, 1), lambda b, n, k: (0, 0)) for _ in units)],
        out_specs=[cut.spec(bytes_in_block, is_last=is_last), *(beside for _ in held)],
        out_shape=out_shape,
        scratch_shapes=[pltpu.VMEM((cut.filled, cut.columns), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=64 << 20),
        interpret=interpret,
        name="fewbit_quantize",
    )(x, *units)
    scale, *zeros = (a.swapaxes(1, 2) if is_last else a for a in rest)
    return codes, scale, zeros[0] if zeros else None


def _stored_dtype(holder: Any) -> np.dtype:
    return np.dtype(np.uint8) if isinstance(holder, AbstractFormat) else np.dtype(holder)


def _kernel(cut: Blocks, scheme: Scheme, x: Any, *refs: Any) -> None:
    """Quantizes one block."""
    unit = refs[0][...].reshape(1, 1, 1) if scheme.tensor_scale else None
    codes, *beside, scratch = refs[1:] if scheme.tensor_scale else refs
    values = x[...].astype(jnp.float32)
    values, is_real = _filled(cut, values.T if cut.is_last else values)
    tiles = values.reshape(-1, cut.tile, cut.columns)
    found = chosen(tiles, None if is_real is None else _is_real(cut, tiles.shape), scheme, unit)
    beside[0][...] = found.stored.reshape(beside[0].shape)
    if found.zero is not None:
        beside[1][...] = found.zero.reshape(beside[1].shape)
    made = _codes(in_units(tiles, found.divisor, found.offset), scheme.format).reshape(scratch.shape)
    scratch[...] = made if is_real is None else jnp.where(is_real, made, 0)
    packed = _packed(cut, scratch)[: cut.in_bytes[1]]
    codes[...] = (packed.T if cut.is_last else packed).astype(jnp.uint8)


def _filled(cut: Blocks, values: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The values with zeros beyond the array's end, and which of them are real; None: all."""
    if cut.length % cut.filled == 0:
        return values, None
    if cut.filled > cut.rows:
        spare = jnp.zeros((cut.filled - cut.rows, cut.columns), jnp.float32)
        values = jnp.concatenate([values, spare], axis=0)
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, 0) + pl.program_id(2) * cut.rows
    return jnp.where(place < cut.length, values, 0.0), place < cut.length


def _is_real(cut: Blocks, shape: tuple[int, ...]) -> jax.Array:
    """Which elements of a block's tiles are real."""
    tile, within = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return tile * cut.tile + within + pl.program_id(2) * cut.rows < cut.length


def _packed(cut: Blocks, scratch: Any) -> jax.Array:
    """The bytes of the codes in scratch, int32; byte b of a group holds the bits from `8 b` on of its codes' stream."""
    count = cut.filled // cut.group
    part = [scratch[pl.ds(i, count, stride=cut.group), :] if cut.group > 1 else scratch[...] for i in range(cut.group)]
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
    """The code of each element in units of its scale, int32."""
    if not isinstance(fmt, Codebook):
        return fmt.encode(y).astype(jnp.int32)
    thresholds = fmt.sorted_numbers[2].tolist()
    number = jnp.where(jnp.isnan(y), 0.0, y)
    return functools.reduce(jnp.add, (jnp.where(number > threshold, 1, 0) for threshold in thresholds))

"""Quantizing on TPUs: scales, codes and packing in one read of the input, in VMEM.

**Layout.** A block has the tiles' axis along sublanes: a tile's maximum is one of registers, and its scale a broadcast of them.
An array whose tiles lie along its last axis comes by blocks that are transposed in VMEM, and its codes are transposed back as
bytes. Codes that share a byte are neighbours along the tiles' axis, so they are written to scratch, from where each *plane*
(every second row, say) is read with a stride. Scales leave with the tiles' axis first, whatever the array's order; they are a
sixteenth to a hundredth of its bytes, and XLA turns them.

**Scales.** The largest magnitude, with infinity for a tile that is not finite. Powers of two from its bits, by the rules of
`array.scales.mx`; the search tries the candidates that `array.scales.candidates` proves sufficient, unrolled, in units of a
power of two near the largest magnitude. Codes are the format's own `encode`, but for tables, whose thresholds are counted.

**What bounds it**: the input, read once, 4 or 2 bytes an element; codes and scales are written once.

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
from ...array.scales import MX, AbsMax, ScaleStore
from ...array.scales.candidates import needed_doublings, needed_halvings
from ...array.scales.mx import bits_added
from ...formats import AbstractFormat, Codebook
from ...formats.format import power_of_two, quotient

LANES, SUBLANES, ROWS = 128, 32, 2048
TINY = np.float32(np.finfo(np.float32).tiny)
TIE = np.float32(1 - 2.0**-16)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How matrices `[B, K, N]`, or `[B, N, K]`, with tiles along K are cut.

    Attributes:
        length: K.
        others: N.
        tile: how many elements share a scale; it divides K.
        planes: how many codes share a byte.
        is_last: whether K is the last axis.
    """

    length: int
    others: int
    tile: int
    planes: int
    is_last: bool

    @property
    def rows(self) -> int:
        """Elements along K in a block: whole tiles, whole registers of bytes and of scales; or all."""
        unit = math.lcm(LANES * self.planes, SUBLANES * self.tile)
        return self.length if self.length <= max(ROWS, unit) else max(ROWS // unit, 1) * unit

    @property
    def columns(self) -> int:
        """Elements along N in a block."""
        return min(self.others, LANES)

    @property
    def grid(self) -> tuple[int, int]:
        """How many blocks lie along N and along K."""
        return -(-self.others // self.columns), -(-self.length // self.rows)

    def spec(self, divisor: int, *, is_last: bool) -> pl.BlockSpec:
        """The blocks of an array with one element for `divisor` ones along K."""
        rows, columns = self.rows // divisor, self.columns
        if is_last:
            return pl.BlockSpec((None, columns, rows), lambda b, n, k: (b, n, k))
        return pl.BlockSpec((None, rows, columns), lambda b, n, k: (b, k, n))


def quantized_tiles(
    x: jax.Array, scheme: Scheme, tile: int, *, is_last: bool, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Packed codes and stored scales of matrices.

    Args:
        x: `[B, N, K]` with tiles along its last axis, or `[B, K, N]`.
        scheme: how it is quantized; `tpu.refusal` says which can be.
        tile: how many elements share a scale; it divides K.
        is_last: whether tiles lie along the last axis.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        Codes, uint8 of the shape of `x` with K in bytes, and scales likewise with K in tiles.
    """
    batch, (length, others) = len(x), x.shape[:0:-1] if is_last else x.shape[1:]
    planes = 8 // scheme.format.bits
    cut = Blocks(length, others, tile, planes, is_last)
    bytes_along = length // planes
    holder = np.dtype(np.uint8) if isinstance(scheme.scale, AbstractFormat) else np.dtype(scheme.scale)  # type: ignore[arg-type]
    codes, scale = pl.pallas_call(
        functools.partial(_kernel, cut, scheme),
        grid=(batch, *cut.grid),
        in_specs=[cut.spec(1, is_last=is_last)],
        out_specs=[cut.spec(planes, is_last=is_last), cut.spec(tile, is_last=False)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, others, bytes_along) if is_last else (batch, bytes_along, others), np.uint8),
            jax.ShapeDtypeStruct((batch, length // tile, others), holder),
        ],
        scratch_shapes=[pltpu.VMEM((cut.rows, cut.columns), jnp.int32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=64 << 20),
        interpret=interpret,
        name="fewbit_quantize",
    )(x)
    return codes, scale.swapaxes(1, 2) if is_last else scale


def _kernel(cut: Blocks, scheme: Scheme, x: Any, codes: Any, scale: Any, scratch: Any) -> None:
    """Quantizes one block."""
    values = x[...].astype(jnp.float32)
    values = values.T if cut.is_last else values
    tiles = values.reshape(-1, cut.tile, cut.columns)
    stored, divisor = _chosen(tiles, scheme)
    scale[...] = stored.reshape(scale.shape)
    scratch[...] = _codes(quotient(tiles, divisor), scheme.format).reshape(scratch.shape)
    packed = scratch[pl.ds(0, cut.rows // cut.planes, stride=cut.planes), :] if cut.planes > 1 else scratch[...]
    for plane in range(1, cut.planes):
        own = scratch[pl.ds(plane, cut.rows // cut.planes, stride=cut.planes), :]
        packed = packed | (own << (scheme.format.bits * plane))
    codes[...] = (packed.T if cut.is_last else packed).astype(jnp.uint8)


def _chosen(tiles: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
    """Each tile's scale as it is stored, and what its elements are divided by, `[T, 1, N]`; NaN for a tile that is not finite."""
    bits = jax.lax.bitcast_convert_type(tiles, jnp.int32) & 0x7FFFFFFF
    magnitude = jax.lax.bitcast_convert_type(jnp.where(bits < 0x00800000, 0, bits), jnp.float32)
    magnitude = jnp.where(bits < 0x7F800000, magnitude, jnp.float32(jnp.inf))
    amax = jnp.max(magnitude, axis=1, keepdims=True)
    is_finite = amax < jnp.float32(jnp.inf)
    if isinstance(scheme.calibration, MX):
        exponent = _exponents(tiles, jnp.where(is_finite, amax, 0.0), scheme)
        return jnp.where(is_finite, exponent + 127, 255).astype(jnp.uint8), _or_nan(power_of_two(exponent), is_finite)
    assert isinstance(scheme.calibration, AbsMax)
    ideal = quotient(jnp.where(is_finite, amax, 0.0) * scheme.calibration.factor, jnp.float32(scheme.format.bound))
    ideal = jnp.where(ideal < TINY, jnp.ones_like(ideal), ideal)
    store = ScaleStore(scheme.scale)  # type: ignore[arg-type]
    stored = store.stored(_or_nan(ideal, is_finite))
    used = store.loaded(stored)
    return stored, _or_nan(jnp.where(used == 0, jnp.ones_like(used), used), is_finite)


def _or_nan(scale: jax.Array, is_finite: jax.Array) -> jax.Array:
    return jnp.where(is_finite, scale, jnp.float32(jnp.nan))


def _exponents(tiles: jax.Array, amax: jax.Array, scheme: Scheme) -> jax.Array:
    """The exponent of each tile's power of two, 0 for an all-zero tile."""
    fmt, calibration = scheme.format, scheme.calibration
    assert isinstance(calibration, MX)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    top = 127 + int(np.frexp(fmt.max)[1]) - 1
    first = ((bits + bits_added(calibration.rule, fmt)) >> 23) - top
    best = jnp.clip(first, -126, 127)
    if calibration.rule == "optimal":
        unit = jnp.clip((bits >> 23) - 127, -126, 126)
        x = jnp.where(amax > 0, tiles, 0.0) * power_of_two(-unit)
        least = _error(x, best - unit, fmt)
        halvings = needed_halvings(fmt, tiles.shape[1])
        for step in (*range(1, needed_doublings(fmt) + 1), *range(-halvings, 0)):
            tried = jnp.clip(first + step, -126, 127)
            found = _error(x, tried - unit, fmt)
            is_lower = found < least * TIE
            best, least = jnp.where(is_lower, tried, best), jnp.where(is_lower, found, least)
    return jnp.where(amax > 0, best, 0)


def _error(x: jax.Array, exponent: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The squared error of each tile under a power of two."""
    off = fmt.nearest(x * power_of_two(-exponent)) * power_of_two(exponent) - x
    return jnp.sum(off * off, axis=1, keepdims=True)


def _codes(y: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The code of each element in units of its scale, int32."""
    if not isinstance(fmt, Codebook):
        return fmt.encode(y).astype(jnp.int32)
    thresholds = fmt.sorted_numbers[2].tolist()
    number = jnp.where(jnp.isnan(y), 0.0, y)
    return functools.reduce(jnp.add, (jnp.where(number > threshold, 1, 0) for threshold in thresholds))

"""The Triton quantize kernel: amax, scale search, codes and packing in one read.

**Tiling.** The input is `[rows, n]`, contiguous, in tiles (blocks) of K along the rows. A program keeps R tiles as a matrix
`[count, padded]` in registers (padded: K rounded up to a power of two), 2048 elements for 4 warps: 16 elements a thread, two
128-bit loads in bfloat16. If K divides the row and is a power of two, addresses are those of a flat array and loads and stores
are vectorized; else every element is masked, which is slower. A tile of 16 is read as two halves by one thread: no exchange
between threads, and per-tile values are computed once. A tile longer than 16384 is refused.

**Scales** are computed from the bits of amax, an integer maximum, so a NaN or an infinity wins and makes its tile NaN. For
powers of two the rule (floor, rceil, even) is the addition of a constant below the exponent. Searches are in `search.py`.

**Codes** always come from one correctly rounded (IEEE 754) division, so they are the reference's bit for bit;
`triton/formats.py` describes the rounding. They are stored packed: 4-bit codes as pairs (`tl.split`), 6-bit codes four in three
bytes.

**Bound**: memory, 2.53 bytes an element for bfloat16 to 4.25 bits. A test fails when the instructions an element grow by 10 %.

**Inline PTX**, off by default: pairs of E2M1 codes by `cvt.rn.satfinite.e2m1x2` on sm_100, E4M3 scales by
`cvt.rn.satfinite.e4m3x2` from sm_89 on. Both round like the portable path; no interpreter runs them, so CI only compiles them.

Instruction counts, and what was tried or left out: docs/design/kernels-accelerators.md.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

import dataclasses
import typing

import triton
import triton.language as tl

from ...triton.formats import (
    as_bits,
    as_float,
    encode,
    flushed,
    minifloat_code,
    minifloat_value,
    nearest_magnitude,
    power_of_two,
)
from .memory import e4m3_code_by_ptx, loaded_tiles, store_codes, store_pairs_by_ptx
from .problem import TileProblem
from .search import exponent_chosen, fraction_chosen, place_chosen

_TINY = tl.constexpr(2.0**-126)


@triton.jit
@typing.no_type_check
def float_chosen(
    x,
    amax,
    unit,
    inverse,
    fractions_ptr,
    scale_ptr,
    SCALES: tl.constexpr,
    RULE: tl.constexpr,
    CODES: tl.constexpr,
):
    """Each tile's scale before rounding to the scale format; `inverse` converts it to the units of `x`.

    Where scales are given, `amax` is that scale.
    """
    if RULE.kind == "search" and SCALES.kind == "float":
        scale = fraction_chosen(x, amax, inverse, fractions_ptr, scale_ptr, SCALES, RULE, CODES)
    elif RULE.kind == "search":
        needed = flushed(tl.div_rn(amax, tl.full(amax.shape, RULE.bound, tl.float32)))
        needed = flushed(tl.div_rn(needed, tl.zeros_like(needed) + unit)) if SCALES.has_tensor_scale else needed
        code = place_chosen(x, needed, unit * inverse, SCALES, RULE, CODES)
        scale = tl.where(amax > 0, minifloat_value(code, SCALES) * unit, 0.0)
    elif RULE.kind == "given":
        scale = amax
    else:
        scale = tl.div_rn(amax * RULE.factor, tl.full(amax.shape, RULE.bound, tl.float32))
    scale = tl.where(scale < _TINY, 1.0, scale)
    scale = flushed(tl.div_rn(scale, tl.zeros_like(scale) + unit)) if SCALES.has_tensor_scale else scale
    return tl.where(scale == 0, 0.0, tl.minimum(tl.maximum(scale, SCALES.low), SCALES.high))


@triton.jit
@typing.no_type_check
def stored_float(scale, is_finite, scale_ptr, tile, is_tile, SCALES: tl.constexpr, PTX_E4M3: tl.constexpr):
    """Stores each tile's scale and returns the stored number."""
    if SCALES.kind == "minifloat":
        if PTX_E4M3:
            code = e4m3_code_by_ptx(scale)
        else:
            code = minifloat_code(nearest_magnitude(scale, SCALES), SCALES)
        used = minifloat_value(code, SCALES)
        tl.store(scale_ptr + tile, tl.where(is_finite, code, SCALES.nan).to(tl.uint8), mask=is_tile)
    else:
        kept = tl.where(is_finite, scale, float("nan")).to(scale_ptr.dtype.element_ty)
        used = kept.to(tl.float32)
        tl.store(scale_ptr + tile, kept, mask=is_tile)
    return used


@triton.jit
@typing.no_type_check
def quantize_kernel(
    x_ptr,
    unit_ptr,
    fractions_ptr,
    tiles,
    length,
    tiles_in_row,
    row_bytes,
    codes_ptr,
    scale_ptr,
    TILES: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    RULE: tl.constexpr,
    PTX_E2M1: tl.constexpr,
    PTX_E4M3: tl.constexpr,
):
    """Quantizes the tiles of a program. Outputs follow inputs in the signature, as jax-triton requires."""
    tile = tl.program_id(0).to(tl.int64) * TILES.count + tl.arange(0, TILES.count)
    loaded, row, column, is_tile, is_element = loaded_tiles(x_ptr, tile, tiles, length, tiles_in_row, TILES)
    bits = as_bits(loaded)
    sign = bits & -0x80000000
    magnitude_bits = bits & 0x7FFFFFFF
    magnitude_bits = tl.where(magnitude_bits < 0x00800000, 0, magnitude_bits)
    amax_bits = tl.max(magnitude_bits, axis=1)
    is_finite = amax_bits < 0x7F800000
    magnitude, amax = as_float(magnitude_bits), as_float(amax_bits)

    # Searches use the tile in units of a power of two 16 to 32 times its amax.
    unit_exponent = tl.minimum(tl.maximum((amax_bits >> 23) - 122, -126), 127)
    inverse = power_of_two(-unit_exponent)
    in_units = magnitude * inverse[:, None]
    if CODES.kind != "minifloat":
        in_units = as_float(as_bits(in_units) | sign)

    if RULE.kind == "given":
        amax = tl.load(fractions_ptr + tile, mask=is_tile, other=1.0)
    if SCALES.kind == "power":
        if RULE.kind == "given":
            exponent = tl.minimum((as_bits(amax) >> 23) - 127, RULE.largest_power)
        else:
            exponent = exponent_chosen(in_units, amax_bits, unit_exponent, RULE, CODES)
        y = magnitude * power_of_two(-exponent)[:, None]
        stored = tl.where(is_finite, exponent + 127, 255)
        tl.store(scale_ptr + tile, stored.to(tl.uint8), mask=is_tile)
    else:
        unit = tl.load(unit_ptr) if SCALES.has_tensor_scale else 1.0
        scale = float_chosen(in_units, amax, unit, inverse, fractions_ptr, scale_ptr, SCALES, RULE, CODES)
        used = stored_float(scale, is_finite, scale_ptr, tile, is_tile, SCALES, PTX_E4M3)
        used = flushed(used * unit) if SCALES.has_tensor_scale else used
        divisor = tl.where(used == 0, 1.0, used)
        y = tl.div_rn(magnitude, tl.broadcast_to(divisor[:, None], (TILES.count, TILES.padded)))

    if PTX_E2M1:
        store_pairs_by_ptx(codes_ptr, y, sign, is_finite, tile, is_tile, TILES)
    else:
        code = encode(y, sign, CODES)
        code = tl.where(is_finite[:, None], code, CODES.nan)
        code = code if TILES.is_even else tl.where(is_element, code, 0)
        store_codes(codes_ptr, code, row, column, is_tile, length, row_bytes, CODES.bits, TILES)


@triton.jit
@typing.no_type_check
def amax_kernel(x_ptr, amax_ptr, size, BLOCK: tl.constexpr):
    """Updates the int32 at `amax_ptr` with the bits of the largest finite magnitude."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = as_bits(tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=0))


def quantize_rows(
    problem: TileProblem,
    x: typing.Any,
    codes: typing.Any,
    scale: typing.Any,
    unit: typing.Any,
    fractions: typing.Any,
    *,
    given: typing.Any = None,
    capability: int = 0,
) -> None:
    """Quantizes rows into the given tensors.

    Args:
        problem: a problem whose `unsupported()` is None.
        x: floating `[rows, length]`, contiguous.
        codes: uint8 `[rows, bytes]`, written.
        scale: `[rows, tiles]`, uint8 or floating as the scheme stores its scales, written.
        unit: float32 of one element, the tensor scale; or None.
        fractions: float32, `problem.fractions` on the device; or None.
        given: float32 `[rows, tiles]`, the scale of each tile in place of the calibration's; or None.
        capability: 10 times the device's compute capability, to convert by inline PTX; 0 for the portable path.
    """
    tiles = problem.rows * problem.tiles_in_row
    constants = problem.encoding(capability)
    if given is not None:
        constants, fractions = constants | {"RULE": dataclasses.replace(constants["RULE"], kind="given")}, given
    unit, fractions = (scale if read is None else read for read in (unit, fractions))  # any tensor, if it is not read
    quantize_kernel[(problem.programs,)](
        x, unit, fractions, tiles, problem.length, problem.tiles_in_row, codes.shape[-1], codes, scale,
        **constants, num_warps=problem.warps, enable_fp_fusion=True,
    )  # fmt: skip


def raise_to_amax(x: typing.Any, amax: typing.Any) -> None:
    """Updates `amax`, the bits of a float32 as int32 `[]`, with the largest finite magnitude of a contiguous tensor."""
    block = 8192
    amax_kernel[(triton.cdiv(x.numel(), block),)](x, amax, x.numel(), BLOCK=block, num_warps=8, enable_fp_fusion=True)

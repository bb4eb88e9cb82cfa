"""The Triton quantize kernel: amax, scale search, codes and packing in one read.

**Layout.** The input is `[rows, n]`, contiguous, in tiles (blocks) of K along the rows. A program keeps R tiles as a matrix
`[R, KP]` in registers (KP: K rounded up to a power of two), R KP = 2048 for 4 warps: 16 elements a thread, two 128-bit loads
in bfloat16.
If K divides the row and is a power of two, addresses are those of a flat array and loads and stores are vectorized; else
every element is masked, which is slower. Codes are stored packed: 4-bit codes as pairs (`tl.split`), 6-bit codes four in
three bytes. A tile longer than 16384 is refused.

A tile of 16 is read as two halves by one thread: no exchange between threads, and per-tile values are computed once (naive
NVFP4 from 51 to 46 instructions an element). `triton_numbers.py` describes the rounding.

**Scales** are computed from the bits of amax, an integer maximum, so a NaN or an infinity wins and makes its tile NaN. For
powers of two the rule (floor, rceil, even) is the addition of a constant below the exponent. Searches are in
`triton_search.py`; codes always come from one correctly rounded (IEEE 754) division, so they are the reference's bit for
bit.

**Bound**: memory, 2.53 bytes an element for bfloat16 to 4.25 bits. Instructions an element are in
`bench/results/triton.json`; a test fails when they grow by 10 %.

**Inline PTX**, off by default: pairs of E2M1 codes by `cvt.rn.satfinite.e2m1x2` on sm_100, E4M3 scales by
`cvt.rn.satfinite.e4m3x2` from sm_89 on. Both round like the portable path; no interpreter runs them, so CI only compiles
them. Powers of two gain nothing: the portable path extracts their codes from the bits.

The correctly rounded division takes about 12 instructions an element, most of the difference between naive NVFP4 and naive
MXFP4. A reciprocal a tile and two FMA corrections would take five; Triton's interpreter does not fuse, so no test without a
GPU could check them.

**Not done.** Sorting and prefix sums (less arithmetic a candidate, but gathers cost more than rounding); pruning by the
clip sum inside the NVFP4 window (threads diverge).
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

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
from .problem import FLOAT, GIVEN, MINIFLOAT, POWER, SEARCH, SMALL_FLOAT, TileProblem
from .search import exponent_chosen, fraction_chosen, place_chosen

_MINIFLOAT, _SEARCH, _GIVEN = tl.constexpr(MINIFLOAT), tl.constexpr(SEARCH), tl.constexpr(GIVEN)
_POWER, _SMALL_FLOAT, _FLOAT = tl.constexpr(POWER), tl.constexpr(SMALL_FLOAT), tl.constexpr(FLOAT)
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
    SCALE: tl.constexpr,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    BOUND: tl.constexpr,
    FACTOR: tl.constexpr,
    RULE: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    LOW_PLACES: tl.constexpr,
    LOW_LAST: tl.constexpr,
    PROVEN: tl.constexpr,
    FRACTIONS: tl.constexpr,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Each tile's scale before rounding to the scale format; `inverse` converts it to the units of `x`.

    Under the rule GIVEN `amax` is that scale.
    """
    if RULE == _SEARCH and SCALE == _FLOAT:
        scale = fraction_chosen(
            x, amax, inverse, fractions_ptr, scale_ptr, FRACTIONS, BOUND, SCALE_LOW, SCALE_HIGH,
            KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
        )  # fmt: skip
    elif RULE == _SEARCH:
        needed = flushed(tl.div_rn(amax, tl.full(amax.shape, BOUND, tl.float32)))
        needed = flushed(tl.div_rn(needed, tl.zeros_like(needed) + unit)) if HAS_UNIT else needed
        code = place_chosen(
            x, needed, unit * inverse, SCALE_MAN, SCALE_BIAS, SCALE_HIGH,
            BELOW, ABOVE, LOW_PLACES, LOW_LAST, PROVEN, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
        )  # fmt: skip
        scale = tl.where(amax > 0, minifloat_value(code, SCALE_MAN, SCALE_BIAS) * unit, 0.0)
    elif RULE == _GIVEN:
        scale = amax
    else:
        scale = tl.div_rn(amax * FACTOR, tl.full(amax.shape, BOUND, tl.float32))
    scale = tl.where(scale < _TINY, 1.0, scale)
    scale = flushed(tl.div_rn(scale, tl.zeros_like(scale) + unit)) if HAS_UNIT else scale
    return tl.where(scale == 0, 0.0, tl.minimum(tl.maximum(scale, SCALE_LOW), SCALE_HIGH))


@triton.jit
@typing.no_type_check
def stored_float(
    held,
    is_finite,
    scale_ptr,
    tile,
    is_tile,
    SCALE: tl.constexpr,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    SCALE_NAN: tl.constexpr,
    PTX_E4M3: tl.constexpr,
):
    """Stores each tile's scale and returns the stored number."""
    if SCALE == _SMALL_FLOAT:
        if PTX_E4M3:
            code = e4m3_code_by_ptx(held)
        else:
            code = minifloat_code(nearest_magnitude(held, SCALE_MAN, SCALE_BIAS, SCALE_HIGH), SCALE_MAN, SCALE_BIAS)
        used = minifloat_value(code, SCALE_MAN, SCALE_BIAS)
        tl.store(scale_ptr + tile, tl.where(is_finite, code, SCALE_NAN).to(tl.uint8), mask=is_tile)
    else:
        kept = tl.where(is_finite, held, float("nan")).to(scale_ptr.dtype.element_ty)
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
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    SCALE_NAN: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    NAN: tl.constexpr,
    BOUND: tl.constexpr,
    FACTOR: tl.constexpr,
    TOP_EXPONENT: tl.constexpr,
    LARGEST_POWER: tl.constexpr,
    ROUND_UP: tl.constexpr,
    RULE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    HALVINGS: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    LOW_PLACES: tl.constexpr,
    LOW_LAST: tl.constexpr,
    PROVEN: tl.constexpr,
    FRACTIONS: tl.constexpr,
    PTX_E2M1: tl.constexpr,
    PTX_E4M3: tl.constexpr,
):
    """Quantizes R tiles. Outputs follow inputs in the signature, as jax-triton requires."""
    tile = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    loaded, row, column, is_tile, is_element = loaded_tiles(x_ptr, tile, tiles, length, tiles_in_row, K, KP, R, EVEN)
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
    if KIND != _MINIFLOAT:
        in_units = as_float(as_bits(in_units) | sign)

    if RULE == _GIVEN:
        amax = tl.load(fractions_ptr + tile, mask=is_tile, other=1.0)
    if SCALE == _POWER:
        if RULE == _GIVEN:
            exponent = tl.minimum((as_bits(amax) >> 23) - 127, LARGEST_POWER)
        else:
            exponent = exponent_chosen(
                in_units, amax_bits, unit_exponent, RULE, TOP_EXPONENT, LARGEST_POWER, ROUND_UP, DOUBLINGS, HALVINGS,
                KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
            )  # fmt: skip
        y = magnitude * power_of_two(-exponent)[:, None]
        stored = tl.where(is_finite, exponent + 127, 255)
        tl.store(scale_ptr + tile, stored.to(tl.uint8), mask=is_tile)
    else:
        unit = tl.load(unit_ptr) if HAS_UNIT else 1.0
        held = float_chosen(
            in_units, amax, unit, inverse, fractions_ptr, scale_ptr, SCALE, SCALE_MAN, SCALE_BIAS, SCALE_LOW, SCALE_HIGH,
            HAS_UNIT, BOUND, FACTOR, RULE, BELOW, ABOVE, LOW_PLACES, LOW_LAST, PROVEN, FRACTIONS,
            KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
        )  # fmt: skip
        used = stored_float(
            held, is_finite, scale_ptr, tile, is_tile, SCALE, SCALE_MAN, SCALE_BIAS, SCALE_HIGH, SCALE_NAN, PTX_E4M3
        )
        used = flushed(used * unit) if HAS_UNIT else used
        divisor = tl.where(used == 0, 1.0, used)
        y = tl.div_rn(magnitude, tl.broadcast_to(divisor[:, None], (R, KP)))

    if PTX_E2M1:
        store_pairs_by_ptx(codes_ptr, y, sign, is_finite, tile, is_tile, R, KP)
    else:
        code = encode(y, sign, KIND, BITS, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS)
        code = tl.where(is_finite[:, None], code, NAN)
        code = code if EVEN else tl.where(is_element, code, 0)
        store_codes(codes_ptr, code, row, column, is_tile, length, row_bytes, BITS, R, K, KP, EVEN)


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
        constants, fractions = constants | {"RULE": GIVEN}, given
    unit, fractions = (scale if read is None else read for read in (unit, fractions))  # any tensor, if it is not read
    quantize_kernel[(problem.programs,)](
        x, unit, fractions, tiles, problem.length, problem.tiles_in_row, codes.shape[-1], codes, scale,
        **constants, num_warps=problem.warps, enable_fp_fusion=True,
    )  # fmt: skip


def raise_to_amax(x: typing.Any, amax: typing.Any) -> None:
    """Updates `amax`, the bits of a float32 as int32 `[]`, with the largest finite magnitude of a contiguous tensor."""
    block = 8192
    amax_kernel[(triton.cdiv(x.numel(), block),)](x, amax, x.numel(), BLOCK=block, num_warps=8, enable_fp_fusion=True)

"""The Triton dequantize kernel, in the layout of `triton.py`.

A minifloat code is shifted into the exponent and mantissa of a float32, which gives its number times `2**(bias - 127)`,
subnormals included; codes beyond the largest number are NaN (or infinity, if the format has it). Numbers are multiplied by
their scale in float32 and rounded once. Bound: memory, 0.53 bytes read and 2 written an element for 4.25 bits to bfloat16.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

import typing

import triton
import triton.language as tl

from ...triton.formats import as_bits, as_float, codebook_value, minifloat_value, power_of_two
from .problem import INTEGER, MINIFLOAT, POWER, SMALL_FLOAT, TileProblem

_MINIFLOAT, _INTEGER = tl.constexpr(MINIFLOAT), tl.constexpr(INTEGER)
_POWER, _SMALL_FLOAT = tl.constexpr(POWER), tl.constexpr(SMALL_FLOAT)
_TINY = tl.constexpr(2.0**-126)


@triton.jit
@typing.no_type_check
def loaded_codes(
    codes_ptr,
    row,
    column,
    is_tile,
    length,
    row_bytes,
    BITS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The codes of tiles `[R, KP]`, int32: the inverse of `store_codes`."""
    if BITS == 8:
        k = tl.arange(0, KP)[None, :]
        is_code = is_tile[:, None] if EVEN else is_tile[:, None] & (k < K) & (column[:, None] + k < length)
        code = tl.load(codes_ptr + (row * row_bytes + column)[:, None] + k, mask=is_code, other=0).to(tl.int32)
    elif BITS == 4:
        k = tl.arange(0, KP // 2)[None, :]
        is_pair = is_tile[:, None] if EVEN else is_tile[:, None] & (2 * k < K) & (column[:, None] + 2 * k < length)
        pair = tl.load(codes_ptr + (row * row_bytes + column // 2)[:, None] + k, mask=is_pair, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (R, KP))
    else:
        start = (column * 3 // 4)[:, None] + 3 * tl.arange(0, KP // 4)[None, :]
        is_group = is_tile[:, None] & (4 * tl.arange(0, KP // 4) < K)[None, :]
        word = tl.zeros((R, KP // 4), tl.int32)
        for byte in tl.static_range(3):
            is_byte = is_group if EVEN else is_group & (start + byte < row_bytes)
            part = tl.load(codes_ptr + (row * row_bytes)[:, None] + start + byte, mask=is_byte, other=0)
            word = word | (part.to(tl.int32) << 8 * byte)
        even = tl.join(word & 63, (word >> 12) & 63)
        odd = tl.join((word >> 6) & 63, word >> 18)
        code = tl.reshape(tl.join(even, odd), (R, KP))
    return code


@triton.jit
@typing.no_type_check
def decoded(
    code,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    TABLE: tl.constexpr,
    HAS_INF: tl.constexpr,
):
    """The number of each code."""
    if KIND == _MINIFLOAT:
        value = minifloat_value(code & ((1 << (BITS - 1)) - 1), MAN, BIAS)
        if HAS_INF:
            value = tl.where(value > HIGH, tl.where((code & ((1 << MAN) - 1)) != 0, float("nan"), float("inf")), value)
        else:
            value = tl.where(value > HIGH, float("nan"), value)
        value = as_float(as_bits(value) | ((code << (32 - BITS)) & -0x80000000))
    elif KIND == _INTEGER:
        value = ((code << (32 - BITS)) >> (32 - BITS)).to(tl.float32) * STEP
    else:
        value = codebook_value(code, TABLE)
    return value


@triton.jit
@typing.no_type_check
def dequantize_kernel(
    codes_ptr,
    scale_ptr,
    unit_ptr,
    tiles,
    length,
    tiles_in_row,
    row_bytes,
    out_ptr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    TABLE: tl.constexpr,
    HAS_INF: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    HAS_UNIT: tl.constexpr,
):
    """Dequantizes R tiles."""
    tile = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_tile = tile < tiles
    k = tl.arange(0, KP)[None, :]
    if EVEN:
        row, column = tile * 0, tile * K
        is_element = is_tile[:, None]
    else:
        row = tile // tiles_in_row
        column = (tile % tiles_in_row) * K
        is_element = is_tile[:, None] & (k < K) & (column[:, None] + k < length)
    code = loaded_codes(codes_ptr, row, column, is_tile, length, row_bytes, BITS, R, K, KP, EVEN)
    stored = tl.load(scale_ptr + tile, mask=is_tile, other=0)
    if SCALE == _POWER:
        scale = power_of_two(stored.to(tl.int32) - 127)
        scale = tl.where(stored == 255, float("nan"), scale)
    elif SCALE == _SMALL_FLOAT:
        scale = minifloat_value(stored.to(tl.int32), SCALE_MAN, SCALE_BIAS)
        scale = tl.where(scale > SCALE_HIGH, float("nan"), scale)
    else:
        scale = stored.to(tl.float32)
    if HAS_UNIT:
        scale = scale * tl.load(unit_ptr)
        scale = tl.where(scale < _TINY, 0.0, scale)
    value = decoded(code, KIND, BITS, MAN, BIAS, HIGH, STEP, TABLE, HAS_INF) * scale[:, None]
    magnitude = as_bits(value) & 0x7FFFFFFF
    value = as_float(tl.where(magnitude < 0x00800000, as_bits(value) & -0x80000000, as_bits(value)))
    tl.store(out_ptr + (row * length + column)[:, None] + k, value.to(out_ptr.dtype.element_ty), mask=is_element)


def dequantize_rows(problem: TileProblem, codes: typing.Any, scale: typing.Any, unit: typing.Any, out: typing.Any) -> None:
    """Dequantizes rows into a given tensor.

    Args:
        problem: a problem whose `unsupported_layout()` is None.
        codes: uint8 `[rows, bytes]`, contiguous.
        scale: `[rows, tiles]`, contiguous.
        unit: float32 of one element, the tensor scale; or None.
        out: floating `[rows, length]`, written.
    """
    where = (codes, scale, scale if unit is None else unit, problem.rows * problem.tiles_in_row)
    dequantize_kernel[(problem.programs,)](
        *where, problem.length, problem.tiles_in_row, codes.shape[-1], out, **problem.decoding(), num_warps=problem.warps,
        enable_fp_fusion=True,
    )  # fmt: skip

"""The Triton dequantize kernel, in the layout of `quantize.py`.

A minifloat code is shifted into the exponent and mantissa of a float32, which gives its number times `2**(bias - 127)`,
subnormals included; codes beyond the largest number are NaN (or infinity, if the format has it). Numbers are multiplied by
their scale in float32 and rounded once. Bound: memory, 0.53 bytes read and 2 written an element for 4.25 bits to bfloat16.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

import typing

import triton
import triton.language as tl

from ...triton.decode import number_of, scale_of
from ...triton.formats import as_bits, as_float, codebook_value
from .problem import TileProblem

_TINY = tl.constexpr(2.0**-126)


@triton.jit
@typing.no_type_check
def loaded_codes(codes_ptr, row, column, is_tile, length, row_bytes, BITS: tl.constexpr, TILES: tl.constexpr):
    """The codes of tiles `[count, padded]`, int32: the inverse of `store_codes`."""
    R: tl.constexpr = TILES.count
    K: tl.constexpr = TILES.length
    KP: tl.constexpr = TILES.padded
    if BITS == 8:
        k = tl.arange(0, KP)[None, :]
        is_code = is_tile[:, None] if TILES.is_even else is_tile[:, None] & (k < K) & (column[:, None] + k < length)
        code = tl.load(codes_ptr + (row * row_bytes + column)[:, None] + k, mask=is_code, other=0).to(tl.int32)
    elif BITS == 4:
        k = tl.arange(0, KP // 2)[None, :]
        is_pair = is_tile[:, None] if TILES.is_even else is_tile[:, None] & (2 * k < K) & (column[:, None] + 2 * k < length)
        pair = tl.load(codes_ptr + (row * row_bytes + column // 2)[:, None] + k, mask=is_pair, other=0).to(tl.int32)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), (R, KP))
    else:
        start = (column * 3 // 4)[:, None] + 3 * tl.arange(0, KP // 4)[None, :]
        is_group = is_tile[:, None] & (4 * tl.arange(0, KP // 4) < K)[None, :]
        word = tl.zeros((R, KP // 4), tl.int32)
        for byte in tl.static_range(3):
            is_byte = is_group if TILES.is_even else is_group & (start + byte < row_bytes)
            part = tl.load(codes_ptr + (row * row_bytes)[:, None] + start + byte, mask=is_byte, other=0)
            word = word | (part.to(tl.int32) << 8 * byte)
        even = tl.join(word & 63, (word >> 12) & 63)
        odd = tl.join((word >> 6) & 63, word >> 18)
        code = tl.reshape(tl.join(even, odd), (R, KP))
    return code


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
    TILES: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Dequantizes the tiles of a program."""
    K: tl.constexpr = TILES.length
    tile = tl.program_id(0).to(tl.int64) * TILES.count + tl.arange(0, TILES.count)
    is_tile = tile < tiles
    k = tl.arange(0, TILES.padded)[None, :]
    if TILES.is_even:
        row, column = tile * 0, tile * K
        is_element = is_tile[:, None]
    else:
        row = tile // tiles_in_row
        column = (tile % tiles_in_row) * K
        is_element = is_tile[:, None] & (k < K) & (column[:, None] + k < length)
    code = loaded_codes(codes_ptr, row, column, is_tile, length, row_bytes, CODES.bits, TILES)
    scale = scale_of(tl.load(scale_ptr + tile, mask=is_tile, other=0), SCALES)
    if SCALES.has_tensor_scale:
        scale = scale * tl.load(unit_ptr)
        scale = tl.where(scale < _TINY, 0.0, scale)
    if CODES.kind == "codebook":
        value = codebook_value(code, CODES) * scale[:, None]
    else:
        value = number_of(code, codes_ptr, CODES) * scale[:, None]
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

"""A Triton kernel that sweeps all scales for the least Hessian-weighted error.

The error of a tile with residual r is `r^T H r`. A program loads one block of columns, its `H` (K x K) and R rows of the
weight; for each candidate it rounds, computes the residual and multiplies it with `H` by `tl.dot`, so the weight and `H`
are read once. Bound: the products, K multiply-adds an element and candidate, in full float32 ("ieee"), because residuals
cancel and the rounding of TF32 (10-bit mantissas) would decide between scales. Tiles are in units of a power of two near
their amax, `H` in units of one near its largest entry. A candidate wins only if its error is lower by 2**-16; the first is
the caller's initial scale.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

import dataclasses
import typing

import triton
import triton.language as tl

from ...triton.constants import Codes
from ...triton.formats import as_bits, as_float, nearest, power_of_two
from .problem import TileProblem
from .search import _TIE

ROWS = 64
LONGEST_TILE = 128


@triton.jit
@typing.no_type_check
def product_error(x, sign, H, scale, CODES: tl.constexpr):
    """`r^T H r` of each row; for minifloats `x` are magnitudes."""
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    off = nearest(y, CODES) * scale[:, None] - x
    if CODES.kind == "minifloat":
        off = as_float(as_bits(off) ^ sign)
    return tl.sum(tl.dot(off, H, input_precision="ieee") * off, axis=1)


@triton.jit
@typing.no_type_check
def sweep_kernel(
    x_ptr,
    H_ptr,
    scale_ptr,
    candidates_ptr,
    rows,
    length,
    tiles_in_row,
    candidates,
    TILES: tl.constexpr,
    CODES: tl.constexpr,
):
    """Replaces the scales of some rows in one block of columns by the best candidates that are better."""
    K: tl.constexpr = TILES.length
    block = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * TILES.count + tl.arange(0, TILES.count)
    k = tl.arange(0, TILES.padded)
    is_row = row < rows
    is_element = is_row[:, None] & ((k < K) & (block * K + k < length))[None, :]
    loaded = tl.load(x_ptr + (row * length + block * K)[:, None] + k[None, :], mask=is_element, other=0.0).to(tl.float32)
    H = tl.load(H_ptr + block * K * K + k[:, None] * K + k[None, :], mask=(k < K)[:, None] & (k < K)[None, :], other=0.0)

    bits = as_bits(loaded)
    sign = bits & -0x80000000
    magnitude_bits = bits & 0x7FFFFFFF
    magnitude_bits = tl.where(magnitude_bits < 0x00800000, 0, magnitude_bits)
    exponent = tl.minimum(tl.maximum((tl.max(magnitude_bits, axis=1) >> 23) - 127, -126), 126)
    inverse = power_of_two(-exponent)
    x = as_float(magnitude_bits) * inverse[:, None]
    if CODES.kind != "minifloat":
        x = as_float(as_bits(x) | sign)

    best = tl.load(scale_ptr + row * tiles_in_row + block, mask=is_row, other=1.0)
    tried = tl.maximum(best * inverse, 2.0**-120)
    least = product_error(x, sign, H, tried, CODES)
    for i in range(candidates):
        candidate = tl.load(candidates_ptr + i)
        tried = tl.maximum(candidate * inverse, 2.0**-120)
        found = product_error(x, sign, H, tried, CODES)
        is_lower = found < least * _TIE
        best = tl.where(is_lower, candidate, best)
        least = tl.where(is_lower, found, least)
    tl.store(scale_ptr + row * tiles_in_row + block, best, mask=is_row)


def unsupported(problem: TileProblem) -> str | None:
    """Why the kernel does not support the problem; None when it does."""
    if reason := problem.unsupported_layout():
        return reason
    if not 16 <= problem.padded_tile <= LONGEST_TILE:
        return f"tiles of {problem.tile}; blocks of 9 to {LONGEST_TILE} columns fit in registers"
    return None


def constants(problem: TileProblem) -> dict[str, typing.Any]:
    """The constants that the kernel is compiled with."""
    return {"TILES": dataclasses.replace(problem.tiles, count=ROWS), "CODES": Codes.of(problem.scheme.format)}


def sweep_rows(problem: TileProblem, x: typing.Any, H: typing.Any, scale: typing.Any, candidates: typing.Any) -> None:
    """Improves the scales of rows.

    Args:
        problem: a problem whose `unsupported(problem)` is None.
        x: floating `[rows, length]`, contiguous.
        H: float32 `[tiles, K, K]`, contiguous, its largest entry near 1.
        scale: float32 `[rows, tiles]`, the initial scales; overwritten.
        candidates: float32, the scales to try.
    """
    grid = (triton.cdiv(problem.rows, ROWS), problem.tiles_in_row)
    sizes = (problem.rows, problem.length, problem.tiles_in_row, candidates.shape[0])
    sweep_kernel[grid](x, H, scale, candidates, *sizes, **constants(problem), num_warps=4, enable_fp_fusion=True)

"""Triton GEMV of packed weights, in float32, for a few rows of activations.

**Tiling.** The matrix is stored `[N, K]`, its codes packed along K, so that 32 bits contain 8 codes (or 4) adjacent along K. A
program has BN of the N, and its warps are laid out along K: K is split among the threads of a program and never among programs,
so there is no second pass and no atomic sum, and the order of summation is fixed. A thread reads 128 bits at a time of each of
its BN rows; their activations are read once for all BN. The layout of the activations is changed once per step through shared
memory, which is cheap for steps of 4096 weights per row.

**Accumulator.** The products of a chunk (at most 32 codes, at most one tile) are summed in the thread, scaled once, and added
to the thread's sum; the threads' sums are added at the end. Zero points are applied outside the inner loop, too: the zero point
times the sum of the chunk's activations is subtracted.

**Bound.** Memory as long as a weight costs few instructions. Integers take a mask, a subtraction and a product; e2m1 two
shifts, a mask and two products. For 4 bits decoding is the bound (counts: docs/design/kernels-accelerators.md). Rows of
bfloat16 therefore use `gemv_bf16.py`, which decodes two numbers at a time; this kernel is for float32 and float16, for which no
matrix instruction sums in full precision, and for formats that are not decoded in pairs.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl

from ...triton.decode import numbers_in, scale_of, zero_of


@triton.jit
@typing.no_type_check
def gemv_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    unit_ptr,
    table_ptr,
    m,
    n,
    k,
    x_stride,
    word_stride,
    scale_k,
    scale_n,
    y_ptr,
    MP: tl.constexpr,
    BN: tl.constexpr,
    BW: tl.constexpr,
    CHUNK: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
):
    """`y[m, n] = sum_k x[m, k] w[n, k]` for BN of n, all m."""
    codes_in_word: tl.constexpr = 32 // CODES.bits
    chunks: tl.constexpr = BW * codes_in_word // CHUNK
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    is_row = row < n
    mi = tl.arange(0, MP)[:, None, None, None]
    scale_row = row // TN * scale_n if TN > 0 else row * 0
    total = tl.zeros([MP, BN, chunks], tl.float32)
    for first in range(0, k, BW * codes_in_word):
        at = first // codes_in_word + tl.arange(0, BW)
        is_word = is_row[:, None] & (at * codes_in_word < k)[None, :]
        word = tl.load(words_ptr + (row * word_stride)[:, None] + at[None, :], mask=is_word, other=0)
        value = numbers_in(word, table_ptr, CODES)
        ki = first + tl.arange(0, chunks)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        is_x = (mi < m) & (ki < k)[None, None, :, :]
        x = tl.load(x_ptr + mi * x_stride + ki[None, None, :, :], mask=is_x, other=0.0).to(tl.float32)
        part = tl.sum(tl.reshape(value, (1, BN, chunks, CHUNK)) * x, axis=3)  # [MP, BN, chunks]

        start = first + tl.arange(0, chunks) * CHUNK
        is_scale = is_row[:, None] & (start < k)[None, :]
        tile = start // TK * scale_k if TK > 0 else start * 0
        where = scale_row[:, None] + tile[None, :]
        scale = scale_of(tl.load(scale_ptr + where, mask=is_scale, other=0), SCALES)
        if SCALES.zero == "none":
            total += part * scale[None, :, :]
        else:
            zero = zero_of(tl.load(zero_ptr + where, mask=is_scale, other=0), SCALES)
            of_x = tl.sum(x, axis=3)  # [MP, 1, chunks]
            if SCALES.zero == "codes":
                total += (part - of_x * zero[None, :, :]) * scale[None, :, :]
            else:
                total += part * scale[None, :, :] + of_x * zero[None, :, :]
    y = tl.sum(total, axis=2)  # [MP, BN]
    if SCALES.has_tensor_scale:
        y = y * tl.load(unit_ptr)
    mo = tl.arange(0, MP)
    is_y = (mo < m)[:, None] & is_row[None, :]
    tl.store(y_ptr + mo.to(tl.int64)[:, None] * n + row[None, :], y.to(y_ptr.dtype.element_ty), mask=is_y)

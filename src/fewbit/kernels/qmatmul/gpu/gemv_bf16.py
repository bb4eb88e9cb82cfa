"""Triton GEMV of packed weights in bfloat16 on tensor cores, decoded in pairs.

**Why tensor cores for one row.** In float32, one weight at a time, decoding and adding take more instructions per weight than a
GPU executes while it reads one (`gemv.py`). Decoded in pairs of bfloat16 it takes fewer (`ptx.py`), and a matrix instruction
adds eight weights of a lane at once, for up to eight rows, in float32.

**Tiling.** The matrix is stored `[N, K]`, its codes packed along K. A chunk is 32 to 64 codes of a row, at most one tile except
for tiles of 16. A step along K has KS chunks of each of BN rows: a product of KS pairs of matrices, which the warps share. So K
is split within the program and not among programs: no second pass, no atomic sums.

**Data path.** The bytes go to shared memory unchanged, and from there to the registers that the matrix instructions read once
decoded: four bytes of a row per lane. Nothing between load and product moves a number to another lane: the low codes of four
bytes become four neighbours along K, then the high ones, and x is permuted to the same order.

**Scales** are applied to the sums of their chunk, so decoded numbers stay exact, without a product each. Tiles of 16 are
shorter than a chunk; their scales are E4M3, whose product with a 4-bit number bfloat16 represents, and include E2M1's factor.
Scales of sums cannot include that factor, `2**126`: the products before would be subnormal. The sums of x for zero points are
products with ones on the tensor cores; sums across lanes would cost more.

Instruction counts, and attempts that did not pay: docs/design/kernels-accelerators.md.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl

from ...triton.decode import number_of, scale_of, zero_of
from .gemm import spread
from .groups import group_of, group_pointers


@triton.jit
@typing.no_type_check
def in_order(low, high, R: tl.constexpr, BYTES: tl.constexpr):
    """The two codes of each byte, in the product's order of K.

    Byte i of `[.., BYTES]` has codes `2i` and `2i + 1`; the result is `[R, 2 BYTES]`.
    """
    each = tl.reshape(tl.join(low, high), (R, BYTES // 4, 4, 2))
    return tl.reshape(tl.permute(each, (0, 1, 3, 2)), (R, 2 * BYTES))


@triton.jit
@typing.no_type_check
def pairs_of(
    byte,
    table_ptr,
    R: tl.constexpr,
    CHUNK: tl.constexpr,
    PTX: tl.constexpr,
    CODES: tl.constexpr,
):
    """Decodes bytes to bfloat16, `[R, CHUNK]`."""
    if CODES.bits == 4:
        if PTX != "":
            low, high = tl.inline_asm_elementwise(
                PTX, "=r,=r,=r,=r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            code = byte.to(tl.int32)
            low = number_of(code & 15, table_ptr, CODES).to(tl.bfloat16)
            high = number_of(code >> 4, table_ptr, CODES).to(tl.bfloat16)
        number = in_order(low, high, R, CHUNK // 2)
    else:
        if PTX != "":
            number = tl.inline_asm_elementwise(PTX, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            code = byte.to(tl.int32)
            number = number_of(code, table_ptr, CODES).to(tl.bfloat16)
        number = tl.reshape(number, (R, CHUNK))
    return number


@triton.jit
@typing.no_type_check
def scaled(number, scale, PTX: tl.constexpr):
    """The product of bfloat16 numbers, exact in bfloat16."""
    if PTX != "":
        number, scale = tl.broadcast(number, scale)
        product = tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r",
            [number, scale],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        product = (number.to(tl.float32) * scale.to(tl.float32)).to(tl.bfloat16)
    return product


@triton.jit
@typing.no_type_check
def pairs_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    unit_ptr,
    table_ptr,
    sizes_ptr,
    m,
    n,
    k,
    x_stride,
    codes_n,
    scale_k,
    scale_n,
    groups,
    codes_g,
    scale_g,
    unit_g,
    y_ptr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr,
    GP: tl.constexpr,
    PTX: tl.constexpr,
    FOLDED: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
):
    """A BM x BN block of `y[m, n] = sum_k x[m, k] w[n, k]`. GP > 0: w is that of m's group."""
    of_chunk: tl.constexpr = CHUNK * CODES.bits // 8
    is_short: tl.constexpr = TK > 0 and TK < CHUNK
    tiles: tl.constexpr = CHUNK // TK if is_short else 1
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    m_first, m_end, k_end = tl.program_id(1) * BM, m, k
    if GP > 0:
        group, m_first, m_end = group_of(sizes_ptr, groups, m, tl.program_id(1), GP, BM)
        k_end = tl.where(group < groups, k, 0)
        codes_ptr, scale_ptr, zero_ptr, unit_ptr = group_pointers(
            group, groups, codes_ptr, scale_ptr, zero_ptr, unit_ptr, codes_g, scale_g, unit_g
        )
    mi = m_first + tl.arange(0, BM)
    is_row, is_m = row < n, mi < m_end
    codes_row = codes_ptr + (row * codes_n)[None, :, None]
    scale_row = scale_ptr + (row // TN * scale_n if TN > 0 else row * 0)[None, :, None]
    x_row = x_ptr + (mi.to(tl.int64) * x_stride)[None, :, None]
    total = tl.zeros([KS, BN, BM], tl.float32)
    for first in range(0, k_end, KS * CHUNK):
        start = first + tl.arange(0, KS)[:, None, None] * CHUNK
        at = start * CODES.bits // 8 + tl.arange(0, of_chunk)[None, None, :]
        is_byte = is_row[None, :, None] if EVEN_K else is_row[None, :, None] & (at * 8 // CODES.bits < k)
        byte = tl.load(codes_row + at, mask=is_byte, other=0)
        w = pairs_of(byte, table_ptr, KS * BN, CHUNK, PTX, CODES)

        ki = start + tl.arange(0, CHUNK)[None, None, :]
        is_x = is_m[None, :, None] if EVEN_K else is_m[None, :, None] & (ki < k)
        x = tl.load(x_row + ki, mask=is_x, other=0.0)  # [KS, BM, CHUNK]
        if CODES.bits == 4:
            x = tl.reshape(x, (KS * BM, CHUNK // 8, 4, 2))
            x = tl.reshape(tl.permute(x, (0, 1, 3, 2)), (KS, BM, CHUNK))
        x = tl.permute(x, (0, 2, 1))

        tile = start // TK + tl.arange(0, tiles)[None, None, :] if TK > 0 else start * 0
        is_tile = is_row[None, :, None] if EVEN_K else is_row[None, :, None] & (tile * TK < k)
        stored = tl.load(scale_row + tile * scale_k, mask=is_tile, other=0)
        scale = scale_of(stored, SCALES)  # [KS, BN, tiles]
        if is_short:
            if FOLDED:
                scale = scale * 2.0**118
            wide = spread(tl.reshape(scale, (KS * BN, tiles)).to(tl.bfloat16), KS * BN, CHUNK, KS * BN, tiles)
            total = tl.dot(tl.reshape(scaled(w, wide, PTX), (KS, BN, CHUNK)), x, total)
        else:
            w = tl.reshape(w, (KS, BN, CHUNK))
            part = tl.dot(w, x)
            if SCALES.zero == "none":
                total += part * scale
            else:
                of_x = tl.dot(tl.full([KS, BN, CHUNK], 1.0, tl.bfloat16), x)
                zero_row = zero_ptr + (row // TN * scale_n if TN > 0 else row * 0)[None, :, None]
                zero = zero_of(tl.load(zero_row + tile * scale_k, mask=is_tile, other=0), SCALES)
                if SCALES.zero == "codes":
                    total += (part - of_x * zero) * scale
                else:
                    total += part * scale + of_x * zero
    y = tl.sum(total, axis=0)  # [BN, BM]
    if FOLDED:
        y = y * 2.0**8
    if SCALES.has_tensor_scale:
        y = y * tl.load(unit_ptr)
    y_at = y_ptr + mi.to(tl.int64)[None, :] * n + row[:, None]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_m[None, :] & is_row[:, None])

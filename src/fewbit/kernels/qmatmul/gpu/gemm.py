"""Triton GEMM of packed weights on tensor cores, decoded in registers.

**Layout.** A program computes the transpose of its block, `[BN, BM] = w^T [BN, BK] x^T [BK, BM]`: so the decoded weight is
the left operand of the matrix instructions, which Hopper reads from registers, and BM may be as small as 16, to which
fewer rows are padded. Codes are read with their strides: as `[N, K]`, as `[K, N]`, and packed along either; so
the gradient with respect to x is this kernel with the strides exchanged. Pairs of 4-bit codes become adjacent by
`tl.join`.

**Scales.** One per tile, loaded once and repeated in registers, for any tile lengths relative to BN and BK; a scale that
covers all of K is applied to the sums. The product of value and scale is made in float32, and rounded once to the type of the
matrix instructions: bfloat16 for bfloat16 activations; for float16, whose exponent range is too small for scales, and float32,
the tensor cores' 32-bit types (one pass of TF32, which represents every float16, and three passes).

**Splits.** If there are fewer blocks than multiprocessors, K is split among programs; each writes its float32 sums, and
they are added in order, not by atomic operations, so that equal inputs give equal bytes.

**Groups.** With one matrix per group of rows, the programs of one launch find their group on the device (`groups.py`).
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl

from ...triton.decode import number_of, scale_of, zero_of
from .groups import group_of, group_pointers


@triton.jit
@typing.no_type_check
def block_of(first, B: tl.constexpr, TILE: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT tiles of an axis that B elements from `first` on overlap."""
    if TILE == 0:
        tile = tl.zeros([COUNT], tl.int32)
    elif TILE >= B:
        tile = first // TILE + tl.zeros([COUNT], tl.int32)
    else:
        tile = first // TILE + tl.arange(0, COUNT)
    return tile


@triton.jit
@typing.no_type_check
def spread(tiles, BN: tl.constexpr, BK: tl.constexpr, CN: tl.constexpr, CK: tl.constexpr):
    """Repeats one number per tile, `[CN, CK]`, to what broadcasts to `[BN, BK]`."""
    if CN == 1 or CN == BN:
        if CK == 1 or CK == BK:
            out = tiles
        else:
            out = tl.reshape(tl.broadcast_to(tiles[:, :, None], (CN, CK, BK // CK)), (CN, BK))
    else:
        wide = tl.broadcast_to(tiles[:, None, :, None], (CN, BN // CN, CK, BK // CK))
        out = tl.reshape(wide, (BN, BK))
    return out


@triton.jit
@typing.no_type_check
def loaded_codes(
    codes_ptr,
    n_first,
    k_first,
    n,
    k,
    codes_n,
    codes_k,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BITS: tl.constexpr,
    PACKS_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The codes `[BN, BK]` of a block, int32."""
    in_n: tl.constexpr = 1 if BITS == 8 or PACKS_K else 2
    in_k: tl.constexpr = 2 if BITS == 4 and PACKS_K else 1
    nb = n_first // in_n + tl.arange(0, BN // in_n)
    kb = k_first // in_k + tl.arange(0, BK // in_k)
    is_byte = (nb * in_n < n)[:, None]
    if not EVEN_K:
        is_byte = is_byte & (kb * in_k < k)[None, :]
    where = nb.to(tl.int64)[:, None] * codes_n + kb.to(tl.int64)[None, :] * codes_k
    byte = tl.load(codes_ptr + where, mask=is_byte, other=0).to(tl.int32)
    if BITS == 8:
        code = byte
    elif PACKS_K:
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (BN, BK))
    else:
        code = tl.reshape(tl.permute(tl.join(byte & 15, byte >> 4), (0, 2, 1)), (BN, BK))
    return code


@triton.jit
@typing.no_type_check
def dot_kernel(
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
    codes_k,
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
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    GP: tl.constexpr,
    PACKS_K: tl.constexpr,
    CN: tl.constexpr,
    CK: tl.constexpr,
    PRECISION: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
):
    """A block of `y[s, m, n] = sum_k x[m, k] w[k, n]`. k is in split s. GP > 0: w is that of m's group."""
    scales_sums: tl.constexpr = TK == 0 and SCALES.zero == "none"
    blocks_m, blocks_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    if GP > 0:
        blocks_m = (m + tl.minimum(groups + 1, m) * (BM - 1)) // BM
    group = tl.program_id(0) // (GROUP * blocks_m)
    width = tl.minimum(blocks_n - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * blocks_m)
    n_first = (group * GROUP + within % width) * BN
    m_first, m_end, steps = within // width * BM, m, tl.cdiv(k, BK)
    if GP > 0:
        own, m_first, m_end = group_of(sizes_ptr, groups, m, within // width, GP, BM)
        steps = tl.where(own < groups, steps, 0)
        codes_ptr, scale_ptr, zero_ptr, unit_ptr = group_pointers(
            own, groups, codes_ptr, scale_ptr, zero_ptr, unit_ptr, codes_g, scale_g, unit_g
        )
    mi, ni = m_first + tl.arange(0, BM), n_first + tl.arange(0, BN)
    is_m = (mi < m_end)[:, None]
    x_row = x_ptr + mi.to(tl.int64)[:, None] * x_stride
    tile_n = block_of(n_first, BN, TN, CN)
    is_tile_n = (tile_n * TN < n)[:, None]
    scale_row = tile_n.to(tl.int64)[:, None] * scale_n

    total = tl.zeros([BN, BM], tl.float32)
    of_split = tl.cdiv(steps, SPLITS)
    split = tl.program_id(1)
    for step in range(split * of_split, tl.minimum((split + 1) * of_split, steps)):
        k_first = step * BK
        ki = k_first + tl.arange(0, BK)
        is_x = is_m if EVEN_K else is_m & (ki < k)[None, :]
        x = tl.load(x_row + ki[None, :], mask=is_x, other=0.0)
        code = loaded_codes(codes_ptr, n_first, k_first, n, k, codes_n, codes_k, BN, BK, CODES.bits, PACKS_K, EVEN_K)
        w = number_of(code, table_ptr, CODES)
        if not scales_sums:
            tile_k = block_of(k_first, BK, TK, CK)
            is_tile = is_tile_n & (tile_k * TK < k)[None, :]
            where = scale_row + tile_k[None, :] * scale_k
            scale = scale_of(tl.load(scale_ptr + where, mask=is_tile, other=0), SCALES)
            scale = spread(scale, BN, BK, CN, CK)
            if SCALES.zero == "none":
                w = w * scale
            else:
                zero = spread(zero_of(tl.load(zero_ptr + where, mask=is_tile, other=0), SCALES), BN, BK, CN, CK)
                if SCALES.zero == "codes":
                    w = (w - zero) * scale
                else:
                    w = w * scale + zero
        if PRECISION == "bf16":
            total = tl.dot(w.to(tl.bfloat16), tl.trans(x).to(tl.bfloat16), total)
        else:
            total = tl.dot(w, tl.trans(x).to(tl.float32), total, input_precision=PRECISION)

    if scales_sums:
        stored = tl.load(scale_ptr + (ni.to(tl.int64) // TN * scale_n if TN > 0 else ni * 0), mask=ni < n, other=0)
        total = total * scale_of(stored, SCALES)[:, None]
    if SCALES.has_tensor_scale:
        total = total * tl.load(unit_ptr)
    y = tl.trans(total).to(y_ptr.dtype.element_ty)
    y_row = y_ptr + (split.to(tl.int64) * m + mi.to(tl.int64))[:, None] * n
    tl.store(y_row + ni[None, :], y, mask=is_m & (ni < n)[None, :])

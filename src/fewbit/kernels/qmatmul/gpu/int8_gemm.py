"""Triton GEMM of 8-bit codes: int8 to int32, FP8 to float32.

Scales of both operands are constant along K, so the sums are scaled: `y = (x_codes @ w_codes) * x_scale * w_scale`. Hopper
accumulates FP8 products with about 14 bits; every 128 of them the sum is added to one in full float32.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def codes_kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    m,
    n,
    k,
    x_m,
    x_k,
    w_k,
    w_n,
    x_scale_m,
    w_scale_n,
    y_ptr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """A block of `y[m, n]`; WHOLE: whether codes are integers."""
    exact_after: tl.constexpr = 128 if BK > 128 else BK
    blocks_m, blocks_n = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = tl.program_id(0) // (GROUP * blocks_n)
    height = tl.minimum(blocks_m - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * blocks_n)
    mi = (group * GROUP + within % height) * BM + tl.arange(0, BM)
    ni = within // height * BN + tl.arange(0, BN)
    is_m, is_n = (mi < m)[:, None], (ni < n)[None, :]
    x_row = x_ptr + mi.to(tl.int64)[:, None] * x_m
    w_column = w_ptr + ni.to(tl.int64)[None, :] * w_n
    total = tl.zeros([BM, BN], tl.int32 if WHOLE else tl.float32)
    for k_first in range(0, k, BK):
        ki = k_first + tl.arange(0, BK)
        is_x = is_m if EVEN_K else is_m & (ki < k)[None, :]
        is_w = is_n if EVEN_K else is_n & (ki < k)[:, None]
        x = tl.load(x_row + ki.to(tl.int64)[None, :] * x_k, mask=is_x, other=0.0)
        w = tl.load(w_column + ki.to(tl.int64)[:, None] * w_k, mask=is_w, other=0.0)
        if WHOLE:
            total = tl.dot(x, w, total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, w, total, max_num_imprecise_acc=exact_after)
    x_scale = tl.load(x_scale_ptr + mi * x_scale_m, mask=mi < m, other=0.0).to(tl.float32)
    w_scale = tl.load(w_scale_ptr + ni * w_scale_n, mask=ni < n, other=0.0).to(tl.float32)
    y = total.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    tl.store(y_ptr + mi.to(tl.int64)[:, None] * n + ni[None, :], y.to(y_ptr.dtype.element_ty), mask=is_m & is_n)

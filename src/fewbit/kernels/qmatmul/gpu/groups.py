"""Assigns programs of a grouped GEMM to groups.

The rows of each group are split into blocks from its first row, so that a block never has rows of two groups; the last one of a
group may be short. Rows past all groups form one more group, whose product is zero. The number of blocks is only known on the
device; the grid has as many programs as there can be, and those past the last block do nothing.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl


@triton.jit
@typing.no_type_check
def group_of(sizes_ptr, groups, m, turn, GP: tl.constexpr, BM: tl.constexpr):
    """The group, first row and end of a program; GP > groups."""
    g = tl.arange(0, GP)
    size = tl.load(sizes_ptr + g, mask=g < groups, other=0).to(tl.int32)
    sums = tl.cumsum(size, axis=0)
    first = tl.where(g > groups, m, tl.minimum(sums - size, m))
    end = tl.where(g >= groups, m, tl.minimum(sums, m))
    blocks = (end - first + BM - 1) // BM
    after = tl.cumsum(blocks, axis=0)
    own = tl.sum((after <= turn).to(tl.int32), axis=0)
    is_own = g == own
    m_first = tl.sum(tl.where(is_own, first + (turn - after + blocks) * BM, 0), axis=0)
    return own, m_first, tl.sum(tl.where(is_own, end, 0), axis=0)


@triton.jit
@typing.no_type_check
def group_pointers(group, groups, codes_ptr, scale_ptr, zero_ptr, unit_ptr, codes_g, scale_g, unit_g):
    """Pointers to a group's matrix; past the groups, the last one."""
    held = tl.minimum(group, groups - 1).to(tl.int64)
    return codes_ptr + held * codes_g, scale_ptr + held * scale_g, zero_ptr + held * scale_g, unit_ptr + held * unit_g

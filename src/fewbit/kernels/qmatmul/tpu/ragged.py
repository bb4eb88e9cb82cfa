"""ragged_dot on TPUs: groups of rows times packed matrices (mixture of experts).

**The work.** The rows are split into blocks of `Config.m`. A group may begin and end within a block, so a *visit* is a block of
rows and one group that has rows in it, and the grid runs over visits: one per block, and one more for each border between two
nonempty groups within a block. Their number depends on the sizes, so the grid's length is a dynamic value. The group and the
block of each visit are computed before the kernel from the sizes alone (`Visits`) and prefetched to scalar memory for the index
maps. So empty groups cost nothing: neither a step nor a byte of their weights.

**The product** of a visit is that of `gemm.py` or `int8_gemm.py` with all rows of the block and the group's matrix. Of its
result only the rows of the group are written, to a block that stays in VMEM between its visits. Rows past all groups belong to
no visit and are set to zero afterwards.

**Traffic.** A matrix is read once for each block of rows that its group overlaps, x once for each block of the result's
other axis. Short groups waste products: a block of 128 rows of 8 groups is multiplied 8 times. The matrix unit has capacity to
spare, since a visit is bound by loading and decoding its matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ....array.qarray import QArray
from .blocks import Block, Config, Cut
from .gemm import DecodedProduct
from .int8_blocks import Pair
from .int8_gemm import PairedProduct
from .kernel import AbstractProduct, accumulate, varying_axes
from .problem import Form

PLAIN = Config(m=128)
"""The default blocks: fewer rows than in a dot_general, since groups are short."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The group and the block of rows of each grid step.

    Attributes:
        group: of each visit, `[most visits]`; arbitrary past the last one.
        block: of rows, likewise.
        bounds: the first row of each group, and the end of the last, `[G + 1]`.
        count: the number of visits.
    """

    group: jax.Array
    block: jax.Array
    bounds: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, block: int) -> "Visits":
        """The visits for groups of these sizes and `rows` rows in blocks of `block`.

        >>> visits = Visits.of(jnp.array([3, 0, 6]), 16, 4)
        >>> visits.group[: visits.count].tolist(), visits.block[: visits.count].tolist()
        ([0, 2, 2, 2], [0, 0, 1, 2])
        """
        ends = jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows)
        bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        first = bounds[:-1] // block
        each = jnp.where(ends > bounds[:-1], (ends - 1) // block - first + 1, 0)
        after = jnp.cumsum(each, dtype=jnp.int32)
        most = math.ceil(rows / block) + min(len(sizes), rows) - 1
        visit = jnp.arange(max(most, 1), dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(after, visit, side="right"), len(sizes) - 1).astype(jnp.int32)
        return cls(group, first[group] + visit - (after - each)[group], bounds, after[-1])


def grouped_product(
    x: jax.Array,
    q: QArray,
    sizes: jax.Array,
    *,
    contracts_last: bool,
    result: DTypeLike,
    precision: object = None,
    config: Config = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`AbstractKernel.grouped`; other arguments as in `gemm.stacked_product`."""
    form = Form.of(x[None], q, contracts_last=contracts_last, result=result, precision=precision, halves=config.halves)
    return _grouped(DecodedProduct(Cut.of(form, config), config), x[None], q, sizes, interpret=interpret)[0]


def grouped_pair(
    x: QArray,
    q: QArray,
    sizes: jax.Array,
    *,
    contracts_last: bool,
    result: DTypeLike,
    config: Config = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`AbstractKernel.grouped_pair`; other arguments as in `int8_gemm.paired_stacks`."""
    pair = Pair.of(x, q, contracts_last=contracts_last, result=result, config=config)
    return _grouped(PairedProduct(pair), x, q, sizes, interpret=interpret).astype(result)


def grouped_blocks(product: AbstractProduct, x: Any, q: QArray) -> list[Block]:
    """The blocks of every input and the result; operands may be shapes.

    The grid is (free axis of the weight, visits, contraction). Index maps also take the visits' groups and row blocks, and the
    arrays of the weight have the group as first axis.
    """
    return _blocks(product, jax.eval_shape(product.arrays, x, q))


def _blocks(product: AbstractProduct, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[Block]:
    blocks = product.blocks(arrays)
    return [_of_group(block, len(arrays[block.name])) if block.is_weight else _visited(block) for block in blocks]


def _visited(block: Block) -> Block:
    """The block of a visit's rows."""

    def index(j: Any, visit: Any, k: Any, _: object, blocks: Any, *__: object) -> tuple[Any, ...]:
        return block.index(blocks[visit], j, k)

    return dataclasses.replace(block, index=index)


def _of_group(block: Block, count: int) -> Block:
    """The block of one of `count` matrices: that of the visit's group."""

    def index(j: Any, visit: Any, k: Any, groups: Any, *_: object) -> tuple[Any, ...]:
        return groups[visit] if count > 1 else 0, *block.index(0, j, k)

    return Block(block.name, (count, *block.shape), block.dtype, (1, *block.block), index, is_weight=True)


def _grouped(product: AbstractProduct, x: Any, q: QArray, sizes: jax.Array, *, interpret: bool) -> jax.Array:
    """The product of rows `[1, M, K]` in groups of these sizes, `[1, M, N]`."""
    arrays = product.arrays(x, q)
    *read, out = _blocks(product, arrays)
    rows, rows_of_block = out.shape[-2], out.block[-2]
    visits = Visits.of(sizes, rows, rows_of_block)
    _, free, contracted = product.grid
    call = pl.pallas_call(
        functools.partial(_kernel, product, tuple(arrays), rows_of_block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(free, visits.count, contracted),
            in_specs=[_spec(block) for block in read],
            out_specs=_spec(out),
            scratch_shapes=[pltpu.VMEM(out.block, product.sums), *product.scratch],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying_axes(x, q, sizes)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=product.vmem_limit_bytes
        ),
        interpret=interpret,
        name=f"{product.name}_ragged",
    )
    inputs = [array if block.is_weight else array[0] for array, block in zip(arrays.values(), read, strict=True)]
    y = product.joined(call(visits.group, visits.block, visits.bounds, *inputs)[None])
    is_row = jnp.arange(rows, dtype=jnp.int32) < visits.bounds[-1]
    return jnp.where(is_row[:, None], y, jnp.zeros((), y.dtype))


def _spec(block: Block) -> pl.BlockSpec:
    """A block of rows, or of one group's matrix."""
    shape: tuple[int | None, ...] = block.block
    if block.is_weight:
        shape = (None, *shape[1:])
    return pl.BlockSpec(shape, block.index)


def _kernel(
    product: AbstractProduct,
    names: tuple[str, ...],
    rows: int,
    groups: jax.Ref,
    blocks: jax.Ref,
    bounds: jax.Ref,
    *refs: jax.Ref,
) -> None:
    """One step of a visit; the last one writes its group's rows, of the `rows` of a block."""
    visit = pl.program_id(1)
    first, end = bounds[groups[visit]], bounds[groups[visit] + 1]

    def finish(y: jax.Ref, sums: jax.Array) -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, sums.ndim - 2) + blocks[visit] * rows
        y[...] = jnp.where((row >= first) & (row < end), sums.astype(y.dtype), y[...])

    accumulate(product, names, finish, *refs)

"""ragged_dot on TPUs: groups of rows times packed matrices (mixture of experts).

**The work.** The rows are split into blocks of `Config.m`. A group may begin and end within a block, so a *visit* is a block of
rows and one group that has rows in it, and the grid runs over visits: one per block, and one more for each border between two
nonempty groups within a block. Their number depends on the sizes, so the grid's length is a dynamic value. The group and the
block of each visit are computed before the kernel from the sizes alone (`Visits`) and prefetched to scalar memory for the index
maps. So empty groups cost nothing: neither a step nor a byte of their weights.

**The product** of a visit is that of `gemm.py` with all rows of the block: bytes of the group's matrix, decoded in VMEM. Of
its result only the rows of the group are written, to a block that stays in VMEM between its visits. Rows past all groups belong
to no visit and are set to zero afterwards.

**Traffic.** A matrix is read once for each block of rows that its group overlaps, x once for each block of the result's
other axis. Short groups waste products: a block of 128 rows of 8 groups is multiplied 8 times. The matrix unit has capacity to
spare, since a visit is bound by loading and decoding its matrix.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType
from jax.typing import DTypeLike

from ....array.qarray import QArray
from .blocks import Block, Config, Cut
from .kernel import joined, planes_of, scale_arrays, summed, varying_axes
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
    """`AbstractRaggedKernel.grouped`; other arguments as in `gemm.stacked_product`."""
    form = Form.of(x[None], q, contracts_last=contracts_last, result=result, precision=precision, halves=config.halves)
    cut = Cut.of(form, config)
    visits = Visits.of(sizes, form.m, cut.m)
    scales = scale_arrays(form, q)
    call = _call(cut, config, grouped_blocks(cut, q), visits.count, tuple(scales), interpret, varying_axes(x, q, sizes))
    rows = planes_of(cut, x[None].astype(form.dtype))[0]
    y = call(visits.group, visits.block, visits.bounds, rows, q.codes, *scales.values())
    is_row = jnp.arange(form.m, dtype=jnp.int32) < visits.bounds[-1]
    return jnp.where(is_row[:, None], joined(form, y[None])[0], jnp.zeros((), form.result))


def grouped_blocks(cut: Cut, q: QArray) -> list[Block]:
    """The blocks of every input and the result; `q` may be shapes.

    The grid is (free axis of the weight, visits, contraction). Index maps also take the visits' groups and row blocks, and the
    arrays of the weight have the group as first axis.
    """
    scales = jax.eval_shape(functools.partial(scale_arrays, cut.form), q)
    blocks = [cut.codes(), *(cut.scales(name, array.dtype) for name, array in scales.items())]
    counts = [len(q.codes), *(len(array) for array in scales.values())]
    stacked = [_of_group(block, n) for block, n in zip(blocks, counts, strict=True)]
    return [_visited(cut.activations()), *stacked, _visited(cut.result())]


def _visited(block: Block) -> Block:
    """The block of a visit's rows."""

    def index(j: Any, visit: Any, k: Any, _: object, blocks: Any, *__: object) -> tuple[Any, ...]:
        return block.index(blocks[visit], j, k)

    return dataclasses.replace(block, index=index)


def _of_group(block: Block, count: int) -> Block:
    """The block of one of `count` matrices: that of the visit's group."""

    def index(j: Any, visit: Any, k: Any, groups: Any, *_: object) -> tuple[Any, ...]:
        return groups[visit] if count > 1 else 0, *block.index(0, j, k)

    return Block(block.name, (count, *block.shape), block.dtype, (1, *block.block), index)


def _call(
    cut: Cut,
    config: Config,
    blocks: list[Block],
    count: jax.Array,
    names: tuple[str, ...],
    interpret: bool,
    varying: ManualAxisType,
) -> Callable[..., jax.Array]:
    """The kernel as a function of `Visits` arrays and one group's arrays."""
    *read, out = blocks
    x, *of_group = [pl.BlockSpec(block.block, block.index) for block in read]
    of_group = [pl.BlockSpec((None, *spec.block_shape[1:]), spec.index_map) for spec in of_group]  # type: ignore[index]
    _, free, contracted = cut.grid
    return pl.pallas_call(
        functools.partial(_kernel, cut, config, names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(free, count, contracted),
            in_specs=[x, *of_group],
            out_specs=pl.BlockSpec(out.block, out.index),
            scratch_shapes=[pltpu.VMEM(out.block, jnp.float32), *(pltpu.VMEM(shape, jnp.int32) for shape in cut.stream())],
        ),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="fewbit_ragged_qmatmul",
    )


def _kernel(
    cut: Cut,
    config: Config,
    names: tuple[str, ...],
    groups: jax.Ref,
    blocks: jax.Ref,
    bounds: jax.Ref,
    x: jax.Ref,
    codes: jax.Ref,
    *refs: jax.Ref,
) -> None:
    """One step of a visit; the last one writes its group's rows."""
    scales, (y, *scratch) = refs[: len(names)], refs[len(names) :]
    visit = pl.program_id(1)
    first, end = bounds[groups[visit]], bounds[groups[visit] + 1]

    def finish(sums: jax.Array) -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1) + blocks[visit] * cut.m
        y[...] = jnp.where((row >= first) & (row < end), sums.astype(y.dtype), y[...])

    summed(cut, config, names, x, codes, scales, tuple(scratch), finish)

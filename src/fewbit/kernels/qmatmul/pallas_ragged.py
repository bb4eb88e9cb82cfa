"""Rows in groups times packed matrices, one for each group, on TPUs: the experts of a mixture.

**The work.** The rows are cut into blocks of `Config.m`. A group may begin and end within a block, so a *visit* is a block of
rows and one group that has rows in it, and the grid runs over visits: as many as there are blocks, and one more for each border
between two groups with rows within a block. How many there are is only known when the sizes are; so the grid's length is a
number that the kernel is given. Which group and which block a visit has is computed before the kernel, from the sizes alone
(`Visits`), and stands in scalar memory, where the indices of the blocks are computed from it. So experts without rows cost
nothing: neither a step, nor a byte of their weights.

**The product** of a visit is that of `pallas_tpu.py`, with all rows of the block: bytes of the group's matrix, decoded in VMEM. Of
its result only the rows of the group are written, into a block that stays in VMEM from one visit of it to the next. Rows beyond
all groups belong to no visit; what is left there is replaced by zeros afterwards.

**What it moves.** A matrix is read once for each block of rows that its group touches, x once for each block of the result's
other axis. Rows of few groups waste products: a block of 128 rows of 8 groups is multiplied 8 times. The matrix unit has them
to spare, since a visit is bound by reading and decoding its matrix.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ...array import QArray
from .pallas_blocks import Block, Config, Cut
from .pallas_form import Form
from .pallas_step import beside_codes, joined, planes_of, summed, varying_axes

PLAIN = Config(m=128)
"""The blocks that are taken where nothing else is said: fewer rows than in a product of all, since groups are short."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Which group and which block of rows each turn of the grid takes.

    Attributes:
        group: of each visit, `[most visits]`; beyond the last one it is any.
        block: of rows, likewise.
        bounds: the first row of each group, and the end of the last, `[G + 1]`.
        count: how many visits there are.
    """

    group: jax.Array
    block: jax.Array
    bounds: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, block: int) -> "Visits":
        """The visits of groups of these sizes, to `rows` rows in blocks of `block`.

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
        turn = jnp.arange(max(most, 1), dtype=jnp.int32)
        group = jnp.minimum(jnp.searchsorted(after, turn, side="right"), len(sizes) - 1).astype(jnp.int32)
        return cls(group, first[group] + turn - (after - each)[group], bounds, after[-1])


def grouped_product(
    x: jax.Array,
    q: QArray,
    sizes: jax.Array,
    *,
    contracts_last: bool,
    result: Any,
    precision: Any = None,
    config: Config = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`y[i] = x[i] @ w[g]` or `x[i] @ w[g].T` for each row i of group g, for the matrices `w` that codes stand for.

    Args:
        x: `[M, K]`, bfloat16 or float32.
        q: `[G, R, C]`, likewise.
        sizes: how many rows each group has, `[G]`, int32; rows beyond their sum give zeros.
        contracts_last: whether K is C, or R.
        result: the dtype of the result, likewise.
        precision: as in `lax.ragged_dot`; None computes float32 products in full precision.
        config: the sizes of blocks.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        `[M, N]`, N being the other one of R and C. Sums are made in float32.
    """
    how = {"result": result, "precision": precision, "halves": config.halves}
    form = Form.of(x[None], q, contracts_last=contracts_last, **how)
    cut = Cut.of(form, config)
    visits = Visits.of(sizes, form.m, cut.m)
    beside = beside_codes(form, q)
    call = _call(cut, config, grouped_blocks(cut, q), visits.count, tuple(beside), interpret, varying_axes(x, q, sizes))
    rows = planes_of(cut, x[None].astype(form.dtype))[0]
    y = call(visits.group, visits.block, visits.bounds, rows, q.codes, *beside.values())
    is_row = jnp.arange(form.m, dtype=jnp.int32) < visits.bounds[-1]
    return jnp.where(is_row[:, None], joined(form, y[None])[0], jnp.zeros((), form.result))


def grouped_blocks(cut: Cut, q: QArray) -> list[Block]:
    """Every array as it is cut: activations, codes, what lies beside them, and the result.

    The grid runs over blocks of the result's other axis, visits, and the contraction. An index takes the visits' groups and
    blocks of rows besides, and a matrix is one of as many as there are groups.

    Args:
        cut: the product of one group.
        q: the matrices, or their shapes.
    """
    beside = jax.eval_shape(functools.partial(beside_codes, cut.form), q)
    of_rows = functools.partial(_visited, count=0)
    alone = [cut.beside(name, array.dtype) for name, array in beside.items()]
    counts = [len(q.codes), *(len(array) for array in beside.values())]
    stacked = [_visited(block, count=n) for block, n in zip([cut.codes(), *alone], counts, strict=True)]
    return [of_rows(cut.activations()), *stacked, of_rows(cut.result())]


def _visited(block: Block, *, count: int) -> Block:
    """A block of one product as that of a visit: of one of `count` matrices, or, where `count` is 0, of the rows."""

    def index(j: Any, visit: Any, k: Any, groups: Any, blocks: Any, *_: Any) -> tuple[Any, ...]:
        own = block.index(blocks[visit], j, k)
        return (groups[visit] if count > 1 else 0, *own) if count else own

    first = (count,) if count else ()
    return Block(block.name, (*first, *block.shape), block.dtype, (*(1 for _ in first), *block.block), index)


def _call(
    cut: Cut,
    config: Config,
    blocks: list[Block],
    count: Any,
    names: tuple[str, ...],
    interpret: bool,
    varying: ManualAxisType,
) -> Any:
    """The kernel as a function of the visits' groups, blocks and bounds, and of all arrays."""
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
    cut: Cut, config: Config, names: tuple[str, ...], groups: Any, blocks: Any, bounds: Any, x: Any, codes: Any, *refs: Any
) -> None:
    """One step of a visit; the last one writes the rows of its group, and leaves those of others as they are."""
    beside, (y, *scratch) = refs[: len(names)], refs[len(names) :]
    visit = pl.program_id(1)
    first, end = bounds[groups[visit]], bounds[groups[visit] + 1]

    def finish(sums: jax.Array) -> None:
        row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1) + blocks[visit] * cut.m
        y[...] = jnp.where((row >= first) & (row < end), sums.astype(y.dtype), y[...])

    summed(cut, config, names, x, codes, beside, tuple(scratch), finish)

"""The body of every TPU matmul kernel: one grid step.

A product is split in three: how the arrays are cut into blocks, how a block of packed codes becomes operands of the matrix unit,
and where sums are scaled. `AbstractProduct` has these; `gemm.py` implements them for float activations, `int8_gemm.py` for two
quantized operands. The rest is here, for both, and in `ragged.py` the grid of ragged_dot.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ....array.qarray import QArray
from .blocks import Block

Arrays = dict[str, jax.Array]
Refs = dict[str, jax.Ref]


@dataclasses.dataclass(frozen=True)
class Part:
    """One product of a grid step.

    Attributes:
        x: its rows, `[M, C]`.
        weight: `[C, N]` or `[N, C]`.
        axis: the axis C of `weight`.
        at: the matrix of the accumulator that it is added to.
        scaled: applied to the product before it is added.
    """

    x: jax.Array
    weight: jax.Array
    axis: int
    at: int | EllipsisType
    scaled: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class AbstractProduct(abc.ABC):
    """A product of `[B, M, K]` with a packed stack of matrices. Its grid is (blocks of rows of x, of N, of K)."""

    name: ClassVar[str]
    """Of the kernel."""

    vmem_limit_bytes: ClassVar[int | None] = None
    """Of VMEM; None: the compiler's default."""

    @property
    @abc.abstractmethod
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows of x, of N, and of K."""

    @property
    @abc.abstractmethod
    def sums(self) -> np.dtype:
        """The dtype of the accumulator."""

    @property
    def precision(self) -> jax.lax.Precision | None:
        """Of products of float32."""
        return None

    @property
    def scratch(self) -> Sequence[Any]:
        """VMEM besides the accumulator."""
        return ()

    @abc.abstractmethod
    def arrays(self, x: Any, q: QArray) -> Arrays:
        """The kernel's inputs by name; their first axis is the stack's, or of length one."""

    @abc.abstractmethod
    def blocks(self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[Block]:
        """The blocks of the inputs and of the result."""

    @abc.abstractmethod
    def scales(self, inputs: Refs) -> Arrays:
        """Scales and zero points of a step, decoded."""

    @abc.abstractmethod
    def parts(self, inputs: Refs, scales: Arrays, scratch: Sequence[jax.Ref], step: jax.Array) -> Iterator[Part]:
        """The products of a step; `step` is that along K."""

    @abc.abstractmethod
    def finished(self, sums: jax.Array, scales: Arrays) -> jax.Array:
        """The accumulator after the last step, with the scales that remain."""

    @abc.abstractmethod
    def joined(self, y: jax.Array) -> jax.Array:
        """The kernel's result as `[B, M, N]`."""


def accumulate(
    product: AbstractProduct, names: tuple[str, ...], finish: Callable[[jax.Ref, jax.Array], None], *refs: jax.Ref
) -> None:
    """One grid step; every TPU matmul kernel is this function.

    Args:
        product: its blocks, operands and scales.
        names: of the inputs.
        finish: called with the result's block and the sums in the last step along K.
        refs: the blocks of the inputs and of the result, the accumulator, and the product's scratch.
    """
    y, total, *scratch = refs[len(names) :]
    inputs, step = dict(zip(names, refs[: len(names)], strict=True)), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    scales = product.scales(inputs)
    for part in product.parts(inputs, scales, scratch, step):
        total[part.at] += part.scaled(matmul(part.x, part.weight, part.axis, product.precision))

    @pl.when(step == product.grid[2] - 1)
    def _() -> None:
        finish(y, product.finished(total[...], scales))


def matmul(x: jax.Array, weight: jax.Array, axis: int, precision: jax.lax.Precision | None = None) -> jax.Array:
    """`[M, C]` times `[C, N]` (`axis` 0) or `[N, C]` (1), with int32 sums of int8, else float32 sums."""
    dtype = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(x, weight, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=dtype)


def stacked(product: AbstractProduct, x: Any, q: QArray, *, interpret: bool) -> jax.Array:
    """The product of two stacks, `[B, M, N]`."""
    arrays = product.arrays(x, q)
    *read, out = product.blocks(arrays)

    def finish(y: jax.Ref, sums: jax.Array) -> None:
        y[...] = sums.astype(y.dtype)

    call = pl.pallas_call(
        functools.partial(accumulate, product, tuple(arrays), finish),
        grid=product.grid,
        in_specs=[pl.BlockSpec(block.block, block.index) for block in read],
        out_specs=pl.BlockSpec(out.block, out.index),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying_axes(x, q)),
        scratch_shapes=[pltpu.VMEM(out.block, product.sums), *product.scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=product.vmem_limit_bytes
        ),
        interpret=interpret,
        name=product.name,
    )
    return product.joined(_over_stack(call, list(arrays.values()), len(arrays["x"])))


def blocks_of(product: AbstractProduct, x: Any, q: QArray) -> list[Block]:
    """The blocks of every input and the result; operands may be shapes."""
    return product.blocks(jax.eval_shape(product.arrays, x, q))


def nibbles(packed: jax.Array, *, is_signed: bool) -> jax.Array:
    """Both 4-bit integers of each byte, `[2 rows, columns]` int4; unsigned ones minus 8."""
    if not is_signed:
        packed = packed ^ jnp.uint8(0x88)
    return pltpu.bitcast(packed, jnp.int4)


def varying_axes(*operands: jax.Array | QArray) -> ManualAxisType:
    """The mesh axes along which the operands vary within `jax.shard_map`."""
    types = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands))
    return ManualAxisType(varying=frozenset().union(*(axes.varying for axes in types)))


def _over_stack(call: Callable[..., jax.Array], arrays: Sequence[jax.Array], batch: int) -> jax.Array:
    """Maps a kernel over the first axis; arrays of length one are shared."""
    if batch == 1:
        return call(*(array[0] for array in arrays))[None]
    mapped = [None if len(array) == 1 else 0 for array in arrays]
    shared = (array[0] if axis is None else array for array, axis in zip(arrays, mapped, strict=True))
    return jax.vmap(call, mapped)(*shared)

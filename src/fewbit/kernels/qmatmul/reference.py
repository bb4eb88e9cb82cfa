"""Reference matmul in plain JAX, for any problem.

- One operand quantized: it is dequantized to its dtype and multiplied by `lax.dot_general`, so precision and result dtype are
  those of float arrays.
- Both quantized, with scales and integer zero points constant along the contraction: the codes are multiplied (`codes.py`) and
  the result is scaled, as hardware does it.
- The same with scales in blocks of at least `LEAST_TILE` along one contracted axis: the code products of each block are scaled
  and accumulated in float32. No float array of an operand's size is made. On several devices each has its own accumulator where
  these are smaller than the operands, so that a sharded contraction moves no operand.
- Any other two quantized operands, and the last case with both an `out_sharding` and zero points: both are dequantized to float32.
- A ragged product: `lax.ragged_dot_general` with dequantized matrices. Of two quantized operands with scales constant along the
  contraction, that of the codes.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jax.sharding import AxisType
from jax.typing import DTypeLike

from ...array.qarray import QArray
from ...array.quantize import dequantize
from ..backend import AbstractBackend
from .code_product import CodeOperand, CodeProduct, code_product, refuse_accumulator, scaled_sums, side, sum_types
from .problem import Problem

LEAST_TILE = 128
"""The smallest block size along the contraction for block-wise code products; below, dequantizing is faster."""


@dataclasses.dataclass(frozen=True)
class Reference(AbstractBackend[Problem]):
    """Plain JAX."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def about(self) -> str:
        return "plain JAX, which writes the decoded weight to memory before it multiplies"

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        if problem.is_ragged:
            return _ragged_product(problem, *operands)
        return _product(problem, *operands)


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _product(problem: Problem, lhs: QArray | jax.Array, rhs: QArray | jax.Array) -> jax.Array:
    """The product of two operands, compiled as one program."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        refuse_accumulator(problem.accumulator)
        return _decoded_product(problem, lhs, rhs)
    # An out_sharding applies to the full result, not to scanned blocks or the length-one terms of zero points.
    is_free = problem.out_sharding is None
    has_zeros = lhs.zero_point is not None or rhs.zero_point is not None
    result = None
    if is_free or not has_zeros:
        result = code_product(_code_product(problem), lhs, rhs, problem.accumulator)
    if result is None and is_free:
        result = _tiled_product(problem, lhs, rhs)
    if result is None:
        refuse_accumulator(problem.accumulator)
        result = _dot(problem, dequantize(lhs, jnp.float32), dequantize(rhs, jnp.float32), preferred=jnp.float32)
    return result.astype(problem.result_dtype)


def decodes_both(problem: Problem) -> bool:
    """Whether two quantized operands are dequantized.

    They are dequantized where their scales vary within `LEAST_TILE` of the contraction.
    """
    if problem.out_sharding is not None or problem.accumulator not in (None, "float32"):
        return False
    for operand, contracted in zip((problem.lhs, problem.rhs), problem.dimension_numbers[0], strict=True):
        if operand.scheme is None or operand.scheme.zero_point is not None:
            return False
        tiles = operand.scheme.tiles(len(operand.shape))
        if any((tile := tiles[axis]) is not None and tile < min(LEAST_TILE, operand.shape[axis]) for axis in contracted):
            return True
    return False


def _decoded_product(problem: Problem, lhs: QArray | jax.Array, rhs: QArray | jax.Array) -> jax.Array:
    """The product of dequantized operands; the backward pass dequantizes again."""

    @jax.checkpoint
    def product(lhs: QArray | jax.Array, rhs: QArray | jax.Array) -> jax.Array:
        decoded = [dequantize(x) if isinstance(x, QArray) else x for x in (lhs, rhs)]
        return _dot(problem, *decoded, preferred=problem.preferred_element_type)

    return product(lhs, rhs)


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _ragged_product(problem: Problem, x: jax.Array | QArray, q: QArray, sizes: jax.Array) -> jax.Array:
    """`lax.ragged_dot_general` with dequantized matrices; the backward pass dequantizes again."""
    contracted = (problem.dimension_numbers[0], ((), ()))
    numbers = RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))

    def product(x: jax.Array, w: jax.Array, preferred: DTypeLike | None) -> jax.Array:
        settings = {"precision": problem.precision, "preferred_element_type": preferred}
        return jax.lax.ragged_dot_general(x, w, sizes, numbers, **settings)

    if not isinstance(x, QArray):
        refuse_accumulator(problem.accumulator)
        return jax.checkpoint(lambda x, q: product(x, dequantize(q), problem.preferred_element_type))(x, q)
    at = problem.dimension_numbers[0][1][0]

    def placed(scale: jax.Array, is_left: bool) -> jax.Array | None:
        if scale.shape[1 if is_left else at] != 1:
            return None
        return scale if is_left else scale_of_rows(scale.squeeze(at), sizes, problem.lhs.shape[0])

    described = CodeProduct(product, placed, problem.dimension_numbers[0], ((), (3 - at,)))
    result = code_product(described, x, q, problem.accumulator)
    if result is None:
        refuse_accumulator(problem.accumulator)
        result = product(dequantize(x, jnp.float32), dequantize(q, jnp.float32), jnp.float32)
    return result.astype(problem.result_dtype)


def scale_of_rows(scale: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """Gathers each row's scales from those of its group.

    The groups have `[G or 1, N or 1]`. Rows beyond all groups get the last group's.
    """
    if scale.shape[0] == 1:
        return scale
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")
    return scale.at[group].get(mode="clip")


def _code_product(problem: Problem) -> CodeProduct:
    """The product, described for code multiplication."""
    contracted, batch = problem.dimension_numbers
    ndims = len(problem.lhs.shape), len(problem.rhs.shape)
    free = [tuple(a for a in range(n) if a not in (*c, *b)) for n, c, b in zip(ndims, contracted, batch, strict=True)]
    return CodeProduct(
        product=lambda a, b, dtype: _dot(problem, a, b, preferred=dtype),
        placed=functools.partial(_scale_of_result, problem),
        contracted=contracted,
        thin=(free[0], free[1]),
    )


def _is_constant(q: QArray, axis: int) -> bool:
    """True if an axis has one scale."""
    return q.tiles[axis] is None or q.scale.shape[axis] == 1


def _tiled_product(problem: Problem, lhs: QArray, rhs: QArray) -> jax.Array | None:
    """The sum over blocks of scaled code products; None where dequantizing is faster."""
    tiled, described = _tiled_axis(problem, lhs, rhs), _code_product(problem)
    if tiled is None or (types := sum_types(lhs, rhs, described, problem.accumulator)) is None:
        return None
    axes, tile = tiled
    if (lhs.zero_point is not None or rhs.zero_point is not None) and lhs.shape[axes[0]] % tile:
        return None  # the padding of the last block would count as its zero point
    dtypes, accumulator = types
    left, right = (_cut_side(side(q, t, but=axis), axis, tile) for q, t, axis in zip((lhs, rhs), dtypes, axes, strict=True))

    def sums(block: tuple[CodeOperand, CodeOperand]) -> jax.Array:
        return scaled_sums(described, *block, accumulator)

    blocks, runs = (left, right), math.gcd(left.values.shape[0], _partitions())
    like = jax.eval_shape(lambda: sums(jax.tree.map(lambda x: x[0], blocks)))
    # A scan over a sharded axis would gather the operands: each step takes a block of every device's run of blocks. Not where
    # the accumulators of the runs take more memory than the operands, for XLA may as well have sharded other axes.
    is_in_runs = runs > 1 and runs * like.size <= math.prod(lhs.shape) + math.prod(rhs.shape)
    if is_in_runs:
        sums = jax.vmap(sums)
        blocks = jax.tree.map(lambda x: x.reshape(runs, -1, *x.shape[1:]).swapaxes(0, 1), blocks)
        like = jax.ShapeDtypeStruct((runs, *like.shape), like.dtype)
    total = jnp.zeros(like.shape, jnp.float32, out_sharding=like.sharding)  # None without an explicit mesh
    total = jax.lax.scan(lambda total, block: (total + sums(block), None), total, blocks)[0]
    return jnp.sum(total, axis=0) if is_in_runs else total


def _partitions() -> int:
    """Over how many devices XLA may partition a contraction. 1 on a mesh without auto axes, as inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and AxisType.Auto not in mesh.axis_types:
        return 1
    return jax.device_count()


def _tiled_axis(problem: Problem, lhs: QArray, rhs: QArray) -> tuple[tuple[int, int], int] | None:
    """The one contracted pair of axes with several scales, and its tile."""
    pairs = [p for p in zip(*problem.dimension_numbers[0], strict=True) if not all(map(_is_constant, (lhs, rhs), p))]
    if len(pairs) != 1:
        return None
    left, right = pairs[0]
    lengths = {q.tiles[a] for q, a in ((lhs, left), (rhs, right)) if not _is_constant(q, a)}
    tile = next(iter(lengths))
    if len(lengths) > 1 or tile is None or tile < LEAST_TILE:
        return None
    return (left, right), tile


def _cut_side(operand: CodeOperand, axis: int, tile: int) -> CodeOperand:
    """An operand split into blocks along an axis, which become the first axis.

    A short last block is padded with zeros, which add nothing to the sum.
    """
    values, pads = operand.values, [(0, 0)] * operand.values.ndim
    pads[axis] = (0, -values.shape[axis] % tile)
    values = jnp.pad(values, pads)
    shape = values.shape
    count = shape[axis] // tile
    values = jnp.moveaxis(
        values.reshape(*shape[:axis], count, tile, *shape[axis + 1 :]), axis, 0
    )  # [blocks, ..., tile, ...]

    def by_block(scale: jax.Array) -> jax.Array:
        wide = jnp.broadcast_to(scale, (*scale.shape[:axis], count, *scale.shape[axis + 1 :]))
        return jnp.expand_dims(jnp.moveaxis(wide, axis, 0), axis + 1)  # [blocks, ..., 1, ...]

    zero = operand.zero
    if zero is not None:
        zero = by_block(zero)
    return CodeOperand(values, by_block(operand.scale), zero)


def _scale_of_result(problem: Problem, values: jax.Array, is_left: bool) -> jax.Array | None:
    """Shapes one operand's scales to broadcast to the result.

    Its axes are batch, left free and right free axes. None where scales vary along the contraction.
    """
    at = int(not is_left)
    contracted, batch = (axes[at] for axes in problem.dimension_numbers)
    if any(values.shape[a] != 1 for a in contracted):
        return None
    free = [a for a in range(values.ndim) if a not in contracted and a not in batch]
    scale = values.transpose(*batch, *free, *contracted).reshape([values.shape[a] for a in (*batch, *free)])
    other = (problem.lhs, problem.rhs)[1 - at]
    other_free = len(other.shape) - len(contracted) - len(batch)
    first = (scale.ndim, len(batch))[at]
    return jnp.expand_dims(scale, tuple(range(first, first + other_free)))


def _dot(problem: Problem, lhs: jax.Array, rhs: jax.Array, *, preferred: DTypeLike | None) -> jax.Array:
    return jax.lax.dot_general(
        lhs,
        rhs,
        problem.dimension_numbers,
        precision=problem.precision,
        preferred_element_type=preferred,
        out_sharding=problem.out_sharding,
    )

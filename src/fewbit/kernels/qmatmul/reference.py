"""The product in plain JAX: the reference of every backend, and what runs where there is no other.

- One side quantized: it is decoded to its dtype, and the product is JAX's own, so precision and result are those of the
  arrays it stands for.
- Both sides quantized, with scales and whole zero points that do not vary along the contracted axes: the codes are multiplied
  (`codes.py` says in which types, and what zero points add) and the result is scaled, as hardware does it.
- The same, with scales that vary along one contracted axis in tiles of at least `LEAST_TILE`: tile by tile, the products of
  the codes scaled and added up in float32. No floating array of an operand's size is made.
- Both sides quantized otherwise, and with an `out_sharding` in the last case and with zero points: both are decoded to float32.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._registry import Registry
from ...array import QArray, dequantize
from ..select import AbstractBackend
from .codes import Meeting, Side, code_product, refuse_accumulator, scaled_sums, side, sum_types
from .problem import Problem

BACKENDS: Registry[AbstractBackend[Problem]] = Registry("qmatmul")
"""The backends of the general product; the last that can compute a problem is taken, the reference when no other can."""

LEAST_TILE = 128
"""The shortest tile along the contraction that pays for a product of its own; below, decoding is faster."""


@dataclasses.dataclass(frozen=True)
class Reference(AbstractBackend[Problem]):
    """Plain JAX, on any device, for any problem."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def about(self) -> str:
        return "plain JAX, which writes the decoded weight to memory before it multiplies"

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        return _product(problem, *operands)


BACKENDS.add("reference", Reference())


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _product(problem: Problem, lhs: Any, rhs: Any) -> jax.Array:
    """The product of two operands, as one program."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        refuse_accumulator(problem.accumulator)
        return _decoded_product(problem, lhs, rhs)
    # An out_sharding is that of the whole result: neither tiles one after the other nor thin terms of zero points have it.
    is_free = problem.out_sharding is None
    has_zeros = lhs.zero_point is not None or rhs.zero_point is not None
    result = code_product(_meeting(problem), lhs, rhs, problem.accumulator) if is_free or not has_zeros else None
    if result is None and is_free:
        result = _tiled_product(problem, lhs, rhs)
    if result is None:
        refuse_accumulator(problem.accumulator)
        result = _dot(problem, dequantize(lhs, jnp.float32), dequantize(rhs, jnp.float32), preferred=jnp.float32)
    return result.astype(problem.result_dtype)


def _decoded_product(problem: Problem, lhs: Any, rhs: Any) -> jax.Array:
    """JAX's product of the decoded operands; what is decoded is not kept for the gradient, but decoded again there."""

    @jax.checkpoint
    def product(lhs: Any, rhs: Any) -> jax.Array:
        decoded = [dequantize(x) if isinstance(x, QArray) else x for x in (lhs, rhs)]
        return _dot(problem, *decoded, preferred=problem.preferred_element_type)

    return product(lhs, rhs)


def _meeting(problem: Problem) -> Meeting:
    """The product as codes meet in it."""
    contracted, batch = problem.dimension_numbers
    ndims = len(problem.lhs.shape), len(problem.rhs.shape)
    free = [tuple(a for a in range(n) if a not in (*c, *b)) for n, c, b in zip(ndims, contracted, batch, strict=True)]
    return Meeting(
        product=lambda a, b, dtype: _dot(problem, a, b, preferred=dtype),
        placed=functools.partial(_beside_result, problem),
        contracted=contracted,
        thin=(free[0], free[1]),
    )


def _is_constant(q: QArray, axis: int) -> bool:
    """Whether one scale serves the whole of an axis."""
    return q.tiles[axis] is None or q.scale.shape[axis] == 1


def _tiled_product(problem: Problem, lhs: QArray, rhs: QArray) -> jax.Array | None:
    """The sum over tiles of the products of codes, each times its scales; None where it does not pay."""
    tiled, meeting = _tiled_axis(problem, lhs, rhs), _meeting(problem)
    types = None if tiled is None else sum_types(lhs, rhs, meeting, problem.accumulator)
    if tiled is None or types is None:
        return None
    axes, tile = tiled
    if (lhs.zero_point is not None or rhs.zero_point is not None) and lhs.shape[axes[0]] % tile:
        return None  # what fills the last tile would count as its zero point
    dtypes, accumulator = types
    left, right = (_cut_side(side(q, t, but=axis), axis, tile) for q, t, axis in zip((lhs, rhs), dtypes, axes, strict=True))

    def add(total: jax.Array, turn: tuple[Side, Side]) -> tuple[jax.Array, None]:
        return total + scaled_sums(meeting, turn[0], turn[1], accumulator), None

    first = jax.tree.map(lambda x: x[0], (left, right))
    shape = jax.eval_shape(lambda: scaled_sums(meeting, first[0], first[1], accumulator)).shape
    return jax.lax.scan(add, jnp.zeros(shape, jnp.float32), (left, right))[0]


def _tiled_axis(problem: Problem, lhs: QArray, rhs: QArray) -> tuple[tuple[int, int], int] | None:
    """The one pair of contracted axes along which scales vary, and the tile that both sides have there; None if not so."""
    pairs = [p for p in zip(*problem.dimension_numbers[0], strict=True) if not all(map(_is_constant, (lhs, rhs), p))]
    if len(pairs) != 1:
        return None
    left, right = pairs[0]
    lengths = {q.tiles[a] for q, a in ((lhs, left), (rhs, right)) if not _is_constant(q, a)}
    tile = next(iter(lengths))
    return ((left, right), tile) if len(lengths) == 1 and tile is not None and tile >= LEAST_TILE else None


def _cut_side(whole: Side, axis: int, tile: int) -> Side:
    """An operand cut into the tiles of an axis, which come first; its scales are one a tile of that axis.

    A short last tile is filled with zeros, which add nothing.
    """
    values, spare = whole.values, -whole.values.shape[axis] % tile
    values = jnp.pad(values, [(0, spare if a == axis else 0) for a in range(values.ndim)])
    shape = values.shape
    count = shape[axis] // tile
    cut = jnp.moveaxis(values.reshape(*shape[:axis], count, tile, *shape[axis + 1 :]), axis, 0)

    def by_tile(beside: jax.Array) -> jax.Array:
        along = jnp.broadcast_to(beside, [count if a == axis else n for a, n in enumerate(beside.shape)])
        return jnp.expand_dims(jnp.moveaxis(along, axis, 0), axis + 1)

    return Side(cut, by_tile(whole.scale), None if whole.zero is None else by_tile(whole.zero))


def _beside_result(problem: Problem, values: jax.Array, is_left: bool) -> jax.Array | None:
    """One operand's scales, shaped to meet the result: batch axes, then the left's free axes, then the right's.

    None where they vary along what is contracted.
    """
    contracted, batch = (axes[0 if is_left else 1] for axes in problem.dimension_numbers)
    if any(values.shape[a] != 1 for a in contracted):
        return None
    free = [a for a in range(values.ndim) if a not in contracted and a not in batch]
    met = values.transpose(*batch, *free, *contracted).reshape([values.shape[a] for a in (*batch, *free)])
    other = problem.rhs if is_left else problem.lhs
    other_free = len(other.shape) - len(contracted) - len(batch)
    first = met.ndim if is_left else len(batch)
    return jnp.expand_dims(met, tuple(range(first, first + other_free)))


def _dot(problem: Problem, lhs: jax.Array, rhs: jax.Array, *, preferred: Any) -> jax.Array:
    return jax.lax.dot_general(
        lhs,
        rhs,
        problem.dimension_numbers,
        precision=problem.precision,
        preferred_element_type=preferred,
        out_sharding=problem.out_sharding,
    )

"""The product in plain JAX: the reference of every backend, and what runs where there is no other.

- One side quantized: it is decoded to its dtype, and the product is JAX's own, so precision and result are those of the
  arrays it stands for.
- Both sides quantized without zero points, with scales that do not vary along the contracted axes: the codes are multiplied
  (`codes.py` says in which types) and the result is scaled, as hardware does it.
- The same, with scales that vary along one contracted axis in tiles of at least `LEAST_TILE`: tile by tile, the products of
  the codes scaled and added up in float32. No floating array of an operand's size is made.
- Both sides quantized otherwise: both are decoded to float32.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._registry import Registry
from ...array import QArray
from ...array.quantize import dequantize, expanded_scale
from ..select import AbstractBackend
from .codes import code_values, common_types
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

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        return _product(problem, *operands)


BACKENDS.add("reference", Reference())


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _product(problem: Problem, lhs: Any, rhs: Any) -> jax.Array:
    """The product of two operands, as one program."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return _decoded_product(problem, lhs, rhs)
    if lhs.scheme.zero_point is None and rhs.scheme.zero_point is None:
        if all(_is_constant(q, a) for q, axes in zip((lhs, rhs), problem.dimension_numbers[0], strict=True) for a in axes):
            return _code_product(problem, lhs, rhs)
        if (tiled := _tiled_axis(problem, lhs, rhs)) is not None:
            return _tiled_product(problem, lhs, rhs, *tiled)
    both = dequantize(lhs, jnp.float32), dequantize(rhs, jnp.float32)
    return _dot(problem, *both, preferred=jnp.float32).astype(problem.result_dtype)


def _decoded_product(problem: Problem, lhs: Any, rhs: Any) -> jax.Array:
    """JAX's product of the decoded operands."""
    decoded = [dequantize(x) if isinstance(x, QArray) else x for x in (lhs, rhs)]
    return _dot(problem, *decoded, preferred=problem.preferred_element_type)


def _is_constant(q: QArray, axis: int) -> bool:
    """Whether one scale serves the whole of an axis."""
    return q.tiles[axis] is None or q.scale.shape[axis] == 1


def _code_product(problem: Problem, lhs: QArray, rhs: QArray) -> jax.Array:
    """The product of the codes' values, times both scales."""
    dtypes, accumulator = common_types(lhs.scheme.format, rhs.scheme.format)
    product = _dot(problem, code_values(lhs, dtypes[0]), code_values(rhs, dtypes[1]), preferred=accumulator)
    left, right = (_result_scale(problem, expanded_scale(q), is_left=q is lhs) for q in (lhs, rhs))
    return (product.astype(jnp.float32) * left * right).astype(problem.result_dtype)


def _tiled_axis(problem: Problem, lhs: QArray, rhs: QArray) -> tuple[int, int, int] | None:
    """The one pair of contracted axes along which scales vary, and the tile that both sides have there; None if not so."""
    pairs = [p for p in zip(*problem.dimension_numbers[0], strict=True) if not all(map(_is_constant, (lhs, rhs), p))]
    if len(pairs) != 1:
        return None
    left, right = pairs[0]
    lengths = {q.tiles[a] for q, a in ((lhs, left), (rhs, right)) if not _is_constant(q, a)}
    tile = next(iter(lengths))
    return (left, right, tile) if len(lengths) == 1 and tile is not None and tile >= LEAST_TILE else None


def _tiled_product(problem: Problem, lhs: QArray, rhs: QArray, left: int, right: int, tile: int) -> jax.Array:
    """The sum over tiles of the products of codes, each times its scales."""
    dtypes, accumulator = common_types(lhs.scheme.format, rhs.scheme.format)
    sides = ((lhs, left, dtypes[0]), (rhs, right, dtypes[1]))
    codes = tuple(_cut(code_values(q, dtype), axis, tile) for q, axis, dtype in sides)
    count = codes[0].shape[0]
    scales = tuple(_tile_scales(q, axis, count) for q, axis, _ in sides)

    def add(total: jax.Array, turn: Any) -> tuple[jax.Array, None]:
        (left_codes, right_codes), factors = turn
        product = _dot(problem, left_codes, right_codes, preferred=accumulator).astype(jnp.float32)
        for factor, is_left in zip(factors, (True, False), strict=True):
            product = product * _result_scale(problem, factor, is_left=is_left)
        return total + product, None

    shape = jax.eval_shape(lambda: _dot(problem, codes[0][0], codes[1][0], preferred=accumulator)).shape
    total, _ = jax.lax.scan(add, jnp.zeros(shape, jnp.float32), (codes, scales))
    return total.astype(problem.result_dtype)


def _cut(values: jax.Array, axis: int, tile: int) -> jax.Array:
    """An axis cut into tiles, which become the first axis; a short last tile is filled with zeros, which add nothing."""
    spare = -values.shape[axis] % tile
    values = jnp.pad(values, [(0, spare if a == axis else 0) for a in range(values.ndim)])
    shape = values.shape
    cut = values.reshape(*shape[:axis], shape[axis] // tile, tile, *shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def _tile_scales(q: QArray, axis: int, count: int) -> jax.Array:
    """The scales by tile of an axis: `count` of them first, and length 1 where the axis was."""
    scale = expanded_scale(q, but=axis)
    along = jnp.broadcast_to(scale, [count if a == axis else n for a, n in enumerate(scale.shape)])
    return jnp.expand_dims(jnp.moveaxis(along, axis, 0), axis + 1)


def _result_scale(problem: Problem, scale: jax.Array, *, is_left: bool) -> jax.Array:
    """One operand's scales, shaped to meet the result: batch axes, then the left's free axes, then the right's."""
    side = 0 if is_left else 1
    contracted, batch = problem.dimension_numbers[0][side], problem.dimension_numbers[1][side]
    free = [a for a in range(scale.ndim) if a not in contracted and a not in batch]
    met = scale.transpose(*batch, *free, *contracted).reshape([scale.shape[a] for a in (*batch, *free)])
    other = problem.rhs if is_left else problem.lhs
    other_free = len(other.shape) - len(contracted) - len(batch)
    first = met.ndim if is_left else len(batch)
    return jnp.expand_dims(met, tuple(range(first, first + other_free)))


def _dot(problem: Problem, lhs: jax.Array, rhs: jax.Array, *, preferred: Any) -> jax.Array:
    return jax.lax.dot_general(
        lhs, rhs, problem.dimension_numbers, precision=problem.precision, preferred_element_type=preferred
    )

"""The product in plain JAX: the reference of every backend, and what runs where there is no other.

- One side quantized: it is decoded to its dtype, and the product is JAX's own, so precision and result are those of the
  arrays it stands for.
- Both sides quantized, with scales that do not vary along the contracted axes and no zero points: the codes are multiplied
  (integers into int32, all other formats into float32) and the result is scaled, as hardware does it.
- Both sides quantized otherwise: both are decoded to float32.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._registry import Registry
from ..._tiles import blocked_scale
from ...array import QArray, dequantize
from ...array.packing import unpack
from ...array.quantize import scale_values
from ...formats import Integer
from ..select import AbstractBackend
from .problem import Problem

BACKENDS: Registry[AbstractBackend[Problem]] = Registry("qmatmul")
"""The backends of the general product; the last that can compute a problem is taken, the reference when no other can."""


@dataclasses.dataclass(frozen=True)
class Reference(AbstractBackend[Problem]):
    """Plain JAX, on any device, for any problem."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: Problem) -> str | None:
        return None

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        lhs, rhs = operands
        if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
            return _decoded_product(problem, lhs, rhs)
        (left, right), _ = problem.dimension_numbers
        if _is_constant_along(lhs, left) and _is_constant_along(rhs, right):
            return _code_product(problem, lhs, rhs)
        both = dequantize(lhs, jnp.float32), dequantize(rhs, jnp.float32)
        product = _dot(problem, *both, preferred=jnp.float32)
        return product.astype(problem.result_dtype)


BACKENDS.add("reference", Reference())


def _decoded_product(problem: Problem, lhs: Any, rhs: Any) -> jax.Array:
    """JAX's product of the decoded operands."""
    decoded = [dequantize(x) if isinstance(x, QArray) else x for x in (lhs, rhs)]
    return _dot(problem, *decoded, preferred=problem.preferred_element_type)


def _is_constant_along(q: QArray, axes: tuple[int, ...]) -> bool:
    """Whether one scale serves all of the contracted axes, and codes of zero mean zero."""
    return q.scheme.zero_point is None and all(q.tiles[a] is None or q.shape[a] == 1 for a in axes)


def _code_product(problem: Problem, lhs: QArray, rhs: QArray) -> jax.Array:
    """The product of the codes' values, times both scales."""
    are_integers = all(isinstance(q.scheme.format, Integer) and q.scheme.format.step == 1 for q in (lhs, rhs))
    # int8 holds every signed code; unsigned ones of 8 bits do not fit, and go through float32, where the sums are exact
    # up to 2**24.
    fits = are_integers and all(q.scheme.format.max < 128 for q in (lhs, rhs))
    dtype, accumulator = (jnp.int8, jnp.int32) if fits else (jnp.float32, jnp.float32)
    product = _dot(problem, _code_values(lhs, dtype), _code_values(rhs, dtype), preferred=accumulator)
    left, right = _result_scale(problem, lhs, is_left=True), _result_scale(problem, rhs, is_left=False)
    return (product.astype(jnp.float32) * left * right).astype(problem.result_dtype)


def _code_values(q: QArray, dtype: Any) -> jax.Array:
    """The numbers that the codes stand for, without scales."""
    fmt, axis = q.scheme.format, q.scheme.pack_axis
    codes = unpack(q.codes, fmt.bits, q.shape[axis], q.scheme.packing, axis=axis)
    return fmt.decode(codes).astype(dtype)


def _result_scale(problem: Problem, q: QArray, *, is_left: bool) -> jax.Array:
    """One operand's scales, shaped to meet the result: batch axes, then the left's free axes, then the right's."""
    side = 0 if is_left else 1
    contracted, batch = problem.dimension_numbers[0][side], problem.dimension_numbers[1][side]
    free = [a for a in range(q.ndim) if a not in contracted and a not in batch]
    full = tuple(1 if a in contracted else n for a, n in enumerate(q.shape))
    scale = _expanded(scale_values(q), q, full).transpose(*batch, *free, *contracted)
    scale = scale.reshape([q.shape[a] for a in (*batch, *free)])
    other = problem.rhs if is_left else problem.lhs
    other_free = len(other.shape) - len(contracted) - len(batch)
    place = (
        tuple(range(scale.ndim, scale.ndim + other_free)) if is_left else tuple(range(len(batch), len(batch) + other_free))
    )
    return jnp.expand_dims(scale, place)


def _expanded(scale: jax.Array, q: QArray, shape: tuple[int, ...]) -> jax.Array:
    """The scale of each element: every tile's value repeated over its elements."""
    tiles = q.tiles
    wide = [n if n == 1 or t is None or t == 1 else -(-n // t) * t for n, t in zip(shape, tiles, strict=True)]
    blocks: list[int] = []
    for n, t in zip(wide, tiles, strict=True):
        blocks += [n] if t is None or t == 1 else [n // t, t]
    full = jnp.broadcast_to(blocked_scale(scale, tiles), blocks).reshape(wide)
    return full[tuple(slice(n) for n in shape)]


def _dot(problem: Problem, lhs: jax.Array, rhs: jax.Array, *, preferred: Any) -> jax.Array:
    return jax.lax.dot_general(
        lhs, rhs, problem.dimension_numbers, precision=problem.precision, preferred_element_type=preferred
    )

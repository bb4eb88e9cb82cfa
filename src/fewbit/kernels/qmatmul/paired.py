"""The product of two quantized stacks by their codes, integers or 8-bit floats: one primitive of JAX, a kernel on each platform.

It stands beside that of `stacked.py`, for both operands are codes here, and the product is linear in none of them. What JAX
differentiates, the scales, the reference differentiates.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray, Scheme
from ...errors import QuantError
from ...formats import FORMATS
from .codes import fits_int32, is_whole, native_float, side
from .primitive import kernel_primitive
from .problem import Operand, Problem, refused_precision
from .reference import BACKENDS, Reference
from .stack import Stack, stack_of

Axes = tuple[int, ...]

LEAST_TILE = 8
"""The shortest tile along the contraction that pays for sums of integers."""


def pair_refusal(problem: Problem, *, floats: bool = False) -> str | None:
    """Why a product of two quantized operands is none of stacks of codes with scales per row, column or tile; None if it is.

    Args:
        problem: the product.
        floats: whether two operands of one 8-bit float format are taken, too, and not integers alone.
    """
    sides = [operand for operand in (problem.lhs, problem.rhs) if operand.scheme is not None]
    assert len(sides) == 2
    are_floats = floats and all(_is_float(operand) for operand in sides)
    for operand in () if are_floats else sides:
        assert operand.scheme is not None
        if not is_whole(operand.scheme):
            return f"{operand} has no codes that are integers of at most 8 bits with whole zero points"
    if are_floats and len({operand.scheme.format for operand in sides if operand.scheme is not None}) > 1:
        return f"{sides[0]} and {sides[1]} are floats of two formats; it multiplies those of one"
    kind = "float32" if are_floats else "int32"
    if problem.accumulator not in (None, kind):
        return f"it sums in {kind}, and {problem.accumulator} is asked for"
    if problem.out_sharding is not None:
        return "out_sharding is for XLA's own products"
    if reason := refused_precision(problem.precision):
        return reason
    try:
        at, stack = weight_stack(problem)
        _tile(problem, at, stack)
    except QuantError as refusal:
        return str(refusal)
    return None


def _is_float(operand: Operand) -> bool:
    """Whether an operand has codes that JAX has a floating dtype for, and nothing is subtracted from them."""
    scheme = operand.scheme
    return scheme is not None and scheme.zero_point is None and native_float(scheme.format) is not None


def paired_product(problem: Problem, lhs: QArray, rhs: QArray, kernels: tuple[Any, ...], *, is_named: bool) -> jax.Array:
    """The product of two operands that `pair_refusal` does not refuse.

    Args:
        problem: what is to be computed.
        lhs: the left operand.
        rhs: the right operand.
        kernels: the kernels that may compute it, one a platform; elsewhere the reference does.
        is_named: whether the caller insists on them.
    """
    at, stack = weight_stack(problem)
    x, q = (lhs, rhs)[1 - at], (lhs, rhs)[at]
    own, met = problem.dimension_numbers[0][at], problem.dimension_numbers[0][1 - at]
    contracted = tuple(met[own.index(axis)] for axis in stack.contracted)
    batch = problem.dimension_numbers[1][1 - at]
    free = tuple(a for a in range(x.ndim) if a not in contracted and a not in batch)
    groups = batch, free, contracted
    axis = next(iter(contracted)) if len(contracted) == 1 else None
    tile = None if axis is None or x.scale.shape[axis] == 1 else x.tiles[axis]
    is_float = native_float(x.scheme.format) is not None
    numbers = side(x, native_float(x.scheme.format) if is_float else jnp.int8, but=axis)
    zero = None if numbers.zero is None else _folded(numbers.zero, x.shape, groups, tile)
    codes = jax.lax.bitcast_convert_type(_moved(numbers.values, groups), jnp.uint8)
    fmt = x.scheme.format if is_float else FORMATS["int8"]
    x3 = _bytes_of(fmt, codes, _folded(numbers.scale, x.shape, groups, tile), zero, tile)
    y = _bind(
        x3,
        stack.of(q),
        contracts_cols=stack.contracts_cols,
        dtype=np.dtype(problem.result_dtype),
        kernels=kernels,
        is_named=is_named,
    )
    lengths = [[x.shape[a] for a in group] for group in groups]
    own_free = [q.shape[a] for a in (stack.rows if stack.contracts_cols else stack.cols)]
    if at == 0:
        return jnp.swapaxes(y, 1, 2).reshape(*lengths[0], *own_free, *lengths[1])
    return y.reshape(*lengths[0], *lengths[1], *own_free)


def weight_stack(problem: Problem) -> tuple[int, Stack]:
    """The operand that is read as a stack, where it lies: the right one, or the left one where that cannot be.

    Raises:
        QuantError: where neither can.
    """
    refusals = []
    for at in (1, 0):
        operand = (problem.lhs, problem.rhs)[at]
        try:
            return at, stack_of(operand, problem.dimension_numbers[0][at], problem.dimension_numbers[1][at])
        except QuantError as refusal:
            refusals.append(f"{operand} is no stack of matrices: {refusal}")
    raise QuantError("; ".join(refusals))


def _tile(problem: Problem, at: int, stack: Stack) -> int:
    """How many codes along the contraction share scales on both sides.

    Raises:
        QuantError: where those of the two sides do not meet, or are too few.
    """
    x = (problem.lhs, problem.rhs)[1 - at]
    assert x.scheme is not None
    met, tiles = problem.dimension_numbers[0][1 - at], x.scheme.tiles(len(x.shape))
    own = stack.merged[1 if stack.contracts_cols else 0]
    cut = [tile for a in met if (tile := tiles[a]) is not None and tile < x.shape[a]]
    if cut and len(met) > 1:
        raise QuantError(f"the scales of {x} vary along one of several contracted axes")
    if cut and own.tile is not None and own.tile != cut[0]:
        raise QuantError(f"scales are one for {cut[0]} and for {own.tile} contracted codes; equal tiles are expected")
    tile = own.tile or (cut[0] if cut else own.length)
    if tile < min(LEAST_TILE, own.length):
        raise QuantError(f"only {tile} contracted codes share a scale; at least {LEAST_TILE} are expected")
    assert problem.lhs.scheme is not None
    assert problem.rhs.scheme is not None
    if is_whole(x.scheme) and not fits_int32(problem.lhs.scheme, problem.rhs.scheme, tile):
        raise QuantError(f"sums of {tile} products of its codes may not fit in int32")
    return tile


def _bytes_of(fmt: Any, codes: jax.Array, scale: jax.Array, zero: jax.Array | None, tile: int | None) -> QArray:
    """A stack of bytes as a QArray.

    Args:
        fmt: the format of the bytes.
        codes: `[B, M, K]`, uint8.
        scale: float32, `[B or 1, M or 1, tiles]`.
        zero: the zero points, whole numbers that fit in int8, likewise; None: none.
        tile: how many numbers along K share a scale; None: all.
    """
    int8 = FORMATS["int8"]
    free = tuple(None if n == 1 else 1 for n in scale.shape[:2])
    plain = Scheme(fmt).with_tiles((*free, tile), -1)
    scheme = dataclasses.replace(plain, zero_point=None if zero is None else int8)
    held = None if zero is None else jax.lax.bitcast_convert_type(zero.astype(jnp.int8), jnp.uint8)
    return QArray(codes, scale, held, None, scheme, np.dtype(np.float32))


def _moved(a: jax.Array, groups: tuple[Axes, ...]) -> jax.Array:
    """An array with the axes of each group as one."""
    return a.transpose([axis for group in groups for axis in group]).reshape(
        [int(np.prod([a.shape[axis] for axis in group])) for group in groups]
    )


def _folded(a: jax.Array, shape: tuple[int, ...], groups: tuple[Axes, ...], tile: int | None) -> jax.Array:
    """What one operand has for each tile, the axes of each group as one: 1 long, or as long as the operand is there."""
    wide = list(a.shape)
    for group in groups if tile is None else groups[:2]:
        if any(a.shape[axis] != 1 for axis in group):
            for axis in group:
                wide[axis] = shape[axis]
    return _moved(jnp.broadcast_to(a, wide), groups)


def _bind(x: QArray, q: QArray, **settings: Any) -> jax.Array:
    leaves, form = jax.tree.flatten((x, q))
    return primitive.bind(*leaves, form=form, **settings)


# --- the primitive ---


def _by_reference(x: QArray, q: QArray, *, contracts_cols: bool, dtype: Any) -> jax.Array:
    numbers = (((2,), (2 if contracts_cols else 1,)), ((0,), (0,)))
    return Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, None, dtype), x, q)


def _by_kernel(kernel: Any, *operands: QArray, **settings: Any) -> jax.Array:
    return kernel.paired(*operands, **settings)


def _shape(x: QArray, q: QArray, *, contracts_cols: bool) -> tuple[int, ...]:
    return x.shape[0], x.shape[1], q.shape[1] if contracts_cols else q.shape[2]


def _mapped(leaves: Any, axes: Any, *, form: Any, **settings: Any) -> tuple[jax.Array, int]:
    """A mapped x alone has more rows; else both stacks are longer."""
    count = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    first = [a[None] if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(leaves, axes, strict=True)]
    x, q = jax.tree.unflatten(form, first)
    batch, rows = x.codes.shape[1:3]
    has_mapped_weight = any(axis is not None for axis in axes[-len(jax.tree.leaves(q)) :])

    def longer(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    def taller(a: jax.Array) -> jax.Array:
        a = jnp.broadcast_to(a, (count, a.shape[1], rows, a.shape[3])).swapaxes(0, 1)
        return a.reshape(a.shape[0], count * rows, a.shape[3])

    fold = longer if has_mapped_weight else taller
    zero = None if x.zero_point is None else fold(jax.lax.bitcast_convert_type(x.zero_point, jnp.int8))
    held = _bytes_of(x.scheme.format, fold(x.codes), fold(x.scale), zero, x.scheme.tiles(3)[2])
    if has_mapped_weight:
        y = _bind(held, jax.tree.map(longer, q), **settings)
        return y.reshape(count, batch, *y.shape[1:]), 0
    y = _bind(held, jax.tree.map(lambda a: a[0], q), **settings)
    return y.reshape(batch, count, rows, y.shape[2]), 1


primitive = kernel_primitive(
    "fewbit_paired_qmatmul",
    kind=BACKENDS.kind,
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    shape=_shape,
    mapped=_mapped,
    is_linear=False,
)

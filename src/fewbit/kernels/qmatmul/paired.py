"""The JAX primitive that multiplies two quantized stacks by their codes.

Both operands are integers or 8-bit floats. Unlike `stacked.py`, the product is linear in no operand: gradients with respect to
the scales are the reference's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ...array import QArray, Scheme
from ...errors import QuantError
from ...formats import FORMATS, AbstractFormat
from .code_product import fits_int32, is_whole, native_float, side
from .matrix_view import Stack, contracted_axis, folded_axes, stack_of
from .primitive import kernel_primitive, mapped_first
from .problem import Operand, Problem, refused_precision
from .reference import BACKENDS, Reference

Axes = tuple[int, ...]

LEAST_TILE = 8
"""The smallest block size along the contraction for which integer sums are faster."""


def pair_refusal(problem: Problem, *, floats: bool = False) -> str | None:
    """Why two operands cannot be multiplied by their codes, or None.

    Args:
        problem: the product.
        floats: whether two operands of one 8-bit float format are accepted besides integers.
    """
    sides = [operand for operand in (problem.lhs, problem.rhs) if operand.scheme is not None]
    assert len(sides) == 2
    kind = "int32"
    if floats and all(map(_is_float, sides)):
        kind = "float32"
        if len({operand.scheme.format for operand in sides if operand.scheme is not None}) > 1:
            return f"{sides[0]} and {sides[1]} have different 8-bit float formats; both must have the same"
    else:
        for operand in sides:
            assert operand.scheme is not None
            if not is_whole(operand.scheme):
                return f"{operand} does not have integer codes of at most 8 bits with integer zero points"
    if problem.accumulator not in (None, kind):
        return f"it sums in {kind}, but accumulator={problem.accumulator!r} was requested"
    if problem.out_sharding is not None:
        return "out_sharding is supported by XLA's own products only"
    if reason := refused_precision(problem.precision):
        return reason
    try:
        at, stack = weight_stack(problem)
        _check_tiles(problem, at, stack)
    except QuantError as refusal:
        return str(refusal)
    return None


def _is_float(operand: Operand) -> bool:
    """True for 8-bit float codes with a JAX dtype and no zero point."""
    scheme = operand.scheme
    return scheme is not None and scheme.zero_point is None and native_float(scheme.format) is not None


def paired_product(problem: Problem, lhs: QArray, rhs: QArray, kernels: tuple[Any, ...], *, is_named: bool) -> jax.Array:
    """Multiplies two operands that `pair_refusal` accepts.

    There is at most one kernel per platform; other platforms use the reference, unless the backend was named.
    """
    at, stack = weight_stack(problem)
    x, q = (lhs, rhs)[1 - at], (lhs, rhs)[at]
    groups = stack.groups_of(problem.dimension_numbers, 1 - at, x.ndim)
    contracted = groups[2]
    axis = tile = None
    if len(contracted) == 1:
        axis = contracted[0]
        if x.scale.shape[axis] != 1:
            tile = x.tiles[axis]
    fmt, dtype = x.scheme.format, native_float(x.scheme.format)
    if dtype is None:
        fmt, dtype = FORMATS["int8"], jnp.int8
    numbers = side(x, dtype, but=axis)
    zero = None
    if numbers.zero is not None:
        zero = _folded(numbers.zero, x.shape, groups, tile)
    codes = jax.lax.bitcast_convert_type(folded_axes(numbers.values, groups), jnp.uint8)
    x3 = _bytes_of(fmt, codes, _folded(numbers.scale, x.shape, groups, tile), zero, tile)
    y = _bind(
        x3,
        stack.of(q),
        contracts_cols=stack.contracts_cols,
        dtype=np.dtype(problem.result_dtype),
        kernels=kernels,
        is_named=is_named,
    )
    return stack.unfolded(y, x, q, groups, 1 - at)


def weight_stack(problem: Problem) -> tuple[int, Stack]:
    """The operand that is read in place: the right one if possible.

    Raises:
        QuantError: if neither operand can be viewed as a stack.
    """
    refusals = []
    for at in (1, 0):
        operand = (problem.lhs, problem.rhs)[at]
        try:
            return at, stack_of(operand, problem.dimension_numbers[0][at], problem.dimension_numbers[1][at])
        except QuantError as refusal:
            refusals.append(f"{operand} cannot be viewed as a stack of matrices: {refusal}")
    raise QuantError("; ".join(refusals))


def _check_tiles(problem: Problem, at: int, stack: Stack) -> None:
    """Checks that blocks along the contraction are equal on both sides and sum exactly.

    Raises:
        QuantError: if their sizes differ, they are too short, or their sums may overflow.
    """
    x = (problem.lhs, problem.rhs)[1 - at]
    assert x.scheme is not None
    axes, tiles = problem.dimension_numbers[0][1 - at], x.scheme.tiles(len(x.shape))
    own = stack.contraction
    cut = [tile for a in axes if (tile := tiles[a]) is not None and tile < x.shape[a]]
    if cut and len(axes) > 1:
        raise QuantError(f"the scales of {x} vary along one of several contracted axes")
    if cut and own.tile is not None and own.tile != cut[0]:
        raise QuantError(f"the block sizes along the contraction are {cut[0]} and {own.tile}; they must be equal")
    tile = own.tile or next(iter(cut), own.length)
    if tile < min(LEAST_TILE, own.length):
        raise QuantError(f"the block size along the contraction is {tile}; it must be at least {LEAST_TILE}")
    assert problem.lhs.scheme is not None
    assert problem.rhs.scheme is not None
    if is_whole(x.scheme) and not fits_int32(problem.lhs.scheme, problem.rhs.scheme, tile):
        raise QuantError(f"sums of {tile} products of its codes may not fit in int32")


def _bytes_of(fmt: AbstractFormat, codes: jax.Array, scale: jax.Array, zero: jax.Array | None, tile: int | None) -> QArray:
    """A QArray of uint8 codes `[B, M, K]` and scales `[B or 1, M or 1, tiles]`.

    Zero points, if any, are integers that fit in int8, shaped like scales; `tile` is the block size along K, or None.
    """
    free = (None if n == 1 else 1 for n in scale.shape[:2])
    scheme = Scheme(fmt).with_tiles((*free, tile), -1)
    if zero is not None:
        scheme = dataclasses.replace(scheme, zero_point=FORMATS["int8"])
        zero = jax.lax.bitcast_convert_type(zero.astype(jnp.int8), jnp.uint8)
    return QArray(codes, scale, zero, None, scheme, np.dtype(np.float32))


def _folded(a: jax.Array, shape: tuple[int, ...], groups: tuple[Axes, ...], tile: int | None) -> jax.Array:
    """Scales or zero points with each group of axes merged."""
    wide = list(a.shape)
    for group in groups if tile is None else groups[:2]:
        if any(a.shape[axis] != 1 for axis in group):
            for axis in group:
                wide[axis] = shape[axis]
    return folded_axes(jnp.broadcast_to(a, wide), groups)


def _bind(x: QArray, q: QArray, **settings: object) -> jax.Array:
    leaves, form = jax.tree.flatten((x, q))
    return primitive.bind(*leaves, form=form, **settings)


# --- the primitive ---


def _by_reference(x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
    numbers = (((2,), (contracted_axis(contracts_cols),)), ((0,), (0,)))
    return Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, None, dtype), x, q)


def _by_kernel(kernel: Any, *operands: QArray, **settings: Any) -> jax.Array:
    return kernel.paired(*operands, **settings)


def _shape(x: QArray, q: QArray, *, contracts_cols: bool) -> tuple[int, ...]:
    return x.shape[0], x.shape[1], q.shape[3 - contracted_axis(contracts_cols)]


def _mapped(
    leaves: Sequence[jax.Array], axes: Sequence[int | None], *, form: Any, **settings: object
) -> tuple[jax.Array, int]:
    """Batching: a mapped x alone adds rows (M); otherwise both batches (B) are extended."""
    count = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    x, q = jax.tree.unflatten(form, list(map(mapped_first, leaves, axes)))
    batch, rows = x.codes.shape[1:3]
    has_mapped_weight = any(axis is not None for axis in axes[-len(jax.tree.leaves(q)) :])

    def longer(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    def taller(a: jax.Array) -> jax.Array:
        a = jnp.broadcast_to(a, (count, a.shape[1], rows, a.shape[3])).swapaxes(0, 1)
        return a.reshape(a.shape[0], count * rows, a.shape[3])

    fold = longer if has_mapped_weight else taller
    zero = x.zero_point
    if zero is not None:
        zero = fold(jax.lax.bitcast_convert_type(zero, jnp.int8))
    x = _bytes_of(x.scheme.format, fold(x.codes), fold(x.scale), zero, x.scheme.tiles(3)[2])
    if has_mapped_weight:
        y = _bind(x, jax.tree.map(longer, q), **settings)
        return y.reshape(count, batch, *y.shape[1:]), 0
    y = _bind(x, jax.tree.map(lambda a: a[0], q), **settings)
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

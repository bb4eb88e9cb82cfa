"""Code x code products for kernels.

Both operands are integers or 8-bit floats. The product is linear in no operand: gradients with respect to the scales are the
reference's.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError
from ...formats.format import FORMATS, AbstractFormat
from .code_product import native_float, side
from .integer_codes import fits_int32, is_whole
from .matrix_view import Operand, folded_axes
from .problem import Problem, refused_precision

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
        _check_tiles(problem)
    except QuantError as refusal:
        return str(refusal)
    return None


def _is_float(operand: Operand) -> bool:
    """True for 8-bit float codes with a JAX dtype and no zero point."""
    scheme = operand.scheme
    return scheme is not None and scheme.zero_point is None and native_float(scheme.format) is not None


def code_rows(x: QArray, groups: tuple[Axes, Axes, Axes]) -> QArray:
    """The operand that is not read in place, `[B, M, K]` with one code per byte.

    Args:
        x: the operand.
        groups: its batch, free and contracted axes.
    """
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
    return _bytes_of(fmt, codes, _folded(numbers.scale, x.shape, groups, tile), zero, tile)


def refolded(x: Any, fold: Callable[[jax.Array], jax.Array]) -> Any:
    """Applies `fold`, which merges a mapped axis into B or M. `x` are rows: a float array, or those of `code_rows`."""
    if not isinstance(x, QArray):
        return fold(x)
    zero = x.zero_point
    if zero is not None:
        zero = fold(jax.lax.bitcast_convert_type(zero, jnp.int8))
    return _bytes_of(x.scheme.format, fold(x.codes), fold(x.scale), zero, x.scheme.tiles(3)[2])


def _check_tiles(problem: Problem) -> None:
    """Checks that blocks along the contraction are equal on both sides and sum exactly.

    Raises:
        QuantError: if their sizes differ, they are too short, or their sums may overflow.
    """
    at, view = problem.weight
    x = (problem.lhs, problem.rhs)[1 - at]
    assert x.scheme is not None
    axes, tiles = problem.dimension_numbers[0][1 - at], x.scheme.tiles(len(x.shape))
    own = view.contraction
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
    """A QArray of uint8 codes `[B, M, K]` and their scales. Scales are `[B or 1, M or 1, tiles]`.

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

"""Arithmetic on the two factors of an adapter.

Aligned factors have the weight's axes, of length 1 where a factor does not depend on one, and the rank's axis behind them.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from ...array.qarray import QArray
from ...kernels.quantize.dispatch import dequantize

Operand: TypeAlias = tuple[Array, Sequence[int]]
"""An array and the numbers of its axes."""


def updated(base: Array | np.ndarray | QArray, a: Array, b: Array, scale: float) -> Array:
    """`base + scale a b` with aligned factors, in the dtype of `base`.

    It is computed in float32 or wider and rounded once.
    """
    if isinstance(base, QArray):
        base = dequantize(base)
    wide = accumulator(base.dtype)
    left, right = (a.astype(wide), range(a.ndim)), (b.astype(wide), range(b.ndim))
    update = contracted(left, right, range(a.ndim - 1), jax.lax.Precision.HIGHEST, wide)
    return (jnp.asarray(base).astype(wide) + scale * update).astype(base.dtype)


def accumulator(dtype: np.dtype) -> DTypeLike:
    """The accumulation dtype of products: float32, or a wider `dtype`."""
    return dtype if dtype.itemsize > 4 else jnp.float32


def contracted(
    left: Operand, right: Operand, out: Sequence[int], precision: jax.lax.PrecisionLike, dtype: DTypeLike
) -> Array:
    """An einsum of two arrays over numbered axes. It accumulates in `dtype`, and broadcasts along axes of length 1.

    The result has the axes `out`, of length 1 where neither array has one; all others are summed over.
    """
    (x, of_x), (y, of_y) = (_without_units(*operand) for operand in (left, right))
    lone = [i for i, n in enumerate(of_x) if n not in out and n not in of_y]
    x, of_x = x.sum(tuple(lone)), [n for i, n in enumerate(of_x) if i not in lone]
    shared = [n for n in of_x if n in of_y]
    batch, summed = ([n for n in shared if (n in out) == is_kept] for is_kept in (True, False))
    contracting = tuple(map(of_x.index, summed)), tuple(map(of_y.index, summed))
    batches = tuple(map(of_x.index, batch)), tuple(map(of_y.index, batch))
    result = jax.lax.dot_general(x, y, (contracting, batches), precision=precision, preferred_element_type=dtype)
    axes = [*batch, *(n for n in of_x if n not in shared), *(n for n in of_y if n not in shared)]
    order = sorted(range(len(axes)), key=lambda i: out.index(axes[i]))
    length = dict(zip(axes, result.shape, strict=True))
    return result.transpose(order).reshape([length.get(n, 1) for n in out])


def _without_units(x: Array, axes: Sequence[int]) -> tuple[Array, list[int]]:
    kept = [n for n, length in zip(axes, x.shape, strict=True) if length != 1]
    return x.squeeze([i for i, length in enumerate(x.shape) if length == 1]), kept


def factored_product(
    x: Array,
    factors: tuple[Array, Array],
    x_axes: Sequence[int],
    axes: Sequence[int],
    out: Sequence[int],
    precision: jax.lax.PrecisionLike,
) -> Array:
    """The product of an operand with `a b`. It multiplies by one factor after the other, in float32 or wider.

    `x_axes`, `axes` and `out` are the numbers of the axes of `x`, of the weight and of the result, which has length 1 where
    neither operand has an axis.
    """
    wide = accumulator(x.dtype)
    rank = max((*x_axes, *axes)) + 1
    along = [*axes, rank]
    is_first = [any(f.shape[i] != 1 and n in x_axes and n not in out for i, n in enumerate(axes)) for f in factors]
    first, second = factors
    if is_first == [False, True]:
        first, second = second, first
    kept = [n for n in dict.fromkeys((*x_axes, *along)) if n in out or second.shape[along.index(n)] != 1]
    middle = contracted((x, x_axes), (first.astype(x.dtype), along), kept, precision, wide).astype(x.dtype)
    return contracted((middle, kept), (second.astype(x.dtype), along), out, precision, wide)

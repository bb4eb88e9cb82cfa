"""Arithmetic on the two factors of an adapter, which have the weight's axes, 1 long where a factor has none of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def updated(base: Array, a: Array, b: Array, scale: float) -> Array:
    """`base + scale a b` with aligned factors, computed in float32 or wider and rounded once, in the dtype of `base`."""
    wide = accumulator(base.dtype)
    left, right = (a.astype(wide), range(a.ndim)), (b.astype(wide), range(b.ndim))
    update = contracted(left, right, range(a.ndim - 1), jax.lax.Precision.HIGHEST, wide)
    return (base.astype(wide) + scale * update).astype(base.dtype)


def accumulator(dtype: Any) -> Any:
    """What products of a dtype are summed in: float32, or what is wider."""
    return dtype if dtype.itemsize > 4 else jnp.float32


def contracted(
    left: tuple[Array, Sequence[int]], right: tuple[Array, Sequence[int]], out: Sequence[int], precision: Any, dtype: Any
) -> Array:
    """An einsum of two arrays over numbered axes; an axis of length 1 counts as one that an array does not have.

    Args:
        left: an array and the numbers of its axes.
        right: another.
        out: the numbers of the result's axes; one that neither has is 1 long. What `out` lacks is summed over.
        precision: as in `jax.lax.dot_general`.
        dtype: what is accumulated in, and the dtype of the result.

    Returns:
        The contraction.
    """
    (x, of_x), (y, of_y) = (_without_units(*operand) for operand in (left, right))
    lone = [i for i, n in enumerate(of_x) if n not in out and n not in of_y]
    x, of_x = x.sum(tuple(lone)), [n for i, n in enumerate(of_x) if i not in lone]
    shared = [n for n in of_x if n in of_y]
    batch, summed = ([n for n in shared if (n in out) == is_kept] for is_kept in (True, False))
    contracting = tuple(map(of_x.index, summed)), tuple(map(of_y.index, summed))
    beside = tuple(map(of_x.index, batch)), tuple(map(of_y.index, batch))
    result = jax.lax.dot_general(x, y, (contracting, beside), precision=precision, preferred_element_type=dtype)
    axes = [*batch, *(n for n in of_x if n not in shared), *(n for n in of_y if n not in shared)]
    order = sorted(range(len(axes)), key=lambda i: out.index(axes[i]))
    length = dict(zip(axes, result.shape, strict=True))
    return result.transpose(order).reshape([length.get(n, 1) for n in out])


def _without_units(x: Array, axes: Sequence[int]) -> tuple[Array, list[int]]:
    kept = [n for n, length in zip(axes, x.shape, strict=True) if length != 1]
    return x.squeeze([i for i, length in enumerate(x.shape) if length == 1]), kept


def factored_product(
    x: Array, factors: tuple[Array, Array], x_axes: Sequence[int], axes: Sequence[int], out: Sequence[int], precision: Any
) -> Array:
    """The product of an operand with `a b`, by way of the rank: that with one factor first, and of the result with the other.

    Args:
        x: the operand.
        factors: `a` and `b`, the numbers of whose axes are `axes` and one more for the rank.
        x_axes: the numbers of the axes of `x`.
        axes: the numbers of the weight's axes.
        out: the numbers of the result's axes.
        precision: as in `jax.lax.dot_general`.

    Returns:
        The product in float32 or wider, with length 1 where neither operand has an axis of the result.
    """
    wide = accumulator(x.dtype)
    rank = max((*x_axes, *axes)) + 1
    along = [*axes, rank]
    is_first = [any(f.shape[i] != 1 and n in x_axes and n not in out for i, n in enumerate(axes)) for f in factors]
    first, second = factors if is_first[0] or not is_first[1] else factors[::-1]
    kept = [n for n in dict.fromkeys((*x_axes, *along)) if n in out or second.shape[along.index(n)] != 1]
    middle = contracted((x, x_axes), (first.astype(x.dtype), along), kept, precision, wide).astype(x.dtype)
    return contracted((middle, kept), (second.astype(x.dtype), along), out, precision, wide)

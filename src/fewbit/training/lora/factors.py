"""Arithmetic on the two factors of an adapter, which have the weight's axes, 1 long where a factor has none of it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def updated(base: Array, a: Array, b: Array, scale: float) -> Array:
    """`base + scale a b` with aligned factors, computed in float32 or wider and rounded once, in the dtype of `base`."""
    wide = jnp.promote_types(base.dtype, jnp.float32)
    update = contracted(
        [(a.astype(wide), range(a.ndim)), (b.astype(wide), range(b.ndim))],
        range(a.ndim - 1),
        jax.lax.Precision.HIGHEST,
        wide,
    )
    return (base.astype(wide) + scale * update).astype(base.dtype)


def contracted(operands: Sequence[tuple[Array, Sequence[int]]], out: Sequence[int], precision: Any, dtype: Any) -> Array:
    """An einsum over numbered axes; an operand's axis of length 1 counts as one that it does not have.

    Args:
        operands: one or two arrays, each with the numbers of its axes.
        out: the numbers of the result's axes; one that no operand has is 1 long.
        precision: as in `jnp.einsum`.
        dtype: what is accumulated in, and the dtype of the result.

    Returns:
        The contraction.
    """
    held, lengths = [], {}
    for array, axes in operands:
        own = [axis for axis, n in zip(axes, array.shape, strict=True) if n != 1]
        lengths |= {axis: n for axis, n in zip(axes, array.shape, strict=True) if n != 1}
        held += [array.squeeze([i for i, n in enumerate(array.shape) if n == 1]), own]
    result = jnp.einsum(*held, [axis for axis in out if axis in lengths], precision=precision, preferred_element_type=dtype)
    return result.reshape([lengths.get(axis, 1) for axis in out])


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
        precision: as in `jnp.einsum`.

    Returns:
        The product in float32 or wider, with length 1 where neither operand has an axis of the result.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    rank = max((*x_axes, *axes)) + 1
    along = [*axes, rank]
    is_first = [any(f.shape[i] != 1 and n in x_axes and n not in out for i, n in enumerate(axes)) for f in factors]
    first, second = factors if is_first[0] or not is_first[1] else factors[::-1]
    kept = [n for n in dict.fromkeys((*x_axes, *along)) if n in out or second.shape[along.index(n)] != 1]
    middle = contracted([(x, x_axes), (first.astype(x.dtype), along)], kept, precision, wide).astype(x.dtype)
    return contracted([(middle, kept), (second.astype(x.dtype), along)], out, precision, wide)

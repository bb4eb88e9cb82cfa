"""Masks that keep the largest weights: of every group of neighbours, or of a whole array."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import QuantError

_COUNTED = 32
"""Up to this many elements, counting those before each is faster than sorting: 2.4 ms for 150 ms at 2:4 of a million, on a CPU."""


def nm_mask(w: Float[Array, "*s"], n: int, m: int, *, axis: int | tuple[int, ...]) -> Bool[Array, "*s"]:
    """Which weights are among the `n` of largest magnitude in their group of `m` neighbours along an axis.

    Of equal magnitudes the first counts; a NaN counts as infinite, so it is kept and stays visible.

    Args:
        w: the weights.
        n: how many of each group are kept; 2 of 4 is what sparse tensor cores multiply.
        m: how many weights make a group.
        axis: the axis that groups run along: the one that the product contracts, where hardware wants them. Several are taken
            as one, the last of them the fastest.

    Returns:
        True where a weight is kept.

    Raises:
        QuantError: for counts or axes that make no sense, or a length that `m` does not divide.

    >>> nm_mask(jnp.array([0.1, -3.0, 2.0, 0.5]), 2, 4, axis=-1).tolist()
    [False, True, True, False]
    """
    check_counts(n, m)
    axes = (axis,) if isinstance(axis, int) else axis
    if not axes or not all(-w.ndim <= a < w.ndim for a in axes) or len({a % w.ndim for a in axes}) < len(axes):
        raise QuantError(f"axis is {axis}, but the array has {w.ndim} axes")
    length = math.prod(w.shape[a] for a in axes)
    if length % m:
        fits = ", ".join(str(k) for k in range(2, min(length, 64) + 1) if length % k == 0) or "none up to 64"
        raise QuantError(
            f"axis {axis} has {length} elements, which groups of m={m} do not divide; pad it to {-(-length // m) * m}, or take "
            f"one of the groups that fit: {fits}"
        )
    last = tuple(range(-len(axes), 0))
    moved = jnp.moveaxis(w, axes, last)
    kept = (_rank(moved.reshape(*moved.shape[: w.ndim - len(axes)], length // m, m)) < n).reshape(moved.shape)
    return jnp.moveaxis(kept, last, axes)


def magnitude_mask(w: Float[Array, "*s"], density: float) -> Bool[Array, "*s"]:
    """Which weights are among the largest magnitudes of the whole array.

    Args:
        w: the weights.
        density: the fraction that is kept, from 0 to 1: `round(density * w.size)` weights, the first of equal ones.

    Returns:
        True where a weight is kept; a NaN is.

    Raises:
        QuantError: for a density outside 0 .. 1.

    >>> magnitude_mask(jnp.array([[0.1, -3.0], [2.0, 0.5]]), 0.25).tolist()
    [[False, True], [False, False]]
    """
    if not 0 <= density <= 1:
        raise QuantError(f"density is {density}, must lie between 0 and 1")
    return (_rank(w.reshape(-1)) < round(density * w.size)).reshape(w.shape)


def _rank(w: Float[Array, "*s m"]) -> Int[Array, "*s m"]:
    """The place of each element along the last axis when magnitudes are sorted, the largest and the first at 0."""
    magnitude = jnp.where(jnp.isnan(w), jnp.inf, jnp.abs(w))
    if (m := w.shape[-1]) <= _COUNTED:
        this, other = magnitude[..., :, None], magnitude[..., None, :]
        is_first = np.tri(m, k=-1, dtype=bool).reshape((1,) * (w.ndim - 1) + (m, m))
        return jnp.sum((other > this) | ((other == this) & is_first), axis=-1, dtype=jnp.int32)
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def check_counts(n: int, m: int) -> None:
    """Refuses counts of a group that make no sense."""
    if not 1 <= n <= m:
        raise QuantError(f"n:m is {n}:{m}; at least one and at most m weights of each group are kept")

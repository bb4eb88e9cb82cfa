"""Pruning masks: n:m and magnitude sparsity."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..errors import QuantError

_COUNTED = 32
"""Up to this many elements are ranked by pairwise comparison, which is far faster than sorting."""


def nm_mask(w: Float[Array, "*s"], n: int, m: int, *, axis: int | tuple[int, ...]) -> Bool[Array, "*s"]:
    """An n:m sparsity mask: True for the `n` largest magnitudes of every `m` neighbours.

    Of equal magnitudes the first wins; NaN counts as infinite, so it is kept.

    Args:
        w: the weights.
        n: weights kept per group; sparse tensor cores need 2:4.
        m: the group size.
        axis: the axis of the groups, for hardware the contraction axis. Several axes are flattened, row-major.

    Returns:
        True where a weight is kept.

    Raises:
        QuantError: for invalid counts or axes, or a length that `m` does not divide.

    >>> nm_mask(jnp.array([0.1, -3.0, 2.0, 0.5]), 2, 4, axis=-1).tolist()
    [False, True, True, False]
    """
    check_counts(n, m)
    axes = axis
    if isinstance(axes, int):
        axes = (axes,)
    if not axes or not all(-w.ndim <= a < w.ndim for a in axes) or len({a % w.ndim for a in axes}) < len(axes):
        raise QuantError(f"axis is {axis}, but the array has {w.ndim} axes")
    length = math.prod(w.shape[a] for a in axes)
    if length % m:
        fits = ", ".join(str(k) for k in range(2, min(length, 64) + 1) if length % k == 0) or "none up to 64"
        raise QuantError(
            f"axis {axis} has {length} elements, which groups of m={m} do not divide; pad it to {-(-length // m) * m}, "
            f"or use one of the group sizes that fit: {fits}"
        )
    last = tuple(range(-len(axes), 0))
    moved = jnp.moveaxis(w, axes, last)
    kept = (_rank(moved.reshape(*moved.shape[: w.ndim - len(axes)], length // m, m)) < n).reshape(moved.shape)
    return jnp.moveaxis(kept, last, axes)


def magnitude_mask(w: Float[Array, "*s"], density: float) -> Bool[Array, "*s"]:
    """A magnitude-pruning mask: True for the `round(density * w.size)` largest magnitudes.

    Of equal magnitudes the first wins; NaN counts as infinite. QuantError for a density outside 0 .. 1.

    Args:
        w: the weights.
        density: the fraction that is kept, from 0 to 1: `round(density * w.size)` weights, the first of equal ones.

    Returns:
        True where a weight is kept; a NaN is.

    >>> magnitude_mask(jnp.array([[0.1, -3.0], [2.0, 0.5]]), 0.25).tolist()
    [[False, True], [False, False]]
    """
    if not 0 <= density <= 1:
        raise QuantError(f"density is {density}, must be between 0 and 1")
    return (_rank(w.reshape(-1)) < round(density * w.size)).reshape(w.shape)


def _rank(w: Float[Array, "*s m"]) -> Int[Array, "*s m"]:
    """The rank of each magnitude along the last axis, the largest 0, ties in order."""
    magnitude = jnp.where(jnp.isnan(w), jnp.inf, jnp.abs(w))
    if (m := w.shape[-1]) <= _COUNTED:
        this, other = magnitude[..., :, None], magnitude[..., None, :]
        is_first = np.tri(m, k=-1, dtype=bool).reshape((1,) * (w.ndim - 1) + (m, m))
        return jnp.sum((other > this) | ((other == this) & is_first), axis=-1, dtype=jnp.int32)
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def check_counts(n: int, m: int) -> None:
    """Raises QuantError unless `1 <= n <= m`."""
    if not 1 <= n <= m:
        raise QuantError(f"n:m is {n}:{m}; at least one and at most m weights of each group are kept")

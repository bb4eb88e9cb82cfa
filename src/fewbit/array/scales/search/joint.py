"""Joint search for scale and offset (heuristic).

The codes of a tile change along `K (numbers - 1)` lines in the plane of scale and offset, with about `(K numbers)**2 / 2`
regions, each with its own least-squares fit: too many for an exact search. Instead:

1. both ends of the range shrink together, over the given fractions;
2. the lower end alone, then the upper end alone; twice;
3. least squares: scale and offset are fitted to the codes, and the codes rounded again, while the error falls.

The full range is the first candidate and each tile keeps the better of each step, so no tile is worse than with min-max.
Each candidate is tried as stored, with rounded zero points.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ....formats.format import power_of_two, rough_quotient
from ..calibration import Scale, Target, Tiles, better, symmetric_or_range

_FITS = 8
"""Rounds of least squares; few tiles improve after five."""

Candidate = tuple[jax.Array, ...]
"""Fractions of the lower and the upper end, scale, offset and error of each tile."""


def best_range(tiles: Tiles, target: Target, fractions: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The best scale and offset found for an asymmetric target, as stored. The first of the `fractions` must be 1."""
    low = tiles.over(jnp.min, jnp.minimum(tiles.x, 0))
    high = tiles.over(jnp.max, jnp.maximum(tiles.x, 0))
    tried = jnp.asarray(fractions, jnp.float32)

    def at(below: jax.Array, above: jax.Array) -> Candidate:
        return (below, above, *as_stored(tiles, target, symmetric_or_range(low * below, high * above, target)))

    def sweep(best: Candidate, ends: Callable[[jax.Array, Candidate], Candidate]) -> Candidate:
        return jax.lax.fori_loop(0, len(fractions), lambda i, best: better(ends(tried[i], best), best), best)

    one = jnp.ones_like(low)
    best = sweep(at(one, one), lambda f, best: at(one * f, one * f))
    for _ in range(2):
        best = sweep(best, lambda f, best: at(one * f, best[1]))
        best = sweep(best, lambda f, best: at(best[0], one * f))
    best = jax.lax.fori_loop(0, _FITS, lambda _, best: better(_fitted(tiles, target, best), best), best)
    return best[2], best[3]


def as_stored(tiles: Tiles, target: Target, ideal: Scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scale and the offset (0 if there is none) rounded as stored, and their error."""
    scale, offset = target.store.snapped(ideal[0]), ideal[1]
    safe = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    if offset is None:
        offset = jnp.zeros_like(scale)
    else:
        offset = target.loaded_offset(target.stored_zero(offset, safe), safe)
    return scale, offset, tiles.error(_decoded(tiles, target, safe, offset) * safe + offset)


def _decoded(tiles: Tiles, target: Target, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """The decoded code of each element, without scale and offset."""
    return target.format.nearest(rough_quotient(tiles.x - offset, scale))


def _fitted(tiles: Tiles, target: Target, best: Candidate) -> Candidate:
    """The candidate with the least-squares scale and offset.

    They fit `x ~ scale q + offset`, for the decoded codes `q` of `best`.
    """
    below, above, scale, offset, _ = best
    safe = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    unit = power_of_two(-tiles.exponent)
    x, q = tiles.x * unit, _decoded(tiles, target, safe, offset)
    count = tiles.weighted_total(jnp.ones_like(x))
    count = jnp.where(count > 0, count, jnp.ones_like(count))
    mean_x, mean_q = tiles.weighted_total(x) / count, tiles.weighted_total(q) / count
    products = tiles.weighted_total((x - mean_x) * (q - mean_q))
    squares = tiles.weighted_total(jnp.square(q - mean_q))
    fits = (products > 0) & (squares > 0)
    slope = products / jnp.where(fits, squares, jnp.ones_like(squares))
    scale = jnp.where(fits, slope / unit, scale)
    offset = jnp.where(fits, (mean_x - slope * mean_q) / unit, offset)
    return (below, above, *as_stored(tiles, target, (scale, offset)))

"""Scale and offset of asymmetric schemes together: a search, not a proof.

The codes of a tile change along lines in the plane of scale and offset, `K (numbers - 1)` of them, and each of their about
`(K numbers)**2 / 2` regions has its own least squares fit: exact search is out of reach beyond a few elements. Instead:

1. both ends of the range shrink together, over the given fractions;
2. then the lower end alone, then the upper end alone, then both once more from there;
3. then least squares: scale and offset are fitted to the codes, the codes rounded anew, as long as the error falls.

The whole range is the first candidate and every step keeps the better one, tile by tile, so no tile is worse than with
min-max. Each candidate is tried as it will be stored, whole zero points rounded.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ...formats.format import power_of_two, rough_quotient
from .calibration import Target, Tiles, is_lower, symmetric_or_range

_FITS = 8
"""Rounds of least squares; few tiles still improve after five."""

Candidate = tuple[jax.Array, ...]
"""Fractions of the lower and the upper end, scale, offset and error of each tile."""


def best_range(tiles: Tiles, target: Target, fractions: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """The best scale and offset found for an asymmetric target.

    Args:
        tiles: what is quantized.
        target: what the scales are for.
        fractions: the fractions of the range that are tried, the first of them 1.

    Returns:
        The scale and the offset, as they are stored.
    """
    low = tiles.over(jnp.min, jnp.minimum(tiles.x, 0))
    high = tiles.over(jnp.max, jnp.maximum(tiles.x, 0))
    tried = jnp.asarray(fractions, jnp.float32)

    def at(below: jax.Array, above: jax.Array) -> Candidate:
        scale, offset = symmetric_or_range(low * below, high * above, target)
        assert offset is not None
        return (below, above, *_as_stored(tiles, target, scale, offset))

    def sweep(best: Candidate, ends: Callable[[jax.Array, Candidate], Candidate]) -> Candidate:
        return jax.lax.fori_loop(0, len(fractions), lambda i, best: _better(ends(tried[i], best), best), best)

    one = jnp.ones_like(low)
    best = sweep(at(one, one), lambda f, best: at(one * f, one * f))
    for _ in range(2):
        best = sweep(best, lambda f, best: at(one * f, best[1]))
        best = sweep(best, lambda f, best: at(best[0], one * f))
    best = jax.lax.fori_loop(0, _FITS, lambda _, best: _better(_fitted(tiles, target, best), best), best)
    return best[2], best[3]


def _as_stored(tiles: Tiles, target: Target, scale: jax.Array, offset: jax.Array) -> Candidate:
    """A scale and an offset as they will be read back, and their error."""
    scale = target.store.snapped(scale)
    safe = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    offset = target.loaded_offset(target.stored_zero(offset, safe), safe)
    return scale, offset, tiles.error(_decoded(tiles, target, safe, offset) * safe + offset)


def _decoded(tiles: Tiles, target: Target, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """The format's number for each element."""
    return target.format.nearest(rough_quotient(tiles.x - offset, scale))


def _fitted(tiles: Tiles, target: Target, best: Candidate) -> Candidate:
    """Scale and offset by least squares, `x ~ scale q + offset`, for the numbers `q` that a candidate gives."""
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
    return (below, above, *_as_stored(tiles, target, scale, offset))


def _better(found: Candidate, best: Candidate) -> Candidate:
    """Tile by tile the one of lower error (the last element); a tie keeps `best`."""
    wins = is_lower(found[-1], best[-1])
    return tuple(jnp.where(wins, f, b) for f, b in zip(found, best, strict=True))

"""Exact search for the storable scale.

Storable scales are powers of two, or the numbers of a small float format. Every search starts from the smallest one that
saturates nothing, tries the candidates above it that `candidates` allows, and goes down while some tile can gain. Saturated
elements bound the gain: they cost at least their distance to the largest number, and more under every smaller scale, so a
tile is done when that alone exceeds its best error. This is valid for any tile length, weights and format; where a fixed
number of candidates is proven to suffice, no bound is computed.

Ties (see `calibration.is_lower`) go to the candidate tried first, the naive scale.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ....formats.format import AbstractFormat, looked_up, power_of_two, quotient
from ..calibration import Target, Tiles, better
from .candidates import last_useful_scale, needed_doublings, needed_halvings, stored_scales

SMALLEST = 2.0**-120
"""The smallest nonzero scale, in units of its tile. Its reciprocal is a normal number."""

Best = tuple[jax.Array, ...]
"""A scale for each tile, and its error."""


@dataclasses.dataclass(frozen=True)
class Trials:
    """Tiles normalized by powers of two near their amax, to try scales on.

    Squares and sums then neither overflow nor underflow. Gradients treat a searched scale as a constant.

    Attributes:
        tiles: the normalized tiles.
        unit: the power of two of each tile.
        inverse: 1 / unit.
        format: the format of the codes.
    """

    tiles: Tiles
    unit: jax.Array
    inverse: jax.Array
    format: AbstractFormat

    @classmethod
    def of(cls, tiles: Tiles, fmt: AbstractFormat) -> "Trials":
        """Normalizes tiles."""
        x, weights = jax.lax.stop_gradient((tiles.x, tiles.weights))
        tiles = dataclasses.replace(tiles, x=x, weights=weights)
        exponent = tiles.exponent
        inverse = power_of_two(-exponent)
        return cls(dataclasses.replace(tiles, x=tiles.x * inverse), power_of_two(exponent), inverse, fmt)

    def error(self, scale: jax.Array) -> jax.Array:
        """The weighted squared error of each tile under a scale, in units of the tile."""
        # A product with the reciprocal costs one division per tile; that it rounds twice does not matter here.
        scale = jnp.maximum(scale * self.inverse, jnp.float32(SMALLEST))
        x = self.tiles.x
        return self.tiles.weighted_total(jnp.square(self.format.nearest(x * (1 / scale)) * scale - x))

    def saturated(self, scale: jax.Array) -> jax.Array:
        """The error of saturated elements: a lower bound of the error of every smaller scale."""
        scale, x = scale * self.inverse, self.tiles.x
        excess = jnp.maximum(x - jnp.float32(self.format.max) * scale, jnp.float32(self.format.min) * scale - x)
        return self.tiles.weighted_total(jnp.square(jnp.maximum(excess, 0)))

    def better(self, scale: jax.Array, best: Best) -> Best:
        """The scale of lower error, per tile; a tie keeps `best`."""
        return better((scale, self.error(scale)), best)

    def lowered(self, scale_at: Callable[[jax.Array], jax.Array], steps: jax.Array | int, best: Best) -> Best:
        """The best of `best` and ever smaller scales.

        These are `scale_at(1), scale_at(2), ..`, tried while any tile can gain.
        """

        def can_gain(state: tuple[jax.Array, Best]) -> jax.Array:
            step, best = state
            return (step <= steps) & jnp.any(self.saturated(scale_at(step)) < best[1])

        def try_next(state: tuple[jax.Array, Best]) -> tuple[jax.Array, Best]:
            step, best = state
            return step + 1, self.better(scale_at(step), best)

        return jax.lax.while_loop(can_gain, try_next, (jnp.int32(1), best))[1]


def best_power_of_two(tiles: Tiles, fmt: AbstractFormat, ceiling: jax.Array, power: Callable[..., jax.Array]) -> jax.Array:
    """The power of two of least error for each tile.

    Args:
        tiles: the blocked array.
        fmt: the format of the codes.
        ceiling: the exponent of the smallest power that saturates nothing.
        power: the storable power of two of an exponent.
    """
    trials = Trials.of(tiles, fmt)
    largest_tile = math.prod(tiles.x.shape[a] for a in tiles.within)

    def tried(first: int, last: int, best: Best) -> Best:
        if last == first:
            return trials.better(power(ceiling + first), best)
        # A loop, since XLA would fuse the unrolled candidates into one huge body.
        return jax.lax.fori_loop(first, last + 1, lambda i, best: trials.better(power(ceiling + i), best), best)

    best = power(ceiling), trials.error(power(ceiling))
    if doublings := needed_doublings(fmt):
        best = tried(1, doublings, best)
    if tiles.weights is None:
        return tried(-needed_halvings(fmt, largest_tile), -1, best)[0]
    return trials.lowered(lambda step: power(ceiling - step), 254, best)[0]


def best_stored(tiles: Tiles, target: Target) -> jax.Array:
    """The best scale among the numbers of the scale format. 0 for an all-zero tile."""
    holder, fmt = target.store.holder, target.format
    assert isinstance(holder, AbstractFormat)
    trials, unit = Trials.of(tiles, fmt), target.store.unit
    grid = stored_scales(holder).astype(np.float32)
    amax = jax.lax.stop_gradient(tiles.amax)
    ceiling = first_unsaturated(amax, target, grid)

    def scale_at(index: jax.Array) -> jax.Array:
        scale = looked_up(grid, jnp.maximum(index, 0))
        if unit is None:
            return scale
        return scale * unit

    proven = None
    if tiles.weights is None:
        proven = proven_window(fmt, holder, math.prod(tiles.x.shape[a] for a in tiles.within))
    first, last = proven or (np.arange(len(grid)), last_useful_scale(fmt, holder))
    first, last = (looked_up(ends.astype(np.int32), ceiling) for ends in (first, last))
    best = scale_at(ceiling), trials.error(scale_at(ceiling))
    count = jnp.max(last - first) + 1
    start = jnp.zeros_like(count)  # unlike 0, it is on the mesh of x, which vmap needs
    best = jax.lax.fori_loop(start, count, lambda i, best: trials.better(scale_at(first + i), best), best)
    if proven is None:
        best = trials.lowered(lambda step: scale_at(ceiling - step), jnp.max(ceiling), best)
    return jnp.where(amax > 0, best[0], jnp.zeros_like(best[0]))


def first_unsaturated(amax: jax.Array, target: Target, grid: np.ndarray) -> jax.Array:
    """The index in the grid of the smallest stored scale that saturates nothing, or the last."""
    needed = quotient(amax, jnp.float32(target.format.bound))
    if target.store.unit is not None:
        needed = quotient(needed, target.store.unit)
    holder = target.store.holder
    assert isinstance(holder, AbstractFormat)
    places = np.searchsorted(grid, np.nan_to_num(holder.values())).clip(0, len(grid) - 1).astype(np.int32)
    nearest = looked_up(places, holder.encode(needed).astype(jnp.int32))
    return jnp.minimum(nearest + (looked_up(grid, nearest) < needed).astype(jnp.int32), len(grid) - 1)


@functools.cache
def proven_window(fmt: AbstractFormat, holder: AbstractFormat, elements: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The first and last E4M3 scale that can be optimal for E2M1.

    There is a pair for each smallest scale that saturates nothing. Linear programs over all tiles (every distribution of the
    other elements against every largest one) prove the codes -4..+6 for up to 16 elements and -5..+6 for up to 32, relative
    to the smallest scale that saturates nothing; if that is one of the lowest 8 (subnormal), the lowest 15. None where
    nothing is proven.
    """
    if (fmt.name, holder.name) not in (("e2m1", "e4m3fn"), ("e2m1", "ue4m3")) or elements > 32:
        return None
    codes = np.arange(len(stored_scales(holder)))
    below, above = 4 + (elements > 16), 6
    low = codes < 8
    first = np.where(low, 0, codes - below)
    return first, np.where(low, 14, codes + above).clip(max=len(codes) - 1)

"""The scale of least squared error for float scales, exactly: one candidate for every way in which the tile can be rounded.

As the scale falls, the codes of a tile change only where some `|x_i| / s` passes a midpoint `t_j` between two numbers of the
format. Between two such breakpoints `s = |x_i| / t_j` the codes `q` are fixed, and the best scale for them is the least
squares fit `sum(w x q) / sum(w q**2)`, whose error no scale between the breakpoints undercuts. So the best of one fit for
each breakpoint is the optimum over all scales. Rounded to the dtype that holds it, the fit is the best scale that can be
held for those codes, since the error is a parabola around it.

All breakpoints of a tile at once would take as many arrays as the format has numbers times elements; they are taken one by
one, in the order of the element's rank in its tile, so that those which no tile can use are passed over: scales from twice
the smallest that saturates nothing on (see `candidates`), and scales under which one element alone, by saturating, costs
more than the best error so far.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ...formats import AbstractFormat
from ...formats.format import looked_up, quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, is_lower
from .candidates import largest_useful_ratio, midpoints
from .mx import best_mx
from .search import SMALLEST, Best, Trials, best_stored

# Codes just below a breakpoint: an element on a midpoint, or rounded onto it, has left it. Errors do not jump there.
_JUST_BELOW = np.float32(1 - 2.0**-21)
_MOST_BREAKPOINTS = 2**16


@dataclasses.dataclass(frozen=True)
class Exact(AbstractCalibration):
    """The scale of least (weighted) squared error of the tile, proven for every symmetric scheme whose format has zero.

    Scales that a small format holds are searched as `mse` does. Float scales are found from all breakpoints of the
    rounding: up to elements times numbers passes over the array, where `mse` makes 64. For 4 bits and tiles up to 64 that is
    some hundred; tiles of more than 65536 breakpoints (rows of int8) are refused.

    A tie, errors within `2**-16` of each other as float32 sums them, goes to absmax's scale.
    """

    name: ClassVar[str] = "exact"

    @property
    def uses_error_weights(self) -> bool:
        return True

    @property
    def searches_tensor_scale(self) -> bool:
        return True

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if target.asymmetric:
            raise UnsupportedError("exact knows no scheme with a zero point, where scale and offset are searched; use mse")
        if target.store.is_power_of_two:
            return best_mx(tiles, target.format), None
        if isinstance(target.store.holder, AbstractFormat):
            return best_stored(tiles, target), None
        return _best_fit(tiles, target), None


CALIBRATIONS.add("exact", Exact)


def _best_fit(tiles: Tiles, target: Target) -> jax.Array:
    """The best float scale of each tile."""
    fmt, trials = target.format, Trials.of(tiles, target.format)
    table, ranked = midpoints(fmt), _ranked(trials.tiles)
    count = ranked.shape[0] * table.shape[1]
    if count > _MOST_BREAKPOINTS:
        raise UnsupportedError(
            f"exact: a tile of {ranked.shape[0]} elements has {count} breakpoints in {fmt.name}, more than "
            f"{_MOST_BREAKPOINTS}; use a shorter tile, or mse"
        )
    amax = trials.tiles.amax
    naive = target.store.snapped(quotient(amax, jnp.float32(fmt.bound)) * trials.unit)
    highest = quotient(amax, jnp.float32(fmt.bound)) * jnp.float32(largest_useful_ratio(fmt))
    # The codes between two breakpoints are those just below the upper one, which may lie above the highest scale.
    start = naive, trials.error(naive)
    for scale in (naive, highest * trials.unit):
        start = _fitted(trials, target, scale, start)
    lowest = _smallest_possible(trials, start[1])

    def step(i: jax.Array, best: Best) -> Best:
        x = ranked[i // table.shape[1]]
        side = (x < 0).astype(jnp.int32) * table.shape[1]
        middle = looked_up(table.ravel(), side + i % table.shape[1])
        scale = jnp.abs(x) / middle
        useful = (scale > lowest) & (scale <= highest)
        tried = jnp.where(useful, scale * _JUST_BELOW * trials.unit, best[0])
        return jax.lax.cond(jnp.any(useful), lambda best: _fitted(trials, target, tried, best), lambda best: best, best)

    best = jax.lax.fori_loop(0, count, step, start)
    return jnp.where(amax > 0, best[0], jnp.zeros_like(best[0]))


def _ranked(tiles: Tiles) -> jax.Array:
    """The elements of each tile in ascending order, the first axis, each with the axes of a per-tile result."""
    flat = jnp.moveaxis(tiles.x, tiles.within, range(len(tiles.within)))
    flat = flat.reshape(-1, *flat.shape[len(tiles.within) :])
    return jnp.sort(flat, axis=0).reshape(flat.shape[0], *tiles.amax.shape)


def _smallest_possible(trials: Trials, error: jax.Array) -> jax.Array:
    """What no better scale is below, in units of the tile: under it one element saturates at more than this error."""
    weights = trials.tiles.weights
    allowed = error if weights is None else jnp.where(weights > 0, error / jnp.where(weights > 0, weights, 1), jnp.inf)
    room = jnp.sqrt(allowed)
    fmt, x = trials.format, trials.tiles.x
    above = (x - room) / jnp.float32(fmt.max)
    below = (-x - room) / jnp.float32(-fmt.min) if fmt.min < 0 else above
    return jnp.maximum(trials.tiles.over(jnp.max, jnp.maximum(above, below)), 0)


def _fitted(trials: Trials, target: Target, scale: jax.Array, best: Best) -> Best:
    """The better of `best` and the least squares fit to the codes that a scale gives."""
    tiles, own = trials.tiles, jnp.maximum(scale * trials.inverse, jnp.float32(SMALLEST))
    q = trials.format.nearest(tiles.x * (1 / own))
    products, squares = tiles.weighted_total(tiles.x * q), tiles.weighted_total(q * q)
    fit = jnp.where((products > 0) & (squares > 0), products / jnp.where(squares > 0, squares, 1), own)
    fitted = target.store.snapped(fit * trials.unit)
    error = tiles.weighted_total(jnp.square(q * (fitted * trials.inverse) - tiles.x))
    wins = is_lower(error, best[1])
    return jnp.where(wins, fitted, best[0]), jnp.where(wins, error, best[1])

"""Exact search for the float scale.

As the scale falls, the codes of a tile change only where some `|x_i| / s` passes a midpoint `t_j` between two numbers of the
format. Between two such breakpoints `s = |x_i| / t_j` the codes `q` are fixed, and their best scale is the least-squares fit
`sum(w x q) / sum(w q**2)`. So the best fit over all breakpoints is the global optimum. The error is a parabola around the
fit, so the fit rounded to the stored dtype is the best storable scale for those codes.

Breakpoints are tried one by one, in the order of the element's rank in its tile. Those that no tile can use are skipped:
scales from twice the smallest that saturates nothing on (see `candidates`), and scales under which the saturation of one
element alone exceeds the best error so far.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import UnsupportedError
from ....formats.format import AbstractFormat, looked_up, quotient
from ..calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, better
from ..mx import best_mx
from .candidates import largest_useful_ratio, midpoints
from .stored import SMALLEST, Best, Trials, best_stored

# Codes are taken just below a breakpoint, where no element rounds onto the midpoint; the error is continuous there.
_JUST_BELOW = np.float32(1 - 2.0**-21)
_MOST_BREAKPOINTS = 2**16


@dataclasses.dataclass(frozen=True)
class Exact(AbstractCalibration):
    """The scale of least weighted squared error, proven for symmetric schemes whose format has zero.

    Scales stored in a small format are searched like `mse`. Float scales are found from all breakpoints of the rounding:
    up to elements times numbers passes over the array, some hundred for 4 bits and tiles up to 64, where `mse` needs 64.
    Tiles of more than 65536 breakpoints (rows of int8) are refused.

    Ties, errors within a relative `2**-16`, go to absmax's scale.
    """

    name: ClassVar[str] = "exact"
    uses_error_weights: ClassVar[bool] = True
    searches_tensor_scale: ClassVar[bool] = True

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if target.asymmetric:
            raise UnsupportedError("exact does not support schemes with a zero point; use mse")
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
    # The codes between two breakpoints are those just below the upper one, which may be above the highest scale.
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
    """The elements of each tile, ascending along a new first axis. The other axes are those of a per-tile result."""
    flat = jnp.moveaxis(tiles.x, tiles.within, range(len(tiles.within)))
    flat = flat.reshape(-1, *flat.shape[len(tiles.within) :])
    return jnp.sort(flat, axis=0).reshape(flat.shape[0], *tiles.amax.shape)


def _smallest_possible(trials: Trials, error: jax.Array) -> jax.Array:
    """A lower bound for better scales, in units of the tile. Below it one element alone saturates by more than `error`."""
    weights = trials.tiles.weights
    if weights is not None:
        error = jnp.where(weights > 0, error / jnp.where(weights > 0, weights, 1), jnp.inf)
    excess = jnp.sqrt(error)
    fmt, x = trials.format, trials.tiles.x
    bound = (x - excess) / jnp.float32(fmt.max)
    if fmt.min < 0:
        bound = jnp.maximum(bound, (-x - excess) / jnp.float32(-fmt.min))
    return jnp.maximum(trials.tiles.over(jnp.max, bound), 0)


def _fitted(trials: Trials, target: Target, scale: jax.Array, best: Best) -> Best:
    """The better of `best` and the least-squares fit to the codes under `scale`."""
    tiles, own = trials.tiles, jnp.maximum(scale * trials.inverse, jnp.float32(SMALLEST))
    q = trials.format.nearest(tiles.x * (1 / own))
    products, squares = tiles.weighted_total(tiles.x * q), tiles.weighted_total(q * q)
    fit = jnp.where((products > 0) & (squares > 0), products / jnp.where(squares > 0, squares, 1), own)
    fitted = target.store.snapped(fit * trials.unit)
    error = tiles.weighted_total(jnp.square(q * (fitted * trials.inverse) - tiles.x))
    return better((fitted, error), best)

"""Least-squared-error calibrations: MSE and SNR search."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import QuantError
from ...formats import AbstractFormat
from ...formats.format import rough_quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, is_lower, symmetric_or_range
from .joint import best_range
from .mx import best_mx
from .search import best_stored


@dataclasses.dataclass(frozen=True)
class MSE(AbstractCalibration):
    """The scale of least (weighted) squared error of each tile.

    - Scales stored in a small format (E8M0, E4M3) are searched exactly: every storable scale that can be optimal is tried.
      For NVFP4 (E2M1 codes, E4M3 scales, tiles up to 32, no weights) that is a proven window of 11 or 12 codes; otherwise
      the search continues while any tile can gain.
    - The tensor scale of two-level schemes is the best of four candidates, each with the exact search of its tiles' scales.
    - Float scales are searched on a grid of `steps` fractions of the absmax range, down to `low`; `exact` searches all.
    - Scale and offset of asymmetric schemes are searched together, see `joint`.

    The unclipped scale is always a candidate, and ties (errors within a relative `2**-16`) go to it, so the error is not
    above absmax's (min-max's) except for the rounding of the two sums.

    Attributes:
        steps: the number of fractions in a grid search.
        low: the smallest fraction.
        tensor: how a tensor scale is chosen: "search", see `best_tensor_scale`; or "amax", the smallest at which nothing
            saturates, as in most other packages.
    """

    name: ClassVar[str] = "mse"
    steps: float = 64
    low: float = 0.3
    tensor: str = "search"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int | float) or self.steps % 1 or not 2 <= self.steps < float("inf"):
            raise QuantError(f"mse: steps is {self.steps!r}, must be a whole number of at least 2")
        if not isinstance(self.low, int | float) or not 0 < self.low < 1:
            raise QuantError(f"mse: low is {self.low!r}, must be a fraction between 0 and 1")
        if self.tensor not in ("search", "amax"):
            raise QuantError(f"mse: tensor is {self.tensor!r}, must be 'search' or 'amax'")

    @property
    def uses_error_weights(self) -> bool:
        return True

    @property
    def searches_tensor_scale(self) -> bool:
        return self.tensor == "search"

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        fractions = np.linspace(1.0, self.low, int(self.steps))
        if target.asymmetric:
            return best_range(tiles, target, fractions)
        if target.store.is_power_of_two:
            return best_mx(tiles, target.format), None
        if isinstance(target.store.holder, AbstractFormat):
            return best_stored(tiles, target), None
        return _best_fraction(tiles, target, fractions)


@dataclasses.dataclass(frozen=True)
class SNR(AbstractCalibration):
    """The clipping factor of highest signal-to-noise ratio on a grid: AQT's automatic clip search.

    Equivalent to the least squared error over `low .. 1` in steps of `step`.

    Attributes:
        low: the smallest factor.
        step: the grid step.
    """

    name: ClassVar[str] = "snr"
    low: float = 0.5
    step: float = 0.05

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, int | float) for v in (self.low, self.step))
        if not numbers or not 0 < self.low < 1 or not 0 < self.step < 1:
            raise QuantError(f"snr: low is {self.low!r} and step {self.step!r}; both must be fractions between 0 and 1")

    @property
    def uses_error_weights(self) -> bool:
        return True

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        return _best_fraction(tiles, target, np.arange(1.0, self.low - self.step / 2, -self.step))


CALIBRATIONS.add("mse", MSE)
CALIBRATIONS.add("snr", SNR)


def _best_fraction(tiles: Tiles, target: Target, fractions: np.ndarray) -> Scale:
    """The best of the given fractions of the full range."""
    low, high = _range(tiles, target)

    def at(fraction: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale, offset = symmetric_or_range(low * fraction, high * fraction, target)
        scale = target.store.snapped(scale)
        if offset is None:
            return scale, jnp.zeros_like(scale)
        safe = jnp.where(scale > 0, scale, jnp.ones_like(scale))
        return scale, target.loaded_offset(target.stored_zero(offset, safe), safe)

    candidates = jnp.asarray(fractions, jnp.float32)

    def step(i: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        scale, offset = at(candidates[i])
        return _better((scale, offset, _error(tiles, target, scale, offset)), best)

    scale, offset = at(candidates[0])
    start = (scale, offset, _error(tiles, target, scale, offset))
    scale, offset, _ = jax.lax.fori_loop(1, len(fractions), step, start)
    if target.asymmetric:
        return scale, offset
    return scale, None


def _range(tiles: Tiles, target: Target) -> tuple[jax.Array, jax.Array]:
    """The ends of the unclipped range."""
    if not target.asymmetric:
        return -tiles.amax, tiles.amax
    return tiles.over(jnp.min, jnp.minimum(tiles.x, 0)), tiles.over(jnp.max, jnp.maximum(tiles.x, 0))


def _error(tiles: Tiles, target: Target, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """The error of each tile under this scale and offset."""
    safe = jnp.where(scale > 0, scale, jnp.ones_like(scale))
    return tiles.error(target.format.nearest(rough_quotient(tiles.x - offset, safe)) * safe + offset)


def _better(found: tuple[jax.Array, ...], best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The candidate of lower error (the last element), per tile; a tie keeps `best`."""
    wins = is_lower(found[-1], best[-1])
    return tuple(jnp.where(wins, f, b) for f, b in zip(found, best, strict=True))

"""Least-squared-error calibrations: MSE and SNR search."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import QuantError
from ....formats.format import AbstractFormat
from ..calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, better, symmetric_or_range
from ..mx import best_mx
from .joint import as_stored, best_range
from .stored import best_stored


@dataclasses.dataclass(frozen=True)
class MSE(AbstractCalibration):
    """The scale of least (weighted) squared error of each tile.

    - Scales stored in a small format (E8M0, E4M3) are searched exactly: every storable scale that can be optimal is tried.
      For NVFP4 (E2M1 codes, E4M3 scales, tiles up to 32, no weights) that is a proven window of 11 or 12 codes; otherwise
      the search continues while any tile can gain.
    - The tensor scale of symmetric two-level schemes is the best of four candidates, each with the exact search of its
      tiles' scales.
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
    uses_error_weights: ClassVar[bool] = True
    steps: float = 64
    low: float = 0.3
    tensor: str = "search"

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int | float) or self.steps % 1 or not 2 <= self.steps < float("inf"):
            raise QuantError(f"mse: steps is {self.steps!r}, must be an integer of at least 2")
        if not isinstance(self.low, int | float) or not 0 < self.low < 1:
            raise QuantError(f"mse: low is {self.low!r}, must be a fraction between 0 and 1")
        if self.tensor not in ("search", "amax"):
            raise QuantError(f"mse: tensor is {self.tensor!r}, must be 'search' or 'amax'")

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
    uses_error_weights: ClassVar[bool] = True
    low: float = 0.5
    step: float = 0.05

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, int | float) for v in (self.low, self.step))
        if not numbers or not 0 < self.low < 1 or not 0 < self.step < 1:
            raise QuantError(f"snr: low is {self.low!r} and step {self.step!r}; both must be fractions between 0 and 1")

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        return _best_fraction(tiles, target, np.arange(1.0, self.low - self.step / 2, -self.step))


CALIBRATIONS.add("mse", MSE)
CALIBRATIONS.add("snr", SNR)


def _best_fraction(tiles: Tiles, target: Target, fractions: np.ndarray) -> Scale:
    """The best of the given fractions of the full range."""
    low, high = -tiles.amax, tiles.amax
    if target.asymmetric:
        low, high = tiles.over(jnp.min, jnp.minimum(tiles.x, 0)), tiles.over(jnp.max, jnp.maximum(tiles.x, 0))
    candidates = jnp.asarray(fractions, jnp.float32)

    def at(i: jax.Array | int) -> tuple[jax.Array, ...]:
        return as_stored(tiles, target, symmetric_or_range(low * candidates[i], high * candidates[i], target))

    scale, offset, _ = jax.lax.fori_loop(1, len(fractions), lambda i, best: better(at(i), best), at(0))
    if target.asymmetric:
        return scale, offset
    return scale, None

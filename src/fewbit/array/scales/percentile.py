"""Percentile calibration."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ..._explicit_mesh import with_auto_axes
from ...errors import QuantError
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class Percentile(AbstractCalibration):
    """Maps the `percent`-th percentile of `|x|` to the largest code. Elements beyond it saturate.

    For an asymmetric target the range clips equally many elements at both ends, and contains 0. Percentiles are linearly
    interpolated, as in `numpy.percentile`.

    Attributes:
        percent: above 0, up to 100 (which is absmax).
    """

    name: ClassVar[str] = "percentile"
    clips: ClassVar[bool] = True
    percent: float

    def __post_init__(self) -> None:
        if not isinstance(self.percent, int | float) or not 0 < self.percent <= 100:
            raise QuantError(f"percentile: percent is {self.percent!r}, must be above 0 and at most 100")

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        x = tiles.padded(tiles.x, jnp.nan)
        fraction = self.percent / 100

        def quantile(x: jax.Array, at: float) -> jax.Array:
            return with_auto_axes(
                lambda x: jnp.nanquantile(x, at, axis=tiles.within, keepdims=True), x, reduced=tiles.within
            )

        if not target.asymmetric:
            high = quantile(jnp.abs(x), fraction)
            return symmetric_or_range(-high, high, target)
        low, high = quantile(x, (1 - fraction) / 2), quantile(x, (1 + fraction) / 2)
        return symmetric_or_range(jnp.minimum(low, 0), jnp.maximum(high, 0), target)


CALIBRATIONS.add("percentile", Percentile)

"""Min-max calibration, for asymmetric schemes."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...errors import QuantError
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, check_positive, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class MinMax(AbstractCalibration):
    """The range `factor * min(x) .. factor * max(x)`. A symmetric target uses its larger magnitude.

    Attributes:
        factor: 1 keeps the full range; smaller values clip both ends.
        contains_zero: whether the range is extended to contain 0, so that zero is exact; 0 is GGUF's rule for Q4_1 and Q5_1,
            whose offset is a float.
    """

    name: ClassVar[str] = "minmax"
    factor: float = 1.0
    contains_zero: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)
        if self.contains_zero not in (0, 1):
            raise QuantError(f"minmax: contains_zero is {self.contains_zero!r}, must be 0 or 1")

    @property
    def clips(self) -> bool:
        return self.factor < 1

    @property
    def exceeds_amax(self) -> bool:
        return self.factor > 1

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if self.contains_zero:
            low, high = jnp.minimum(tiles.over(jnp.min, tiles.x), 0), jnp.maximum(tiles.over(jnp.max, tiles.x), 0)
        else:
            x = tiles.padded(tiles.x, jnp.nan)
            low = jnp.nanmin(x, axis=tiles.within, keepdims=True)
            high = jnp.nanmax(x, axis=tiles.within, keepdims=True)
        return symmetric_or_range(low * self.factor, high * self.factor, target)


CALIBRATIONS.add("minmax", MinMax)

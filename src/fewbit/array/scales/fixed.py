"""Fixed-range calibration."""

import dataclasses
import math
from typing import ClassVar, Self

import jax.numpy as jnp

from ...errors import QuantError
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class Fixed(AbstractCalibration):
    """The same range `low .. high` for every tile. The text `"fixed,m"` means `-m .. m`.

    Attributes:
        low: the lower end, at most 0.
        high: the upper end, at least 0 and above `low`.
    """

    name: ClassVar[str] = "fixed"
    clips: ClassVar[bool] = True
    exceeds_amax: ClassVar[bool] = True
    low: float
    high: float

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not all(isinstance(e, int | float) and math.isfinite(e) for e in ends) or not self.low <= 0 <= self.high:
            raise QuantError(f"fixed: the range is {self.low!r} .. {self.high!r}, must be finite and contain 0")
        if self.low == self.high:
            raise QuantError("fixed: the range is empty; give 'fixed,m' or 'fixed,low,high'")

    @classmethod
    def parse(cls, words: tuple[str, ...]) -> Self:
        if len(words) == 1:
            words = (f"-{words[0]}", words[0])
        if len(words) != 2:
            raise QuantError(f"fixed takes one value (the magnitude) or two (low, high), got {len(words)}")
        return super().parse(words)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        one = tiles.over(jnp.max, jnp.ones_like(tiles.x))
        return symmetric_or_range(one * self.low, one * self.high, target)


CALIBRATIONS.add("fixed", Fixed)

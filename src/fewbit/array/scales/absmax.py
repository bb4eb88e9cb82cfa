"""Absmax calibration."""

import dataclasses
from typing import ClassVar

from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, check_positive, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class AbsMax(AbstractCalibration):
    """Maps `factor * max|x|` to the largest code. Nothing saturates when the factor is at least 1.

    For an asymmetric target the range is `-max|x| .. max|x|`.

    Attributes:
        factor: 1 keeps the full range; smaller values clip outliers.
    """

    name: ClassVar[str] = "absmax"
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)

    @property
    def clips(self) -> bool:
        return self.factor < 1

    @property
    def exceeds_amax(self) -> bool:
        return self.factor > 1

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        high = tiles.amax * self.factor
        return symmetric_or_range(-high, high, target)


CALIBRATIONS.add("absmax", AbsMax)

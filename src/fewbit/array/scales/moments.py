"""RMS and mean-magnitude calibrations."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...formats.format import power_of_two, quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, check_positive, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class RMS(AbstractCalibration):
    """Maps `factor * sqrt(mean(x**2))` to the largest code.

    Attributes:
        factor: the range in root mean squares; elements beyond it saturate.
    """

    name: ClassVar[str] = "rms"
    clips: ClassVar[bool] = True
    exceeds_amax: ClassVar[bool] = True
    factor: float

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        exponent = tiles.exponent
        mean_square = tiles.mean(jnp.square(tiles.x * power_of_two(-exponent)), jnp.zeros_like(exponent))
        high = jnp.sqrt(mean_square) * power_of_two(exponent) * self.factor
        return symmetric_or_range(-high, high, target)


@dataclasses.dataclass(frozen=True)
class AbsMean(AbstractCalibration):
    """Maps `factor * mean|x|` to the largest code. This is BitNet b1.58's ternary and XNOR-Net's binary scale.

    For binary codes it has the least squared error. Elements beyond the range, which every tile has, keep their gradients,
    as in BitNet.

    Attributes:
        factor: the largest code in mean magnitudes.
    """

    name: ClassVar[str] = "absmean"
    exceeds_amax: ClassVar[bool] = True
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        high = tiles.mean(jnp.abs(tiles.x), tiles.exponent) * self.factor
        if not target.asymmetric:  # no range to cover: a power of two is the nearest
            return quotient(high, jnp.float32(target.format.bound)), None
        return symmetric_or_range(-high, high, target)


CALIBRATIONS.add("rms", RMS)
CALIBRATIONS.add("absmean", AbsMean)

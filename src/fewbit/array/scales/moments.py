"""Ranges from averages over the tile: the root mean square and the mean magnitude."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...formats.format import power_of_two
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, check_positive, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class RMS(AbstractCalibration):
    """`factor * sqrt(mean(x**2))` lands on the largest code.

    Attributes:
        factor: how many root mean squares the range holds; what lies beyond saturates.
    """

    name: ClassVar[str] = "rms"
    factor: float

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)

    @property
    def clips(self) -> bool:
        return True

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        exponent = tiles.exponent
        mean_square = tiles.mean(jnp.square(tiles.x * power_of_two(-exponent)), jnp.zeros_like(exponent))
        high = jnp.sqrt(mean_square) * power_of_two(exponent) * self.factor
        return symmetric_or_range(-high, high, target)


@dataclasses.dataclass(frozen=True)
class AbsMean(AbstractCalibration):
    """`factor * mean|x|` lands on the largest code: BitNet b1.58's scale for ternary, XNOR-Net's for binary weights.

    For binary codes the mean magnitude is the scale of least squared error. It leaves elements beyond the range in any tile, and
    they keep their gradients, as in BitNet.

    Attributes:
        factor: how many mean magnitudes the largest code stands for.
    """

    name: ClassVar[str] = "absmean"
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self.name, "factor", self.factor)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        high = tiles.mean(jnp.abs(tiles.x), tiles.exponent) * self.factor
        return symmetric_or_range(-high, high, target)


CALIBRATIONS.add("rms", RMS)
CALIBRATIONS.add("absmean", AbsMean)

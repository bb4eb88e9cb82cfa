"""Ranges from averages over the tile: the root mean square and the mean magnitude."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...errors import QuantError
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles, symmetric_or_range


@dataclasses.dataclass(frozen=True)
class RMS(AbstractCalibration):
    """`factor * sqrt(mean(x**2))` lands on the largest code.

    Attributes:
        factor: how many root mean squares the range holds; what lies beyond saturates.
    """

    name: ClassVar[str] = "rms"
    factor: float

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int | float) or not self.factor > 0:
            raise QuantError(f"rms: factor is {self.factor!r}, must be a positive number, as in 'rms,7'")

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        high = jnp.sqrt(tiles.over(jnp.sum, jnp.square(tiles.x)) / tiles.count) * self.factor
        return symmetric_or_range(-high, high, target)


@dataclasses.dataclass(frozen=True)
class AbsMean(AbstractCalibration):
    """`factor * mean|x|` lands on the largest code: BitNet b1.58's scale for ternary, XNOR-Net's for binary weights.

    For binary codes the mean magnitude is the scale of least squared error.

    Attributes:
        factor: how many mean magnitudes the largest code stands for.
    """

    name: ClassVar[str] = "absmean"
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.factor, int | float) or not self.factor > 0:
            raise QuantError(f"absmean: factor is {self.factor!r}, must be a positive number")

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        high = tiles.over(jnp.sum, jnp.abs(tiles.x)) / tiles.count * self.factor
        return symmetric_or_range(-high, high, target)


CALIBRATIONS.add("rms", RMS)
CALIBRATIONS.add("absmean", AbsMean)

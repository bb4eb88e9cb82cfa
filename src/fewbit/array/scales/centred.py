"""Centred absmax calibration: bitsandbytes' rule for double-quantized scales."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...errors import UnsupportedError
from ...formats.format import quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles


@dataclasses.dataclass(frozen=True)
class CentredAbsMax(AbstractCalibration):
    """The offset is the array's mean. `max|x - mean|` of each tile maps to the largest code.

    Reference: QLoRA (arXiv 2305.14314), section 3, double quantization.
    """

    name: ClassVar[str] = "centred"
    exceeds_amax: ClassVar[bool] = True

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if not target.asymmetric:
            raise UnsupportedError("centred needs a scheme with a float offset (zero_point='float32')")
        whole = dataclasses.replace(tiles, within=tuple(range(tiles.x.ndim)))
        mean = whole.mean(tiles.x, whole.exponent)
        high = tiles.over(jnp.max, jnp.abs(tiles.x - mean))
        return quotient(high, jnp.float32(target.format.bound)), mean


CALIBRATIONS.add("centred", CentredAbsMax)

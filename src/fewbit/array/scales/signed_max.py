"""ggml's rule for Q4_0 and Q5_0: the element of largest magnitude lands on the most negative code, sign and all."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...errors import UnsupportedError
from ...formats.format import quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles


@dataclasses.dataclass(frozen=True)
class SignedMax(AbstractCalibration):
    """`scale = m / min` where `m` is the element of largest magnitude and `min` the format's most negative number.

    The scale takes either sign, so the one code that a full signed range has more on its negative side is always put to
    use. Of elements of equal magnitude the first counts, as in ggml.
    """

    name: ClassVar[str] = "signed_max"

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if target.asymmetric or not target.format.is_signed:
            raise UnsupportedError(f"signed_max needs a signed format without a zero point, not {target.format.name}")
        if len(tiles.within) > 1:
            raise UnsupportedError("signed_max needs a tile on one axis only")
        largest = tiles.x if tiles.valid is None else jnp.where(tiles.valid, tiles.x, 0)
        for axis in tiles.within:  # none where each element is a tile
            where = jnp.argmax(jnp.abs(largest), axis=axis, keepdims=True)
            largest = jnp.take_along_axis(largest, where, axis=axis)
        return quotient(largest, jnp.float32(target.format.min)), None


CALIBRATIONS.add("signed_max", SignedMax)

"""ggml's calibration for Q4_0 and Q5_0."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from ...errors import UnsupportedError
from ...formats.format import quotient
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles


@dataclasses.dataclass(frozen=True)
class SignedMax(AbstractCalibration):
    """Maps the element of largest magnitude to the most negative number. For this element `m`, `scale = m / min`.

    The scale may be negative, so the extra negative code of a full signed range is always used. Of equal magnitudes the
    first wins, as in ggml.
    """

    name: ClassVar[str] = "signed_max"

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if target.asymmetric or not target.format.is_signed:
            raise UnsupportedError(f"signed_max needs a signed format without a zero point, not {target.format.name}")
        if len(tiles.within) > 1:
            raise UnsupportedError("signed_max needs a tile on one axis only")
        largest = tiles.padded(tiles.x, 0)
        for axis in tiles.within:  # empty if each element is a tile
            where = jnp.argmax(jnp.abs(largest), axis=axis, keepdims=True)
            largest = jnp.take_along_axis(largest, where, axis=axis)
        return quotient(largest, jnp.float32(target.format.min)), None


CALIBRATIONS.add("signed_max", SignedMax)

"""The mask of elements that do not saturate."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._tiles import blocked, blocked_scale, unblocked
from ..formats.format import AbstractFormat, quotient
from .qarray import QArray
from .quantize import scale_values
from .scales.calibration import Target
from .scales.search.candidates import numbers_of
from .scales.store import ScaleStore

# A scale and a quotient by it are rounded once each, so the end of a range may be off by two roundings.
_EDGE = 1 + 2.0**-22


def is_covered(x: Float[Array, "*s"], q: QArray) -> Bool[Array, "*s"]:
    """A mask of `x`: False where the code saturates, by more than half a step. True for NaN.

    Args:
        x: the array before quantization.
        q: its quantized form.

    Returns:
        A mask of the shape of `x`: False where the code saturates and its error is larger than rounding makes it.
    """
    tiles, fmt = q.tiles, q.scheme.format
    scale = blocked_scale(scale_values(q), tiles)
    divisor = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    wide = blocked(x.astype(jnp.float32), tiles)[0]
    if q.zero_point is not None:
        target = Target(fmt, ScaleStore(np.dtype(np.float32)), q.scheme.zero_holder)
        wide = wide - target.loaded_offset(blocked_scale(q.zero_point, tiles), divisor)
    low, high = _edges(fmt)
    ratio = quotient(wide, divisor)
    return unblocked(~((ratio < low * _EDGE) | (ratio > high * _EDGE)), x.shape, tiles)


def _edges(fmt: AbstractFormat) -> tuple[float, float]:
    """The range of a format, extended by half a step at both ends."""
    numbers = numbers_of(fmt)
    return float(1.5 * numbers[0] - 0.5 * numbers[1]), float(1.5 * numbers[-1] - 0.5 * numbers[-2])

"""Which elements the numbers of their tile cover: where a straight-through gradient may pass."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._tiles import blocked, blocked_scale, unblocked
from ..formats import AbstractFormat
from ..formats.format import quotient
from .qarray import QArray
from .quantize import scale_values
from .scales import ScaleStore, Target

# A scale and a quotient by it are rounded once each, so the edge of a range may come out two roundings beyond itself.
_EDGE = 1 + 2.0**-22


def is_covered(x: Float[Array, "*s"], q: QArray) -> Bool[Array, "*s"]:
    """Whether each element lies within half a step of the numbers that its tile can hold; NaN does.

    Args:
        x: the array that was quantized.
        q: what it was quantized to.

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
    """Half a step below the smallest number of a format, and half a step above its largest."""
    values = fmt.values()
    numbers = np.unique(values[(values >= fmt.min) & (values <= fmt.max)])
    return float(1.5 * numbers[0] - 0.5 * numbers[1]), float(1.5 * numbers[-1] - 0.5 * numbers[-2])

"""Scales for stochastic rounding: no element saturates, so every element is right on average.

Rounding to the nearest may leave the largest element of a tile up to half a step beyond the last code, and a search may choose
to clip it. Rounded stochastically, such an element cannot go up, and its mean is too small. So with a key the scale is the
smallest at which nothing saturates, and what is stored is rounded up, never to the nearest.

A calibration that clips on purpose (`fixed`, `percentile`, `absmax,0.9`, ...) keeps its range, widened by the half step that
rounding to the nearest covers beyond it. Elements beyond that range are not representable, and saturate.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ...formats import AbstractFormat
from ...formats.format import quotient
from .calibration import AbstractCalibration, Scale, Target, Tiles


def unsaturated(tiles: Tiles, target: Target, calibration: AbstractCalibration) -> Scale:
    """The smallest scale (and its offset) of each tile at which no element saturates, but for those clipped on purpose.

    Args:
        tiles: what is quantized.
        target: what the scales are for.
        calibration: the scheme's own rule. A search is not run: its scale is best for rounding to the nearest.

    Returns:
        As `AbstractCalibration.scale`; `ScaleStore.stored_up` and `Target.stored_zero_up` keep it unsaturated when stored.

    Raises:
        UnsupportedError: for whole zero points of one bit, which leave no code to shift by.

    >>> from fewbit.formats import FORMATS
    >>> from fewbit.array.scales import AbsMax, ScaleStore
    >>> tile = Tiles(jnp.array([[7.0, -7.0, 1.0]]), within=(1,))
    >>> target = Target(FORMATS["int4"], ScaleStore(np.dtype("float32")))
    >>> unsaturated(tile, target, AbsMax())[0].item()
    1.0
    """
    if target.asymmetric:
        return _asymmetric(tiles, target, calibration)
    scale = None if calibration.uses_error_weights else calibration.scale(tiles, target)[0]
    low, high = _ends(tiles)
    sign = jnp.ones_like(high) if scale is None else jnp.where(scale < 0, -1.0, 1.0)
    fmt = target.format
    needed = _needed(jnp.where(sign < 0, -high, low), jnp.where(sign < 0, -low, high), fmt)
    if scale is None:
        return needed, None
    if calibration.clips:
        needed = jnp.minimum(needed, jnp.abs(scale) * jnp.float32(_covered(fmt) / fmt.max))
    return sign * jnp.maximum(jnp.abs(scale), needed), None


def _asymmetric(tiles: Tiles, target: Target, calibration: AbstractCalibration) -> Scale:
    """The scale and the offset of a range that need not be centred at zero."""
    fmt, (low, high) = target.format, _ends(tiles)
    is_whole = isinstance(target.zero, AbstractFormat)
    codes = fmt.max - fmt.min - is_whole  # a whole zero point shifts the range by up to one code
    if codes < 1:
        raise UnsupportedError(f"stochastic rounding with a whole zero point needs two bits or more, not {fmt.name}")
    if is_whole:
        low, high = jnp.minimum(low, 0), jnp.maximum(high, 0)
    smallest = jnp.zeros_like(high)
    offset = None
    if not calibration.uses_error_weights:
        smallest, offset = calibration.scale(tiles, target)
        assert offset is not None
        if calibration.clips:
            low = jnp.maximum(low, offset + jnp.float32(fmt.min) * smallest)
            high = jnp.minimum(high, offset + jnp.float32(fmt.max) * smallest)
    if is_whole:
        scale = jnp.maximum(smallest, quotient(high, jnp.float32(codes)) - quotient(low, jnp.float32(codes)))
        return scale, low - jnp.float32(fmt.min) * scale
    # A float offset is rounded when it is stored; the scale makes up for it.
    if fmt.min == 0 or offset is None:
        offset = low if fmt.min == 0 else low / 2 + high / 2
    offset = target.loaded_offset(target.stored_zero_up(offset, smallest), smallest)
    return jnp.maximum(smallest, _needed(low - offset, high - offset, fmt)), offset


def _ends(tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest element of each tile."""
    x, valid = tiles.x, tiles.valid
    low, high = (x, x) if valid is None else (jnp.where(valid, x, jnp.inf), jnp.where(valid, x, -jnp.inf))
    return jnp.min(low, axis=tiles.within, keepdims=True), jnp.max(high, axis=tiles.within, keepdims=True)


def _needed(low: jax.Array, high: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The smallest scale at which the range from `low` to `high` lies within the numbers of the format."""
    needed = quotient(jnp.maximum(high, 0), jnp.float32(fmt.max))
    return needed if fmt.min == 0 else jnp.maximum(needed, quotient(jnp.maximum(-low, 0), jnp.float32(-fmt.min)))


def _covered(fmt: AbstractFormat) -> float:
    """The largest number of the format, and half a step: how far rounding to the nearest reaches."""
    values = fmt.values()
    numbers = np.unique(values[(values >= fmt.min) & (values <= fmt.max)])
    return float(1.5 * numbers[-1] - 0.5 * numbers[-2])

"""Scales for stochastic rounding: no element saturates.

With rounding to nearest, the largest element of a tile may be up to half a step beyond the last code, and a search may clip
it. Rounded stochastically, such an element would have a biased mean. So with a key the scale is the smallest at which
nothing saturates, and stored scales are rounded up.

A calibration that clips on purpose (`fixed`, `percentile`, `absmax,0.9`, ...) keeps its range, widened by the half step that
rounding to nearest covers. Elements beyond that range saturate.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import UnsupportedError
from ...formats.format import AbstractFormat, quotient
from .calibration import AbstractCalibration, Scale, Target, Tiles
from .search.candidates import numbers_of
from .store import ScaleStore


def unsaturated(tiles: Tiles, target: Target, calibration: AbstractCalibration) -> Scale:
    """The smallest scale of each tile without unwanted saturation.

    With its offset. Only elements clipped on purpose saturate.

    Args:
        tiles: the blocked array.
        target: the formats of codes and scales.
        calibration: the scheme's rule. Searches are not run: their scales are best for rounding to nearest.

    Returns:
        As `AbstractCalibration.scale`; to be stored with `ScaleStore.stored_up` and `Target.stored_zero_up`.

    Raises:
        UnsupportedError: for one-bit integer zero points, which leave no code to shift by.

    >>> from fewbit.formats import FORMATS
    >>> from fewbit.array.scales import AbsMax, ScaleStore
    >>> tile = Tiles(jnp.array([[7.0, -7.0, 1.0]]), within=(1,))
    >>> target = Target(FORMATS["int4"], ScaleStore(np.dtype("float32")))
    >>> unsaturated(tile, target, AbsMax())[0].item()
    1.0
    """
    # The scale of the calibration is needed before it is rounded.
    target = dataclasses.replace(target, store=ScaleStore(np.dtype(np.float32)))
    if target.asymmetric:
        return _asymmetric(tiles, target, calibration)
    low, high = _ends(tiles)
    fmt = target.format
    if calibration.uses_error_weights:
        return _needed(low, high, fmt), None
    scale, _ = calibration.scale(tiles, target)
    sign = jnp.where(scale < 0, -1.0, 1.0)
    needed = _needed(jnp.where(sign < 0, -high, low), jnp.where(sign < 0, -low, high), fmt)
    if calibration.clips:
        needed = jnp.minimum(needed, jnp.abs(scale) * jnp.float32(_covered(fmt) / fmt.max))
    return sign * jnp.maximum(jnp.abs(scale), needed), None


def _asymmetric(tiles: Tiles, target: Target, calibration: AbstractCalibration) -> Scale:
    """The scale and the offset for an asymmetric target."""
    fmt, (low, high) = target.format, _ends(tiles)
    is_whole = isinstance(target.zero, AbstractFormat)
    codes = fmt.max - fmt.min - is_whole  # an integer zero point shifts the range by up to one code
    if codes < 1:
        raise UnsupportedError(f"stochastic rounding with an integer zero point needs two bits or more, not {fmt.name}")
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
    # A float offset is rounded when it is stored; the scale compensates.
    if fmt.min == 0:
        offset = low
    elif offset is None:
        offset = low / 2 + high / 2
    offset = target.loaded_offset(target.stored_zero_up(offset, smallest), smallest)
    return jnp.maximum(smallest, _needed(low - offset, high - offset, fmt)), offset


def _ends(tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest element of each tile."""
    low, high = tiles.padded(tiles.x, jnp.inf), tiles.padded(tiles.x, -jnp.inf)
    return jnp.min(low, axis=tiles.within, keepdims=True), jnp.max(high, axis=tiles.within, keepdims=True)


def _needed(low: jax.Array, high: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The smallest scale at which the range from `low` to `high` does not saturate."""
    needed = quotient(jnp.maximum(high, 0), jnp.float32(fmt.max))
    if fmt.min == 0:
        return needed
    return jnp.maximum(needed, quotient(jnp.maximum(-low, 0), jnp.float32(-fmt.min)))


def _covered(fmt: AbstractFormat) -> float:
    """The largest number of the format plus half a step. Rounding to nearest reaches so far."""
    numbers = numbers_of(fmt)
    return float(1.5 * numbers[-1] - 0.5 * numbers[-2])

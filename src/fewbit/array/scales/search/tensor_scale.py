"""Search for NVFP4's tensor scale.

The usual choice, `g = amax / (fmt.max * 448)`, gives the tile with the largest element the largest E4M3 scale. Tiles of
similar amax then have no larger scale to choose, which costs up to a fifth of the error where few rows carry most of it. So
`1.5 g` and `1.75 g` are tried too: 1.75 is 448 / 256, which provides six codes above the largest scale, as many as any tile
can use. The fourth candidate is the smallest power of two from `1.75 g` on (at most 1 if `g` is): its scales include those
of the scheme without tensor scale that any tile can use, so the result is never worse than one level of scales.

Every candidate is judged by the exact search of its tiles' scales, whose windows are valid for any tensor scale from `g` on.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ...._tiles import Tile, blocked, valid_elements
from ....formats.format import AbstractFormat, exponent_of, power_of_two, quotient, settled
from ..calibration import AbstractCalibration, Target, Tiles, better, largest_magnitude
from ..limits import largest_unit
from ..store import ScaleStore

JUDGED_WHOLE = 2**20
"""Arrays of more elements are judged by a sample."""
SAMPLE, LEAST_ROWS = 2**18, 8
"""How many elements a sample has: half from the rows of largest magnitude, half from equally spaced rows; of each, how many rows
at least, however long they are. docs/design/kernels-cpu.md has what larger samples and smaller ones cost and lose."""


@dataclasses.dataclass(frozen=True)
class TensorScaleKernels:
    """Kernels that compute parts of the search, faster and to the same numbers.

    Attributes:
        rounded: what an array with these tiles becomes under a tensor scale: quantized and dequantized.
        row_magnitudes: of a float32 array `[..., K]`: `[..., 2]`, the largest finite magnitude of each row, and its largest
            magnitude, which is infinite if a number is not finite.
    """

    rounded: Callable[[jax.Array, tuple[Tile, ...], jax.Array], jax.Array]
    row_magnitudes: Callable[[jax.Array], jax.Array]


def best_tensor_scale(
    x: jax.Array,
    weights: jax.Array | None,
    tiles: tuple[Tile, ...],
    smallest: jax.Array,
    fmt: AbstractFormat,
    holder: AbstractFormat,
    calibration: AbstractCalibration,
    kernels: TensorScaleKernels | None = None,
    row_magnitudes: jax.Array | None = None,
) -> jax.Array:
    """The tensor scale of least weighted squared error among the four candidates.

    Args:
        x: the array, float32. Tiles that are not finite are ignored.
        weights: of the squared errors, shaped like `x`; None: all equal.
        tiles: the tile of each axis.
        smallest: the smallest tensor scale at which no tile saturates, one element.
        fmt: the format of the codes.
        holder: the format of the tiles' scales.
        calibration: the search of the tiles' scales.
        kernels: faster ways to the same numbers; None: plain JAX.
        row_magnitudes: the kernel's result for `x`, if it is there.

    Returns:
        The scale, shaped like `smallest`. Ties (totals equal to 16 bits) go to the smallest.
    """
    x, smallest = jax.lax.stop_gradient(x), jax.lax.stop_gradient(smallest)
    judged, weights, tiles, counts = _judged(x, weights, tiles, row_magnitudes)
    view = _view(judged, weights, tiles)
    exponent = exponent_of(smallest).reshape(())  # in these units squared errors neither overflow nor underflow

    def rounded(unit: jax.Array) -> jax.Array:
        if kernels is not None:
            return blocked(kernels.rounded(judged, tiles, unit), tiles)[0]
        target = Target(fmt, ScaleStore(holder, unit.reshape((1,) * view.x.ndim)))
        scale = target.store.snapped(calibration.scale(view, target)[0])
        scale = jnp.where(scale > 0, scale, jnp.ones_like(scale))
        return settled(fmt.nearest(quotient(view.x, scale)) * scale)

    def total_error(unit: jax.Array) -> jax.Array:
        error = (rounded(unit) - view.x) * power_of_two(-exponent)
        errors = jnp.where(view.is_finite, view.weighted_total(jnp.square(error)), 0)
        if counts is not None:
            errors = errors * counts.reshape(-1, *[1] * (errors.ndim - 1))
        for axis in reversed(range(errors.ndim)):  # many small sums round less than one long one
            errors = jnp.sum(errors, axis=axis)
        return errors

    largest = largest_unit(fmt, ScaleStore(holder).largest)
    units = jnp.minimum(_candidates(smallest.reshape(())), jnp.float32(largest))
    errors = jax.lax.map(total_error, units)
    best: tuple[jax.Array, ...] = units[0], errors[0]
    for candidate in zip(units[1:], errors[1:], strict=True):
        best = better(candidate, best)
    return best[0].reshape(smallest.shape)


def _candidates(smallest: jax.Array) -> jax.Array:
    largest = smallest * 1.75
    exponent = exponent_of(largest)
    power = power_of_two(exponent + (power_of_two(exponent) < largest).astype(jnp.int32))
    power = jnp.where(smallest <= 1, jnp.minimum(power, 1), power)
    return jnp.stack([smallest, smallest * 1.5, largest, power])


def _view(x: jax.Array, weights: jax.Array | None, tiles: tuple[Tile, ...]) -> Tiles:
    view, within = blocked(x, tiles)
    if weights is not None:
        weights = blocked(weights, tiles)[0]
    return Tiles(view, within, valid_elements(x.shape, tiles), weights)


def _judged(
    x: jax.Array, weights: jax.Array | None, tiles: tuple[Tile, ...], row_magnitudes: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, tuple[Tile, ...], jax.Array | None]:
    """The sampled rows with their weights and tiles, and how many tiles each represents. None if all tiles are used."""
    tiled = [axis for axis, tile in enumerate(tiles) if tile != 1]
    is_sharded = jax.typeof(x).sharding.spec != jax.P(*[None] * x.ndim)
    if x.size <= JUDGED_WHOLE or len(tiled) != 1 or is_sharded:
        return x, weights, tiles, None
    length = x.shape[tiled[0]]
    many = max(LEAST_ROWS, SAMPLE // 2 // length)
    if x.size // length <= 2 * many:  # the sample would be as large
        return x, weights, tiles, None
    rows = jnp.moveaxis(x, tiled[0], -1).reshape(-1, length)
    if row_magnitudes is not None and tiled[0] == x.ndim - 1:
        amax = row_magnitudes[..., 1].reshape(-1)
    else:
        amax = largest_magnitude(rows, 1)[:, 0]
    amax = jnp.where(jnp.isfinite(amax), amax, 0)
    largest, top = jax.lax.top_k(amax, many)
    even = np.arange(many) * len(rows) // many
    is_other = amax[even] < largest[-1]
    share = quotient(jnp.float32(len(rows) - many), jnp.maximum(jnp.sum(is_other.astype(jnp.float32)), 1))
    counts = jnp.concatenate([jnp.ones(many, jnp.float32), jnp.where(is_other, share, 0)])
    picked = jnp.concatenate([top, jnp.asarray(even, top.dtype)])
    if weights is not None:
        weights = jnp.moveaxis(weights, tiled[0], -1).reshape(-1, length)[picked]
    return rows[picked], weights, (1, tiles[tiled[0]]), counts

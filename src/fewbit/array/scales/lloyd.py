"""Codebooks learned from weights by Lloyd's algorithm."""

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..._tiles import blocked
from ...errors import QuantError
from ...formats.codebook import Codebook


def learned_codebook(
    x: ArrayLike,
    *,
    tile: int,
    bits: int = 4,
    axis: int = -1,
    error_weights: ArrayLike | None = None,
    name: str = "learned",
    rounds: int = 200,
) -> Codebook:
    """The symmetric codebook of least squared error under absmax scales.

    Lloyd's algorithm on `|x| / amax` with weights `error_weights * amax**2`: each number moves to the weighted mean of the
    magnitudes nearest to it; zero is fixed. It starts from weighted quantiles and ends when nothing moves, so it is
    deterministic. All-zero tiles have no effect. Not jit-compatible: a format is static.

    Args:
        x: floating array, finite.
        tile: how many elements along `axis` share a scale.
        bits: bits per code; the codebook has `2**bits - 1` numbers: zero, and `2**(bits - 1) - 1` magnitudes of either sign.
        axis: the axis of the tiles.
        error_weights: weights of the squared errors, broadcast to `x`; None: all equal.
        name: the name of the format.
        rounds: the maximum number of rounds.

    Returns:
        A Codebook whose largest number is 1. Use it in a Scheme with a calibration that searches (`mse`).

    Raises:
        QuantError: for bits outside 2..8, a tile below 1, an array that is not finite, or one with fewer distinct magnitudes than numbers.

    >>> w = np.random.default_rng(0).standard_normal((64, 64))
    >>> [round(v, 2) for v in learned_codebook(w, tile=16, bits=3).table]
    [-1.0, -0.58, -0.27, 0.0, 0.27, 0.58, 1.0]
    """
    if not 2 <= bits <= 8:
        raise QuantError(f"bits is {bits}; a symmetric codebook with zero has 2 to 8")
    if tile < 1:
        raise QuantError(f"tile is {tile}, must be at least 1")
    magnitude = np.abs(_tiled(x, tile, axis))
    if not np.isfinite(magnitude).all():
        raise QuantError("x is not finite; a codebook cannot be learned from NaN or infinity")
    weights = np.ones_like(magnitude)
    if error_weights is not None:
        weights = _tiled(jnp.broadcast_to(jnp.asarray(error_weights, jnp.float32), jnp.shape(x)), tile, axis)
    amax = magnitude.max(-1, keepdims=True)
    ratio, mass = magnitude / np.where(amax > 0, amax, 1), weights * amax**2
    # Zeros, including padding and all-zero tiles, are exact whatever the numbers are.
    counts = ratio > 0
    numbers = _centres(ratio[counts], mass[counts], 2 ** (bits - 1) - 1, rounds)
    numbers = numbers / numbers[-1]
    return Codebook(name, (*(-numbers[::-1]).tolist(), 0.0, *numbers.tolist()))


def _tiled(x: ArrayLike, tile: int, axis: int) -> np.ndarray:
    """The array in zero-padded tiles of its last axis, float64."""
    array = jnp.moveaxis(jnp.asarray(x).astype(jnp.float32), axis, -1)
    return np.asarray(blocked(array, (*(1,) * (array.ndim - 1), tile))[0], np.float64)


def _centres(values: np.ndarray, weights: np.ndarray, count: int, rounds: int) -> np.ndarray:
    """Positive numbers that, with zero, have the least weighted squared error.

    There are `count`, in ascending order; the minimum is a local one.
    """
    order = np.argsort(values, kind="stable")
    values, weights = values[order], weights[order]
    if len(np.unique(values[weights > 0])) < count:
        raise QuantError(f"x has fewer than {count} different magnitudes of nonzero weight; use fewer bits")
    mass = np.concatenate([[0.0], np.cumsum(weights)])
    moment = np.concatenate([[0.0], np.cumsum(weights * values)])
    places = np.searchsorted(mass, mass[-1] * (np.arange(count) + 1) / (count + 0.5)) - 1
    centres = values[places.clip(0, len(values) - 1)]
    if len(np.unique(centres)) < count:
        centres = np.linspace(0, 1, count + 1)[1:] * values[-1]
    for _ in range(rounds):
        middles = (np.concatenate([[0.0], centres[:-1]]) + centres) / 2
        edges = np.concatenate([np.searchsorted(values, middles), [len(values)]])
        own = np.diff(mass[edges])
        moved = np.where(own > 0, np.diff(moment[edges]) / np.where(own > 0, own, 1), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres

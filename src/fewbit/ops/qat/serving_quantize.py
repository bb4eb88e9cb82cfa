"""Quantizes a parameter as at serving."""

import dataclasses
from collections.abc import Callable

import jax

from ...array.qarray import QArray
from ...array.scheme import Scheme, laid_along
from ...kernels.quantize.dispatch import quantize
from .serving_tiles import ServingTiles, axis_within, cast, normalized


def quantized_as_served(x: jax.Array, tiles: ServingTiles, scheme: Scheme, axis: tuple[int, ...] | None = None) -> QArray:
    """The array quantized as at serving, packed along the last contraction axis of `axis`."""
    if tiles.casts:
        uncast = dataclasses.replace(tiles, casts=())
        return quantized_as_served(cast(x, tiles.casts), uncast, scheme, axis).astype(x.dtype)
    if tiles.looped:
        inner = tuple(a for a in range(-x.ndim, 0) if a not in tiles.looped)
        within = ServingTiles(tuple(tiles.tiles[a] for a in inner))
        if axis is not None:
            axis = axis_within(tuple(a % x.ndim - x.ndim for a in axis), tiles.looped, x.ndim)
        return for_each(tiles.looped, lambda x: quantized_as_served(x, within, scheme, axis), x)
    if axis is not None and _is_along(tiles, scheme, axis, x.shape):
        return quantize(x, scheme, axis=axis)
    if axis is not None:
        packed = axis[-1]
    else:
        tiled = [a for a, (t, n) in enumerate(zip(tiles.tiles, x.shape, strict=True)) if normalized(t, n) != 1]
        packed = max(tiled, default=x.ndim - 1)
    lengths = list(tiles.tiles)
    lengths.append(lengths.pop(packed))  # `quantize` takes its axis's tile from the last
    return quantize(x, scheme.with_tiles(tuple(lengths), -1), axis=packed)


def _is_along(tiles: ServingTiles, scheme: Scheme, axis: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    along = laid_along(scheme, axis, shape).tiles(len(shape))
    pairs = zip(tiles.tiles, along, shape, strict=True)
    return all(normalized(own, n) == normalized(other, n) for own, other, n in pairs)


def for_each(stacked: tuple[int, ...], one: Callable[[jax.Array], QArray], x: jax.Array) -> QArray:
    """Maps a function over the stacked axes (negative), which keep their places."""
    order = [a % x.ndim for a in (*stacked, *(a for a in range(-x.ndim, 0) if a not in stacked))]
    for _ in stacked:
        one = jax.vmap(one)
    if order == sorted(order):
        return one(x)
    return one(x.transpose(order)).transpose(*map(order.index, range(x.ndim)))

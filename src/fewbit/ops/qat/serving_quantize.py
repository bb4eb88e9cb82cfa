"""Quantizes a parameter as at serving."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...array.qarray import QArray
from ...array.scheme import Scheme, laid_along
from ...array.sharding import axis_names, spec_entries
from ...errors import UnsupportedError
from ...kernels.quantize.dispatch import quantize
from ..interpret.proxy import NoRuleError
from .latent import Latent
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
            own = tuple(a % x.ndim - x.ndim for a in axis if a % x.ndim - x.ndim not in tiles.looped)
            axis = axis_within(own, tiles.looped, x.ndim) or None
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


def quantized_latent(latent: Latent) -> QArray | None:
    """A trained parameter quantized as at serving, without a gradient. None where each product decides."""
    if latent.prequantized is not None or latent.served is None:
        return latent.prequantized
    return quantized_as_served(jax.lax.stop_gradient(latent.value), latent.served.on_last(latent.ndim), latent.policy.weight)


def cut_latent(latent: Latent, spec: PartitionSpec, mesh: Mapping[str, int]) -> QArray | None:
    """A trained parameter quantized for `shard_map`, or None.

    It is quantized where shards separate elements that share a scale.

    Args:
        latent: the parameter.
        spec: how it is cut.
        mesh: the size of each axis of the mesh.

    Returns:
        The quantized parameter, with a scale for every shard.

    Raises:
        UnsupportedError: where a tile or a byte of codes has elements of two shards.
    """
    from ..interpret.rules.sharding import sharded_ready  # its package imports every rule

    q = latent.prequantized
    if q is None and latent.served is not None:
        parts = tuple(math.prod(mesh[name] for name in axis_names(entry)) for entry in spec_entries(spec, latent.ndim))
        if latent.served.on_last(latent.ndim).are_cut(latent.policy.weight, latent.shape, parts):
            q = quantized_latent(latent)
    if q is None:
        return None
    try:
        return sharded_ready(q, spec, mesh)
    except NoRuleError as error:
        raise UnsupportedError(f"shard_map cannot cut a trained parameter as {spec}", {repr(latent): str(error)}) from error


def _is_along(tiles: ServingTiles, scheme: Scheme, axis: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    along = laid_along(scheme, axis, shape).tiles(len(shape))
    pairs = zip(tiles.tiles, along, shape, strict=True)
    return all(normalized(own, n) == normalized(other, n) for own, other, n in pairs)


def for_each(stacked: tuple[int, ...], one: Callable[..., QArray], x: jax.Array, *others: PyTree) -> QArray:
    """Maps a function over the stacked axes (negative) of `x`, which keep their places.

    The leaves of `others` have these axes first. With others, one element is computed after another, to save memory.
    """
    order = [a % x.ndim for a in (*stacked, *(a for a in range(-x.ndim, 0) if a not in stacked))]
    for _ in stacked:
        one = _one_by_one(one) if others else jax.vmap(one)
    if order == sorted(order):
        return one(x, *others)
    return one(x.transpose(order), *others).transpose(*map(order.index, range(x.ndim)))


def _one_by_one(one: Callable[..., QArray]) -> Callable[..., QArray]:
    return lambda *args: jax.lax.map(lambda args: one(*args), args)

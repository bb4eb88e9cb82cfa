"""Concatenates, repeats, reverses and repacks QArrays without requantizing."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...._tiles import Tile
from ....array.leaves import taken_rows, with_leaves
from ....array.packing import code_capacity, codes_per_unit, pack, unpack
from ....array.qarray import QArray
from ....errors import QuantError
from ..proxy import NoRuleError


def tile_length(q: QArray, axis: int) -> int:
    """The tile (block) length along an axis."""
    return q.tiles[axis] or q.shape[axis]


def spread(leaf: Any, axis: int, count: int) -> Any:
    """A scale (or zero point, or tensor scale) broadcast to `count` elements along an axis."""
    shape = (*leaf.shape[:axis], count, *leaf.shape[axis + 1 :])
    if leaf.shape == shape:
        return leaf
    if isinstance(leaf, QArray):
        return broadcasted(leaf, shape)
    return jnp.broadcast_to(leaf, shape)


def is_packed_along(q: QArray, axis: int) -> bool:
    """Whether codes share bytes along an axis."""
    return axis == q.scheme.pack_axis + q.ndim and unit_of(q) > 1


def is_cut_along(q: QArray, axis: int) -> bool:
    """Whether taking elements along an axis would cut bytes, of the codes or of quantized scales."""
    has_packed_scales = isinstance(q.scale, QArray) and q.scale.shape[axis] > 1 and is_cut_along(q.scale, axis)
    return has_packed_scales or is_packed_along(q, axis)


def unit_of(q: QArray) -> int:
    """The number of codes at whose multiples the packed axis can be cut."""
    return codes_per_unit(q.scheme.format.bits, q.scheme.packing)


def joined(parts: Sequence[QArray], axis: int, join: Callable[[list[Any]], Any], times: int = 1) -> QArray:
    """Concatenates arrays of the same scheme along an axis. Every part keeps its scales.

    `join` concatenates corresponding leaves; the parts repeat `times` times (once per device, for an all-gather). NoRuleError
    when schemes or tiles differ, or a tile or byte would contain elements of two parts.
    """
    first, inner = parts[0], parts
    if times == 1:
        inner = parts[:-1]
    length = tile_length(first, axis)
    if length == 0:
        raise NoRuleError("the first of the joined arrays has no elements, and so no tiles")
    for part in parts:
        _refuse_other_scheme(part, first, axis)
        if part.scale.shape[axis] != -(-part.shape[axis] // length):
            raise NoRuleError("the tiles along the joined axis have different lengths")
    if any(part.shape[axis] % length for part in inner):
        raise NoRuleError(f"a tile of {length} would extend over two parts")
    if is_packed_along(first, axis) and any(part.slack or part.shape[axis] % unit_of(first) for part in inner):
        raise NoRuleError("a byte would contain codes of two parts")
    total = times * sum(part.shape[axis] for part in parts)
    tiles: list[Tile] = list(first.tiles)
    tiles[axis] = length
    if length == total > 1:
        tiles[axis] = None

    def leaf(name: str) -> Any:
        leaves = [getattr(part, name) for part in parts]
        if isinstance(leaves[0], QArray):
            return joined(leaves, axis, join, times)
        return join([spread(x, axis, part.scale.shape[axis]) for x, part in zip(leaves, parts, strict=True)])

    names = ("scale", "zero_point", "tensor_scale")
    leaves = {name: leaf(name) for name in names if getattr(first, name) is not None}
    scheme = first.scheme.with_tiles(tuple(tiles), first.scheme.pack_axis)
    codes, slack = join([part.codes for part in parts]), first.slack
    if axis == first.scheme.pack_axis + first.ndim:
        slack = code_capacity(codes.shape[axis], scheme.format.bits) - total
    return dataclasses.replace(first, codes=codes, scheme=scheme, slack=slack, **leaves)


def _refuse_other_scheme(part: QArray, first: QArray, axis: int) -> None:
    """Raises NoRuleError unless schemes, shapes and the other axes' tiles of two arrays agree."""

    def form(q: QArray) -> tuple[Any, ...]:
        leaves = {"codes": q.codes, "scale": q.scale, "zero_point": q.zero_point, "tensor_scale": q.tensor_scale}
        shapes = {name: others(x.shape) for name, x in leaves.items() if x is not None}
        return (
            dataclasses.replace(q.scheme, tile={}),
            q.dtype,
            q.policy,
            others(q.tiles),
            q.scheme.pack_axis + q.ndim,
            shapes,
        )

    def others(of_axes: Sequence[Any]) -> list[Any]:
        return [x for a, x in enumerate(of_axes) if a != axis]

    if form(part) != form(first):
        raise NoRuleError("the schemes of the joined arrays differ")


def broadcasted(q: QArray, shape: tuple[int, ...]) -> QArray:
    """Broadcasts axes of length 1 to `shape`; the copies share their scale. NoRuleError along the packed axis."""
    grown = [a for a, (n, m) in enumerate(zip(q.shape, shape, strict=True)) if n != m]
    if any(is_packed_along(q, a) for a in grown):
        raise NoRuleError("codes share bytes along the axis that would be repeated")
    lengths, tiles = list(q.codes.shape), list(q.tiles)
    for a in grown:
        lengths[a], tiles[a] = shape[a], None
    codes = jnp.broadcast_to(q.codes, lengths)
    return dataclasses.replace(q, codes=codes, scheme=q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis))


def reversed_along(q: QArray, axes: Sequence[int]) -> QArray:
    """The array with its elements reversed along axes."""
    for axis in axes:
        q = _reversed(q, axis)
    return q


def _reversed(q: QArray, axis: int) -> QArray:
    if q.scale.shape[axis] > 1 and q.shape[axis] % tile_length(q, axis):
        q = untiled(q, axis)  # else a short tile would come first

    def flipped(leaf: jax.Array | QArray) -> jax.Array | QArray:
        if leaf.shape[axis] == 1:
            return leaf
        if isinstance(leaf, QArray):
            return _reversed(leaf, axis)
        return jnp.flip(leaf, axis)

    if is_packed_along(q, axis):
        codes = _packed(jnp.flip(_unpacked(q), axis), q, axis)
    else:
        codes = jnp.flip(q.codes, axis)
    return with_leaves(q, flipped, codes=codes)


def reshaped(q: QArray, shape: Sequence[int]) -> QArray:
    """The array in another shape. NoRuleError when a tile or a byte would be cut."""
    try:
        return q.reshape(tuple(int(n) for n in shape))
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def repacked(q: QArray, axis: int) -> QArray:
    """The same codes and scales, packed along another axis."""
    if unit_of(q) == 1 or is_packed_along(q, axis):
        return q
    codes = _packed(_unpacked(q), q, axis)
    slack = code_capacity(codes.shape[axis], q.scheme.format.bits) - q.shape[axis]
    return dataclasses.replace(q, codes=codes, scheme=q.scheme.with_tiles(q.tiles, axis - q.ndim), slack=slack)


def _unpacked(q: QArray) -> jax.Array:
    """The codes, one per byte."""
    axis = q.scheme.pack_axis
    return unpack(q.codes, q.scheme.format.bits, q.shape[axis], q.scheme.packing, axis=axis)


def _packed(codes: jax.Array, q: QArray, axis: int) -> jax.Array:
    """Packs codes, one per byte, along an axis, in the packing of `q`."""
    return pack(codes, q.scheme.format.bits, q.scheme.packing, axis=axis)


def untiled(q: QArray, axis: int) -> QArray:
    """The array with a separate scale per element along an axis. Likewise its zero point and its tensor scale."""
    n = q.shape[axis]

    def repeated(leaf: jax.Array | QArray) -> jax.Array | QArray:
        if leaf.shape[axis] not in (1, n):
            tile_of_element = jnp.arange(n) // tile_length(q, axis)
            if isinstance(leaf, QArray):
                leaf = taken_rows(leaf, tile_of_element, axis)
            else:
                leaf = jnp.take(leaf, tile_of_element, axis=axis)
        leaf = spread(leaf, axis, n)
        return untiled(leaf, axis) if isinstance(leaf, QArray) else leaf

    tiles = (*q.tiles[:axis], 1, *q.tiles[axis + 1 :])
    return with_leaves(q, repeated, scheme=q.scheme.with_tiles(tiles, q.scheme.pack_axis))

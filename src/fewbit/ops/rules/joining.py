"""Joining, repeating, reversing and repacking quantized arrays: codes and scales move, nothing is quantized anew."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._tiles import Tile
from ...array import QArray
from ...array.packing import code_capacity, codes_per_unit, pack, unpack
from ..take import taken_rows
from .rule import NoRuleError


def tile_length(q: QArray, axis: int) -> int:
    """How many elements share a scale along an axis."""
    tile = q.tiles[axis]
    return q.shape[axis] if tile is None else tile


def spread(leaf: Any, axis: int, count: int) -> Any:
    """A scale (or zero point, or tensor scale) with `count` elements along an axis that may have one for all."""
    if leaf.shape[axis] == count:
        return leaf
    shape = tuple(count if a == axis else n for a, n in enumerate(leaf.shape))
    return broadcasted(leaf, shape) if isinstance(leaf, QArray) else jnp.broadcast_to(leaf, shape)


def is_packed_along(q: QArray, axis: int) -> bool:
    """Whether codes share bytes along an axis."""
    return axis == q.scheme.pack_axis + q.ndim and unit_of(q) > 1


def unit_of(q: QArray) -> int:
    """At whose multiples the packed axis can be cut."""
    return codes_per_unit(q.scheme.format.bits, q.scheme.packing)


def joined(parts: Sequence[QArray], axis: int, join: Callable[[list[Any]], Any], times: int = 1) -> QArray:
    """One array of several with the same scheme, side by side along an axis.

    Args:
        parts: the arrays. All but the last end where a tile, and a byte, ends.
        axis: along which they are joined.
        join: puts corresponding leaves side by side.
        times: into how many times their number the parts go (one part a device, for a gather).

    Returns:
        The array; every part keeps its scales.

    Raises:
        NoRuleError: when their schemes or tiles differ, or a tile or a byte would hold elements of two parts.
    """
    first, inner = parts[0], parts[:-1] if times == 1 else parts
    length = tile_length(first, axis)
    for part in parts:
        _refuse_other_scheme(part, first, axis)
        if part.scale.shape[axis] != -(-part.shape[axis] // length):
            raise NoRuleError("the tiles along the joined axis have different lengths")
    if any(part.shape[axis] % length for part in inner):
        raise NoRuleError(f"a tile of {length} would reach over the edge of a part")
    if is_packed_along(first, axis) and any(part.slack or part.shape[axis] % unit_of(first) for part in inner):
        raise NoRuleError("a byte would hold codes of two parts")
    total = times * sum(part.shape[axis] for part in parts)
    tiles: list[Tile] = list(first.tiles)
    tiles[axis] = None if length == total and length > 1 else length

    def leaves(of: Callable[[QArray], Any]) -> list[Any]:
        return [spread(of(part), axis, part.scale.shape[axis]) for part in parts]

    scales = [part.scale for part in parts]
    scale = joined(scales, axis, join, times) if isinstance(first.scale, QArray) else join(scales)
    zero = None if first.zero_point is None else join(leaves(lambda q: q.zero_point))
    tensor = None if first.tensor_scale is None else join(leaves(lambda q: q.tensor_scale))
    scheme = first.scheme.with_tiles(tuple(tiles), first.scheme.pack_axis)
    codes = join([part.codes for part in parts])
    slack = first.slack
    if axis == first.scheme.pack_axis + first.ndim:
        slack = code_capacity(codes.shape[axis], scheme.format.bits) - total
    return QArray(codes, scale, zero, tensor, scheme, first.dtype, slack, first.policy)


def _refuse_other_scheme(part: QArray, first: QArray, axis: int) -> None:
    """Raises unless two arrays can be joined along an axis as far as schemes, shapes and the other axes' tiles go."""

    def alike(q: QArray) -> tuple[Any, ...]:
        others = [t for a, t in enumerate(q.tiles) if a != axis]
        return dataclasses.replace(q.scheme, tile={}), q.dtype, q.policy, others, q.scheme.pack_axis + q.ndim

    def shapes(q: QArray) -> list[Any]:
        leaves = (q.codes, q.scale, q.zero_point, q.tensor_scale)
        return [None if x is None else [n for a, n in enumerate(x.shape) if a != axis] for x in leaves]

    if alike(part) != alike(first) or shapes(part) != shapes(first):
        raise NoRuleError("the schemes of the joined arrays differ")


def broadcasted(q: QArray, shape: tuple[int, ...]) -> QArray:
    """The array repeated along its axes of length 1 up to `shape`; the copies share their scale.

    Raises:
        NoRuleError: when codes share bytes along an axis that would be repeated.
    """
    grown = [a for a, (n, m) in enumerate(zip(q.shape, shape, strict=True)) if n != m]
    if any(is_packed_along(q, a) for a in grown):
        raise NoRuleError("codes share bytes along the axis that would be repeated")
    codes = jnp.broadcast_to(q.codes, tuple(shape[a] if a in grown else n for a, n in enumerate(q.codes.shape)))
    tiles = tuple(None if a in grown else t for a, t in enumerate(q.tiles))
    return dataclasses.replace(q, codes=codes, scheme=q.scheme.with_tiles(tiles, q.scheme.pack_axis))


def reversed_along(q: QArray, axes: Sequence[int]) -> QArray:
    """The array with its elements in the opposite order along axes."""
    for axis in axes:
        q = _reversed(q, axis)
    return q


def _reversed(q: QArray, axis: int) -> QArray:
    if q.scale.shape[axis] > 1 and q.shape[axis] % tile_length(q, axis):
        q = untiled(q, axis)  # else a short tile would come first

    def flipped(leaf: Any) -> Any:
        if leaf.shape[axis] == 1:
            return leaf
        return _reversed(leaf, axis) if isinstance(leaf, QArray) else jnp.flip(leaf, axis)

    codes = _packed(jnp.flip(_unpacked(q), axis), q, axis) if is_packed_along(q, axis) else jnp.flip(q.codes, axis)
    zero = None if q.zero_point is None else flipped(q.zero_point)
    tensor = None if q.tensor_scale is None else flipped(q.tensor_scale)
    return dataclasses.replace(q, codes=codes, scale=flipped(q.scale), zero_point=zero, tensor_scale=tensor)


def repacked(q: QArray, axis: int) -> QArray:
    """The same codes and scales, with the codes sharing bytes along another axis."""
    if unit_of(q) == 1 or is_packed_along(q, axis):
        return q
    codes = _packed(_unpacked(q), q, axis)
    slack = code_capacity(codes.shape[axis], q.scheme.format.bits) - q.shape[axis]
    return dataclasses.replace(q, codes=codes, scheme=q.scheme.with_tiles(q.tiles, axis - q.ndim), slack=slack)


def _unpacked(q: QArray) -> Any:
    """The codes, each in a byte of its own."""
    axis = q.scheme.pack_axis
    return unpack(q.codes, q.scheme.format.bits, q.shape[axis], q.scheme.packing, axis=axis)


def _packed(codes: Any, q: QArray, axis: int) -> Any:
    """Codes, each in a byte of its own, packed as an array's are, along an axis."""
    return pack(codes, q.scheme.format.bits, q.scheme.packing, axis=axis)


def untiled(q: QArray, axis: int) -> QArray:
    """The array with a scale (and zero point, and tensor scale) of its own for each element along an axis."""
    n = q.shape[axis]
    if q.scale.shape[axis] not in (1, n):
        q = taken_rows(q, jnp.arange(n), axis)
    tiles = tuple(1 if a == axis else t for a, t in enumerate(q.tiles))
    scale = untiled(spread(q.scale, axis, n), axis) if isinstance(q.scale, QArray) else spread(q.scale, axis, n)
    zero = None if q.zero_point is None else spread(q.zero_point, axis, n)
    tensor = None if q.tensor_scale is None else spread(q.tensor_scale, axis, n)
    scheme = q.scheme.with_tiles(tiles, q.scheme.pack_axis)
    return QArray(q.codes, scale, zero, tensor, scheme, q.dtype, q.slack, q.policy)

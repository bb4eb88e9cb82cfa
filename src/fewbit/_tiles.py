"""Tile (quantization block) arithmetic: scale shapes, blocked views.

A tile is a length per axis, or None for the whole axis. An axis of `n` elements has `ceil(n / tile)` tiles; the last may be
short. A scale has one element per tile, so its shape follows from the array's shape and tiles.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import TypeAlias

import jax
import jax.numpy as jnp

from .errors import QuantError

Tile: TypeAlias = int | None
TileMap: TypeAlias = Mapping[int | EllipsisType, Tile]


class FrozenTileMap(Mapping[int | EllipsisType, Tile]):
    """A checked, hashable map from negative axes (and `...`, all others) to tile lengths.

    Raises:
        QuantError: for an axis that is not negative, or a length that is neither None nor at least 1.
    """

    __slots__ = ("_map",)
    _map: dict[int | EllipsisType, Tile]

    def __init__(self, tile: TileMap):
        for axis, length in tile.items():
            if axis is not ... and (not isinstance(axis, int) or axis >= 0):
                raise QuantError(f"tile axis is {axis!r}; tiles are given on negative axes (-1 is the last) or on `...`")
            if length is not None and (not isinstance(length, int) or length < 1):
                raise QuantError(f"the tile on axis {axis} is {length!r}, must be at least 1, or None for the whole axis")
        rest = tile.get(...)
        if rest not in (1, None):
            raise QuantError(f"the tile of `...` (all other axes) is {rest}, must be 1 or None")
        ordered = sorted((a for a in tile if a is not ...), key=int)
        self._map = {axis: tile[axis] for axis in ordered if tile[axis] != rest}
        if rest is not None:
            self._map = {...: rest, **self._map}

    def __getitem__(self, axis: int | EllipsisType) -> Tile:
        return self._map[axis]

    def __iter__(self) -> Iterator[int | EllipsisType]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def __hash__(self) -> int:
        return hash(frozenset(self._map.items()))

    def __repr__(self) -> str:
        return repr(self._map).replace("Ellipsis", "...")


def from_front(axis: int, ndim: int) -> int:
    """The axis counted from the front. QuantError unless it is an integer in `-ndim .. ndim - 1`.

    >>> from_front(-1, 3)
    2
    """
    try:
        place = operator.index(axis)
    except TypeError:
        raise QuantError(f"axis is {axis!r}, must be an integer") from None
    if not -ndim <= place < ndim:
        raise QuantError(f"axis is {place}, but the array has {ndim} axes")
    return place % ndim


def contraction_order(left: Sequence[int], right: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The contraction axes of both operands, sorted by the right operand's. Tiles run along the last.

    The product is the same in any order, and `jnp.einsum` orders by letter: without this, scales would depend on the letters
    of an einsum.

    >>> contraction_order((3, 2), (1, 0))
    ((2, 3), (0, 1))
    """
    pairs = sorted(zip(left, right, strict=True), key=lambda pair: pair[1])
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def axis_tiles(tile: TileMap, ndim: int) -> tuple[Tile, ...]:
    """The tile of each of `ndim` axes. Absent axes take the map's `...`, else None.

    >>> axis_tiles({...: 1, -1: 32}, 3)
    (1, 1, 32)
    """
    if too_far := [a for a in tile if a is not ... and -a > ndim and tile[a] is not None]:
        raise QuantError(f"a tile is given on axis {too_far[0]}, but the array has {ndim} axes")
    return tuple(tile.get(axis, tile.get(...)) for axis in range(-ndim, 0))


def tile_map(tiles: Sequence[Tile], rest: Tile) -> FrozenTileMap:
    """The tile map of the tiles of all axes; absent axes take `rest`.

    >>> tile_map((1, None, 32), 1)
    {...: 1, -2: None, -1: 32}
    """
    return FrozenTileMap({...: rest, **{axis - len(tiles): t for axis, t in enumerate(tiles)}})


def tile_counts(shape: Sequence[int], tiles: Sequence[Tile]) -> tuple[int, ...]:
    """The number of tiles along each axis: the shape of the scale.

    >>> tile_counts((6, 100), (1, 32))
    (6, 4)
    """
    return tuple(1 if t is None else -(-n // t) for n, t in zip(shape, tiles, strict=True))


def fitting_tiles(length: int) -> str:
    """The tile lengths from 16 on that divide an axis, for error messages.

    >>> fitting_tiles(576)
    '16, 18, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288, 576'
    """
    return ", ".join(str(t) for t in range(min(16, length), length + 1) if length % t == 0)


def blocked(x: jax.Array, tiles: Sequence[Tile]) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits each axis into (tiles, elements of a tile). Also returns the axes over which a tile extends.

    An axis with tile 1 (all tiles) or None (all elements) is not split. A short last tile is padded with zeros. Each axis has
    a reshape of its own: JAX knows the sharding of the result on an explicit mesh only if one axis is split or merged.

    >>> y, within = blocked(jnp.zeros((6, 100)), (1, 32))
    >>> y.shape, within
    ((6, 4, 32), (2,))
    """
    padding = [(0, -n % (t or 1)) for n, t in zip(x.shape, tiles, strict=True)]
    if any(high for _, high in padding):
        x = jnp.pad(x, padding)
    within: list[int] = []
    axis = 0
    for t in tiles:
        if t is not None and t != 1:
            x = x.reshape(*x.shape[:axis], x.shape[axis] // t, t, *x.shape[axis + 1 :])
            axis += 1
        if t != 1:
            within.append(axis)
        axis += 1
    return x, tuple(within)


def unblocked(y: jax.Array, shape: Sequence[int], tiles: Sequence[Tile]) -> jax.Array:
    """The inverse of `blocked`, without its padding."""
    for axis, t in enumerate(tiles):
        if t is not None and t != 1:
            y = y.reshape(*y.shape[:axis], y.shape[axis] * t, *y.shape[axis + 2 :])
    if y.shape == tuple(shape):
        return y
    return y[tuple(slice(n) for n in shape)]


def blocked_scale(scale: jax.Array, tiles: Sequence[Tile]) -> jax.Array:
    """The scale reshaped to broadcast against the blocked array."""
    shape: list[int] = []
    for count, t in zip(scale.shape, tiles, strict=True):
        shape.append(count)
        if t is not None and t != 1:
            shape.append(1)
    return scale.reshape(shape)


def valid_elements(shape: Sequence[int], tiles: Sequence[Tile]) -> jax.Array | None:
    """A mask of the blocked array's elements that are not padding. None when there is no padding."""
    if all(n % (t or 1) == 0 for n, t in zip(shape, tiles, strict=True)):
        return None
    return blocked(jnp.ones(tuple(shape), jnp.bool_), tiles)[0]

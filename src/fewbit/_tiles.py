"""The algebra of tiles: how the axes of an array are cut into tiles, and what that makes of shapes.

Per axis a tile is a length, or None for the whole axis. An axis of `n` elements has `ceil(n / tile)` tiles; the last may be
short. The scale of an array has one element a tile, so its shape follows from the shape and the tiles.
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
    """A checked, hashable map from negative axes (and `...`, all other axes) to tile lengths.

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
        self._map = {} if rest is None else {...: rest}
        self._map |= {axis: tile[axis] for axis in ordered if tile[axis] != rest}

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
    """The axis counted from the front.

    Raises:
        QuantError: for what is no whole number, and for an axis that an array of `ndim` axes does not have.

    >>> from_front(-1, 3)
    2
    """
    try:
        place = operator.index(axis)
    except TypeError:
        raise QuantError(f"axis is {axis!r}, must be a whole number") from None
    if not -ndim <= place < ndim:
        raise QuantError(f"axis is {place}, but the array has {ndim} axes")
    return place % ndim


def axis_tiles(tile: TileMap, ndim: int) -> tuple[Tile, ...]:
    """The tile of each of `ndim` axes, from a map of negative axes; absent axes take that of `...`, else the whole axis.

    >>> axis_tiles({...: 1, -1: 32}, 3)
    (1, 1, 32)
    """
    if too_far := [a for a in tile if a is not ... and -a > ndim and tile[a] is not None]:
        raise QuantError(f"a tile lies on axis {too_far[0]}, but the array has {ndim} axes")
    return tuple(tile.get(axis, tile.get(...)) for axis in range(-ndim, 0))


def tile_map(tiles: Sequence[Tile], rest: Tile) -> FrozenTileMap:
    """The map for the tiles of all axes, when the axes not named take `rest`.

    >>> tile_map((1, None, 32), 1)
    {...: 1, -2: None, -1: 32}
    """
    return FrozenTileMap({...: rest, **{axis - len(tiles): t for axis, t in enumerate(tiles)}})


def tile_counts(shape: Sequence[int], tiles: Sequence[Tile]) -> tuple[int, ...]:
    """How many tiles each axis has: the shape of the scale.

    >>> tile_counts((6, 100), (1, 32))
    (6, 4)
    """
    return tuple(1 if t is None else -(-n // t) for n, t in zip(shape, tiles, strict=True))


def fitting_tiles(length: int) -> str:
    """The tile lengths of at least 16 that divide an axis, for an error message.

    >>> fitting_tiles(576)
    '16, 18, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288, 576'
    """
    return ", ".join(str(t) for t in range(min(16, length), length + 1) if length % t == 0)


def blocked(x: jax.Array, tiles: Sequence[Tile]) -> tuple[jax.Array, tuple[int, ...]]:
    """The array with each axis split in two, tiles and elements within a tile, and the axes of the elements.

    An axis of tile 1 or of one whole tile is not split: the first counts as all tiles, the second as all elements. A short
    last tile is filled with zeros.

    Returns:
        The blocked array, and the axes over which one tile extends.

    >>> y, within = blocked(jnp.zeros((6, 100)), (1, 32))
    >>> y.shape, within
    ((6, 4, 32), (2,))
    """
    shape: list[int] = []
    within: list[int] = []
    padding = []
    for n, t in zip(x.shape, tiles, strict=True):
        if t is None or t == 1:
            shape.append(n)
            padding.append((0, 0))
            if t is None:
                within.append(len(shape) - 1)
            continue
        count = -(-n // t)
        padding.append((0, count * t - n))
        shape += [count, t]
        within.append(len(shape) - 1)
    if any(high for _, high in padding):
        x = jnp.pad(x, padding)
    return x.reshape(shape), tuple(within)


def unblocked(y: jax.Array, shape: Sequence[int], tiles: Sequence[Tile]) -> jax.Array:
    """The inverse of `blocked`: the array of `shape`, without what filled the last tiles."""
    full = [n if t is None else -(-n // t) * t for n, t in zip(shape, tiles, strict=True)]
    y = y.reshape(full)
    return y if tuple(full) == tuple(shape) else y[tuple(slice(n) for n in shape)]


def blocked_scale(scale: jax.Array, tiles: Sequence[Tile]) -> jax.Array:
    """The scale with a unit axis for the elements of each tile, ready to meet the blocked array."""
    shape: list[int] = []
    for count, t in zip(scale.shape, tiles, strict=True):
        shape += [count] if t is None or t == 1 else [count, 1]
    return scale.reshape(shape)


def valid_elements(shape: Sequence[int], tiles: Sequence[Tile]) -> jax.Array | None:
    """Which elements of the blocked array are real, or None when every tile is full."""
    if all(t is None or n % t == 0 for n, t in zip(shape, tiles, strict=True)):
        return None
    return blocked(jnp.ones(tuple(shape), jnp.bool_), tiles)[0]

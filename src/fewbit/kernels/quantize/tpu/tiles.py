"""The tiles that Pallas quantizers support."""

from ...._tiles import Tile
from ....array.packing import codes_per_unit
from ....array.scheme import Scheme

LONGEST_TILE = 4096


def tile_refusal(shape: tuple[int, ...], scheme: Scheme) -> str | None:
    """Why the kernels do not support this shape and these tiles; None when they do."""
    tiles = scheme.tiles(len(shape))
    axis = tiled_axis(shape, tiles, scheme)
    if axis is None:
        return f"tiles {tiles} extend over several axes, or not along one of the last two"
    tile, group = tile_length(shape, scheme), codes_per_unit(scheme.format.bits)
    if tile < shape[axis] and tile % group:
        return f"tiles of {tile} on axis {axis}; the length must be a multiple of {group}, the codes that fill whole bytes"
    if tile > LONGEST_TILE:
        return f"tiles of {tile}; up to {LONGEST_TILE} fit in VMEM"
    return None


def tile_length(shape: tuple[int, ...], scheme: Scheme) -> int:
    """The tile (block) size of an array whose tiles extend along one axis."""
    tiles = scheme.tiles(len(shape))
    axis = tiled_axis(shape, tiles, scheme)
    assert axis is not None
    return min(tiles[axis] or shape[axis], shape[axis])


def tiled_axis(shape: tuple[int, ...], tiles: tuple[Tile, ...], scheme: Scheme) -> int | None:
    """The axis along which tiles extend, -1 or -2; None for another or several axes."""
    extended = [a - len(shape) for a, tile in enumerate(tiles) if tile != 1 and shape[a] > 1]
    if extended not in ([], [scheme.pack_axis]) or scheme.pack_axis < -2:
        return None
    return scheme.pack_axis

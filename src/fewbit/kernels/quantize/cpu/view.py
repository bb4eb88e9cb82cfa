"""The 3-D view of a tiled array, for C++."""

import dataclasses
from collections.abc import Sequence

from ...._tiles import Tile


@dataclasses.dataclass(frozen=True)
class Geometry:
    """An array as [batch, rows, columns], with tiles over rows and columns.

    Attributes:
        batch: how many matrices; no tile spans two.
        rows: of each.
        columns: of each.
        tile_rows: rows of a tile; the last tile may be short.
        tile_columns: columns of a tile.
        packs_rows: whether codes are packed along the row axis, not along the column axis.
    """

    batch: int
    rows: int
    columns: int
    tile_rows: int
    tile_columns: int
    packs_rows: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """The array's shape."""
        return self.batch, self.rows, self.columns

    @property
    def counts(self) -> tuple[int, int, int]:
        """The number of tiles along each axis."""
        return self.batch, -(-self.rows // self.tile_rows), -(-self.columns // self.tile_columns)

    def packed(self, bits: int) -> tuple[int, int, int]:
        """The shape of the packed codes."""
        if self.packs_rows:
            return self.batch, -(-self.rows * bits // 8), self.columns
        return self.batch, self.rows, -(-self.columns * bits // 8)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One axis, or several adjacent axes that were merged."""

    length: int
    tile: int
    is_packed: bool


def geometry(shape: Sequence[int], tiles: Sequence[Tile], packed_axis: int | None) -> Geometry | None:
    """Merges adjacent axes into [batch, rows, columns]; None where that is not possible.

    Args:
        shape: the array's shape.
        tiles: the tile of each axis, None for the whole axis.
        packed_axis: the axis along which codes are packed, None for codes of 8 bits.

    >>> geometry((8, 4, 64), (1, 1, 32), 2)
    Geometry(batch=1, rows=32, columns=64, tile_rows=1, tile_columns=32, packs_rows=False)
    >>> geometry((8, 64, 5), (1, 32, 1), 1)
    Geometry(batch=8, rows=64, columns=5, tile_rows=32, tile_columns=1, packs_rows=True)
    """
    runs: list[_Run] = []
    for axis, (n, tile) in enumerate(zip(shape, tiles, strict=True)):
        run = _Run(n, n if tile is None else min(tile, n), axis == packed_axis)
        if n == 1 and not run.is_packed:
            continue
        if runs and (merged := _merged(runs[-1], run)):
            runs[-1] = merged
        else:
            runs.append(run)
    while len(runs) < 3:
        runs.insert(0, _Run(1, 1, False))
    batch, rows, columns = runs[:3]
    if len(runs) > 3 or batch.tile > 1 or batch.is_packed:
        return None
    return Geometry(batch.length, rows.length, columns.length, rows.tile, columns.tile, rows.is_packed)


def _merged(left: _Run, right: _Run) -> _Run | None:
    """Two adjacent axes as one, if both have tiles of one element or of their full length."""
    if left.is_packed or right.is_packed:
        return None
    length = left.length * right.length
    if left.tile == right.tile == 1:
        return _Run(length, 1, False)
    if left.tile == left.length and right.tile == right.length:
        return _Run(length, length, False)
    return None

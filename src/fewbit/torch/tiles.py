"""A tensor as a matrix with one tile a row, and back."""

import math
from collections.abc import Sequence

import torch

from .._tiles import Tile, tile_counts


def tile_rows(x: torch.Tensor, tiles: Sequence[Tile]) -> torch.Tensor:
    """The matrix `[tiles, elements of a tile]`; short last tiles are filled with zeros. A view where the layout allows it.

    >>> tile_rows(torch.arange(6.0).reshape(2, 3), (1, 2)).tolist()
    [[0.0, 1.0], [2.0, 0.0], [3.0, 4.0], [5.0, 0.0]]
    """
    counts, lengths = _cut(x.shape, tiles)
    padding = [c * t - n for c, t, n in zip(counts, lengths, x.shape, strict=True)]
    if any(padding):
        x = torch.nn.functional.pad(x, [p for high in reversed(padding) for p in (0, high)])
    cut = x.reshape([n for pair in zip(counts, lengths, strict=True) for n in pair])
    ndim = len(counts)
    rows = cut.permute(*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2)).reshape(math.prod(counts), math.prod(lengths))
    return rows.contiguous()


def untiled(rows: torch.Tensor, shape: Sequence[int], tiles: Sequence[Tile]) -> torch.Tensor:
    """The tensor of `shape` whose `tile_rows` these are."""
    counts, lengths = _cut(shape, tiles)
    ndim = len(counts)
    order = [axis for pair in zip(range(ndim), range(ndim, 2 * ndim), strict=True) for axis in pair]
    full = rows.reshape(*counts, *lengths).permute(order)
    full = full.reshape([c * t for c, t in zip(counts, lengths, strict=True)])
    return full[tuple(slice(n) for n in shape)]


def valid_rows(shape: Sequence[int], tiles: Sequence[Tile], device: torch.device) -> torch.Tensor | None:
    """Which elements of `tile_rows` are real; None when every tile is full."""
    if all(t is None or n % t == 0 for n, t in zip(shape, tiles, strict=True)):
        return None
    return tile_rows(torch.ones(tuple(shape), dtype=torch.uint8, device=device), tiles).bool()


def _cut(shape: Sequence[int], tiles: Sequence[Tile]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many tiles each axis has, and how long they are."""
    lengths = tuple(n if t is None else t for n, t in zip(shape, tiles, strict=True))
    return tile_counts(shape, tiles), lengths

"""A weight as a stack of matrices, contraction axis first."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import numpy as np
from jaxtyping import Array, Float, Shaped

from .._tiles import Tile, tile_counts
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class MatrixAxes:
    """The axes of a weight as matrices `[G, K, N]`. G are groups that have statistics each, K is the contraction.

    The groups are the batch axes of the products. Those of a grouped convolution are equal parts of the kernel's outputs: that axis is
    split into two here.

    Attributes:
        shape: the weight's shape, perhaps with such a split.
        groups: the axes of G.
        contracted: the axes of K, ascending, which is the order of K in the statistics.
        others: the axes of N.
    """

    shape: tuple[int, ...]
    groups: tuple[int, ...]
    contracted: tuple[int, ...]
    others: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], axis: Sequence[int], statistics: Sequence[int], batch: Sequence[int] | None = None
    ) -> Self:
        """The axes of a weight.

        Args:
            shape: the weight's shape.
            axis: the contraction axes.
            statistics: the shape of its statistics of channels, `[*G, K]`.
            batch: the weight's axes that are `*G`, in this order; empty where they are no whole axes of it. None: the first ones, or
                the groups of a convolution.

        Raises:
            QuantError: for statistics of another shape.
            UnsupportedError: where `*G` are no whole axes of the weight.

        >>> MatrixAxes.of((3, 3, 2, 8), (-4, -3, -2), (4, 18))
        MatrixAxes(shape=(3, 3, 2, 4, 2), groups=(3,), contracted=(0, 1, 2), others=(4,))
        """
        shape, ndim = tuple(shape), len(shape)
        contracted = tuple(sorted(a % ndim for a in axis))
        *lengths, length = statistics
        if not lengths:
            batch = ()  # of one expert, whose statistics are an element of those of the stack
        if batch is not None and len(batch) != len(lengths):
            raise UnsupportedError(
                f"the batch axes of its products, of lengths {tuple(lengths)}, are no whole axes of the weight {shape}; store it with "
                "an axis for each, or round it to nearest"
            )
        groups = tuple(range(len(lengths)))
        if batch is not None:
            groups = tuple(a % ndim for a in batch)
        others = tuple(a for a in range(ndim) if a not in contracted)
        expected = (*(shape[a] for a in groups), math.prod(shape[a] for a in contracted))
        if batch is None and length == expected[-1] and len(contracted) > 1 and len(others) == len(lengths) == 1:
            (out,), (parts,) = others, lengths
            if shape[out] % parts == 0:
                split = (*shape[:out], parts, shape[out] // parts, *shape[out + 1 :])
                return cls(split, (out,), tuple(a + (a > out) for a in contracted), (out + 1,))
        if tuple(statistics) != expected or set(groups) & set(contracted):
            raise QuantError(
                f"the statistics have shape {tuple(statistics)}, and a weight {shape} that contracts axes {contracted} needs {expected}; "
                "observe the function that uses it"
            )
        return cls(shape, groups, contracted, tuple(a for a in others if a not in groups))

    def split_tiles(self, tiles: Sequence[Tile]) -> tuple[Tile, ...]:
        """The tiles of the weight's axes as those of `shape`.

        Raises:
            UnsupportedError: for tiles that are cut by groups of outputs.
        """
        if len(tiles) == len(self.shape):
            return tuple(tiles)
        (out,) = self.groups
        tile, length = tiles[out], self.shape[out + 1]
        if tile is None or tile >= self.shape[out] * length:
            return (*tiles[:out], None, None, *tiles[out + 1 :])
        if length % tile:
            raise UnsupportedError(f"a tile of {tile} outputs is cut by groups of {length}")
        return (*tiles[:out], 1, tile, *tiles[out + 1 :])


@dataclasses.dataclass(frozen=True)
class WeightMatrices:
    """A weight as matrices `[G, K, N]`. G are groups that have a Hessian each, K is the contraction, N all other axes.

    Attributes:
        axes: the weight's axes.
        contracted: the axes of K in the order of the matrices: those that tiles run along are last.
        shape: the weight's shape.
        tiles: its number of tiles along each axis.
        counts: the number of tiles along each of `axes`.
        tile: how many elements of K share a scale; None: all.
        scheme: the scheme for one tile, as rows `[G N, tile]`, without a tensor scale.
    """

    axes: MatrixAxes
    contracted: tuple[int, ...]
    shape: tuple[int, ...]
    tiles: tuple[int, ...]
    counts: tuple[int, ...]
    tile: Tile
    scheme: Scheme

    @classmethod
    def of(cls, q: QArray, axis: tuple[int, ...], hessian: tuple[int, ...], batch: Sequence[int] | None = None) -> Self:
        """The view of a weight.

        Args:
            q: the quantized weight.
            axis: the contraction axes.
            hessian: the shape of the Hessian, `[*G, K, K]`.
            batch: the weight's axes that are `*G`, see `MatrixAxes.of`.

        Raises:
            QuantError: for a Hessian of another shape.
            UnsupportedError: for tiles on several axes that are not contracted, or that a contraction axis does not fill, and where
                `*G` are no whole axes of the weight.
        """
        if hessian[-2] != hessian[-1]:
            raise QuantError(f"the Hessian has shape {hessian}; its last two axes must be of one length")
        axes = MatrixAxes.of(q.shape, axis, hessian[:-1], batch)
        try:
            tiles = axes.split_tiles(q.tiles)
            contracted = tuple(sorted(axes.contracted, key=lambda a: tiles[a] != 1))
            tile, row_tile = _joined(axes.shape, tiles, contracted), _joined(axes.shape, tiles, (*axes.groups, *axes.others))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{q.scheme.name} of shape {q.shape} has tiles {q.tiles}, which are no tiles of a matrix: {error}"
            ) from error
        if tile is not None and row_tile is None and math.prod(axes.shape[a] for a in axes.groups) > 1:
            raise UnsupportedError(
                f"{q.scheme.name} of shape {q.shape} has scales that several matrices share, and each has a Hessian of its own; "
                "take a scheme with scales for each row"
            )
        plain = dataclasses.replace(q.scheme.with_tiles((row_tile, tile), -1), tensor_scale=False)
        counts = tile_counts(axes.shape, tiles)
        return cls(axes, contracted, q.shape, tile_counts(q.shape, q.tiles), counts, tile, plain)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes in the order of G, K, N."""
        return (*self.axes.groups, *self.contracted, *self.axes.others)

    def columns_first(self, x: Float[Array, "..."]) -> Float[Array, "G K N"]:
        """The matrices of an array with the weight's shape."""
        shape, parts = self.axes.shape, (self.axes.groups, self.contracted, self.axes.others)
        lengths = (math.prod(shape[a] for a in axes) for axes in parts)
        return x.reshape(shape).transpose(self.order).reshape(*lengths)

    def moments(self, hessian: Float[Array, "*G K K"]) -> Float[Array, "G K K"]:
        """The Hessians in the order of the matrices."""
        length, ascending = hessian.shape[-1], self.axes.contracted
        hessian = hessian.reshape(-1, length, length)
        if self.contracted == ascending:
            return hessian
        places = np.arange(length).reshape([self.axes.shape[a] for a in ascending])
        places = places.transpose([ascending.index(a) for a in self.contracted]).ravel()
        return hessian[:, places][:, :, places]

    def restored(self, x: Shaped[Array, "G K N"]) -> Shaped[Array, "..."]:
        """The array of the weight's shape whose matrices these are."""
        return self._in_place(x, self.axes.shape).reshape(self.shape)

    def restored_tiles(self, x: Shaped[Array, "G T R"]) -> Shaped[Array, "..."]:
        """An array with an element for each tile of the weight. `x` are those of `[G, tiles of K, tiles of N]`."""
        return self._in_place(x, self.counts).reshape(self.tiles)

    def _in_place(self, x: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
        return x.reshape([shape[a] for a in self.order]).transpose([self.order.index(a) for a in range(len(shape))])


def _joined(shape: tuple[int, ...], tiles: tuple[Tile, ...], axes: tuple[int, ...]) -> Tile:
    """The tile of several axes as one. UnsupportedError where there is none."""
    sizes = [(shape[a], tiles[a] or shape[a]) for a in axes if shape[a] > 1]
    if all(tile >= length for length, tile in sizes):
        return None
    *outer, (length, tile) = sizes
    tile = min(tile, length)
    if any(t != 1 for _, t in outer):
        raise UnsupportedError(f"more than one of the axes {axes} has tiles")
    if outer and length % tile:
        raise UnsupportedError(f"a tile of {tile} does not fill an axis of {length}")
    return tile

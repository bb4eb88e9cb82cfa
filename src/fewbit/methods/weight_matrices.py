"""A weight as a stack of matrices, contraction axis first."""

import dataclasses
import math
from typing import Self

from jaxtyping import Array, Float, Shaped

from .._tiles import Tile, tile_counts
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError


@dataclasses.dataclass(frozen=True)
class WeightMatrices:
    """A weight as matrices `[G, K, N]`. G are groups that have a Hessian each, K is the contraction, N all other axes.

    Attributes:
        shape: the weight's shape.
        counts: its number of tiles along each axis.
        groups: the axes of G, the leading ones.
        contracted: the axes of K, ascending.
        others: the axes of N.
        tile: how many elements of K share a scale; None: all.
        scheme: the scheme for one tile, as rows `[G N, tile]`, without a tensor scale.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    groups: tuple[int, ...]
    contracted: tuple[int, ...]
    others: tuple[int, ...]
    tile: Tile
    scheme: Scheme

    @classmethod
    def of(cls, q: QArray, axis: tuple[int, ...], hessian: tuple[int, ...]) -> Self:
        """The view of a weight.

        Args:
            q: the quantized weight.
            axis: the contraction axes.
            hessian: the shape of the Hessian, `[*G, K, K]`.

        Raises:
            QuantError: for a Hessian of another shape.
            UnsupportedError: for tiles on several axes that are not contracted, or that a contraction axis does not fill.
        """
        shape = q.shape
        contracted = tuple(sorted(a % len(shape) for a in axis))
        groups = tuple(range(len(hessian) - 2))
        others = tuple(a for a in range(len(shape)) if a not in (*groups, *contracted))
        length = math.prod(shape[a] for a in contracted)
        if hessian != (*(shape[a] for a in groups), length, length) or set(groups) & set(contracted):
            raise QuantError(
                f"the Hessian has shape {hessian}, and a weight {shape} that contracts axes {contracted} needs "
                f"{(*(shape[a] for a in groups), length, length)}; observe the function that uses it"
            )
        tile, row_tile = _joined(q, contracted), _joined(q, (*groups, *others))
        if groups and tile is not None and row_tile is None and math.prod(shape[a] for a in groups) > 1:
            raise UnsupportedError(
                f"{q.scheme.name} of shape {shape} has scales that several matrices share, and each has a Hessian of its own; "
                "take a scheme with scales for each row"
            )
        plain = dataclasses.replace(q.scheme.with_tiles((row_tile, tile), -1), tensor_scale=False)
        return cls(shape, tile_counts(shape, q.tiles), groups, contracted, others, tile, plain)

    @property
    def order(self) -> tuple[int, ...]:
        """The weight's axes in the order of G, K, N."""
        return (*self.groups, *self.contracted, *self.others)

    def columns_first(self, x: Float[Array, "..."]) -> Float[Array, "G K N"]:
        """The matrices of an array with the weight's shape."""
        lengths = (math.prod(self.shape[a] for a in axes) for axes in (self.groups, self.contracted, self.others))
        return x.transpose(self.order).reshape(*lengths)

    def restored(self, x: Shaped[Array, "G K N"]) -> Shaped[Array, "..."]:
        """The array of the weight's shape whose matrices these are."""
        return self._restored(x, self.shape)

    def restored_tiles(self, x: Shaped[Array, "G T R"]) -> Shaped[Array, "..."]:
        """An array with an element for each tile of the weight. `x` are those of `[G, tiles of K, tiles of N]`."""
        return self._restored(x, self.counts)

    def _restored(self, x: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
        return x.reshape([shape[a] for a in self.order]).transpose([self.order.index(a) for a in range(len(shape))])


def _joined(q: QArray, axes: tuple[int, ...]) -> Tile:
    """The tile of several axes as one."""
    sizes = [(q.shape[a], q.tiles[a] or q.shape[a]) for a in axes if q.shape[a] > 1]
    if all(tile >= length for length, tile in sizes):
        return None
    *outer, (length, tile) = sizes
    tile = min(tile, length)
    if any(t != 1 for _, t in outer) or (outer and length % tile):
        raise UnsupportedError(f"{q.scheme.name} of shape {q.shape} has tiles {q.tiles}, which are no tiles of a matrix")
    return tile

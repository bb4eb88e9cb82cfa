"""ServingTiles: quantization tiles after layout operations.

A stored weight is quantized once, then reshaped, transposed and looped. A trained one is a float array that is moved first and
quantized in its product. Both have the same codes because its tiles (the blocks that share a scale) are moved here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.typing import DTypeLike

from ..._tiles import Tile
from ...array.axis_move import AxisMove, axis_moves
from ...array.layout import Axis
from ...array.scheme import Scheme, laid_along
from ...errors import QuantError
from ...formats.format import is_exact_cast


@dataclasses.dataclass(frozen=True)
class ServingTiles:
    """Quantization tiles per current axis, after layout operations.

    Attributes:
        tiles: for each axis, how many elements share a scale; None: the whole axis.
        looped: the axes, negative, that a loop slices and along which each element is quantized separately; empty for schemes
            whose scales depend on their own tiles only.
        dtype: the dtype whose precision it has now.
        casts: the remaining dtypes, of lower precision, that it is cast to before it is quantized.
    """

    tiles: tuple[Tile, ...]
    looped: tuple[int, ...] = ()
    dtype: str = "float32"
    casts: tuple[str, ...] = ()

    @classmethod
    def along(
        cls,
        scheme: Scheme,
        axis: tuple[int, ...],
        like: jax.ShapeDtypeStruct,
        stacked: tuple[int, ...] = (),
        casts: tuple[str, ...] = (),
    ) -> "ServingTiles":
        """The tiles of a scheme along `axis` of an array. `axis` is negative. A loop slices the `stacked` axes of the array.

        Raises:
            QuantError: where an axis is one of `stacked`.
        """
        shape = tuple(like.shape)
        inner = tuple(n for a, n in zip(range(-len(shape), 0), shape, strict=True) if a not in stacked)
        within = iter(laid_along(scheme, axis_within(axis, stacked, len(shape)), inner).tiles(len(inner)))
        tiles = tuple(1 if a in stacked else next(within) for a in range(-len(shape), 0))
        if _is_local(scheme):
            stacked = ()
        return cls(tiles, stacked, like.dtype.name, casts)

    def on_last(self, ndim: int) -> "ServingTiles":
        """The tiles of the last `ndim` axes, after a loop looped the first ones."""
        gone = len(self.tiles) - ndim
        if not gone:
            return self
        return dataclasses.replace(self, tiles=self.tiles[gone:], looped=tuple(a for a in self.looped if a >= -ndim))

    def are_cut(self, scheme: Scheme, shape: tuple[int, ...], parts: tuple[int, ...]) -> bool:
        """Whether equal parts separate elements that share a scale.

        There are so many parts along each axis of an array of `shape`.
        """
        cut = [a for a, count in enumerate(parts) if count > 1 and a - len(shape) not in self.looped]
        if not _is_local(scheme):
            return bool(cut)
        return any(shape[a] // parts[a] % (self.tiles[a] or shape[a]) for a in cut)

    def after(self, eqn: jex_core.JaxprEqn, scheme: Scheme) -> list["ServingTiles"]:
        """The tiles of each result of a layout equation.

        Raises:
            QuantError: where the equation removes elements that share a scale with others, or tiles cannot describe the
                result; and for a lossy cast later than those before quantization.
        """
        if eqn.primitive.name == "convert_element_type":
            return [self._cast(eqn.params["new_dtype"])]
        if eqn.primitive.name == "all_gather" and not eqn.params["tiled"]:
            raise QuantError("its tiles cannot be tracked through an all-gather that adds an axis")
        return [self._moved(move, scheme) for move in axis_moves(eqn)]

    def _cast(self, dtype: DTypeLike) -> "ServingTiles":
        if is_exact_cast(dtype, self.dtype):
            return self
        name = jnp.dtype(dtype).name
        if self.casts[:1] != (name,):
            raise QuantError(f"it is quantized before it is cast to {name}")
        return dataclasses.replace(self, dtype=name, casts=self.casts[1:])

    def _moved(self, move: AxisMove, scheme: Scheme) -> "ServingTiles":
        if move.is_identity:
            return self
        ndim, places = len(move.shape), move.places
        looped = {a + ndim for a in self.looped}
        looped_after = {places[a] for a in looped if a in places}
        if not _is_local(scheme):
            inner = [n for a, n in enumerate(move.shape) if a not in looped]
            inner_after = [n for a, n in enumerate(move.result) if a not in looped_after]
            repeats = move.units != move.result or bool(move.flipped)
            is_merged = any(a not in places and move.shape[a] != 1 for a in looped)
            is_inner_moved = repeats or move.is_transposed or inner != inner_after
            if not looped.issuperset(move.cut) or is_merged or (looped and repeats):
                raise QuantError("the scale of the whole tensor is that of other elements")
            if isinstance(scheme.scale, Scheme) and is_inner_moved:
                raise QuantError("its scales are quantized, in tiles of the array before the operation")
        axes = move.tiled([Axis(n, normalized(tile, n)) for n, tile in zip(move.shape, self.tiles, strict=True)])
        after = tuple(a - len(axes) for a in sorted(looped_after))
        return dataclasses.replace(self, tiles=tuple(axis.tile for axis in axes), looped=after)


def axis_within(axis: tuple[int, ...], stacked: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Maps negative axes of an array to those of one element of its stacked axes.

    Raises:
        QuantError: where an axis is stacked.

    >>> axis_within((-3, -1), (-2,), 3)
    (-2, -1)
    """
    if both := [a for a in axis if a in stacked]:
        raise QuantError(f"axis {both[0]} cannot be tiled: a loop takes one element of it at a time; name another axis")
    inner = [a for a in range(-ndim, 0) if a not in stacked]
    return tuple(inner.index(a) - len(inner) if a in inner else a for a in axis)


def cast(x: jax.Array, dtypes: tuple[str, ...]) -> jax.Array:
    """The array cast to each dtype in turn."""
    for dtype in dtypes:
        x = x.astype(dtype)
    return x


def normalized(tile: Tile, length: int) -> Tile:
    """The normal form of the tile of an axis. It is 1 for an axis of one element, None for the whole axis."""
    if length == 1:
        return 1
    return None if tile is None or tile >= length else tile


def _is_local(scheme: Scheme) -> bool:
    """Whether every scale depends on its own tile only."""
    return not scheme.tensor_scale and not isinstance(scheme.scale, Scheme)

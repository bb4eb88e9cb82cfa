"""How a parameter is quantized where it is served: the tiles that its plan gives it, followed while code moves its axes about.

A stored weight is quantized once, as it lies, and then reshaped, transposed and sliced. A trained one is a float array that is
moved first and quantized in its product. Both have the same codes because the tiles move along here.
"""

import dataclasses
from typing import Any

import jax

from .._tiles import Tile
from ..array import QArray, Scheme
from ..array.layout import Axis, reshaped
from ..array.quantize import laid_along
from ..errors import QuantError
from ..kernels.quantize import quantize

_UNMOVED = ("convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "pvary")


@dataclasses.dataclass(frozen=True)
class Served:
    """The tiles of a parameter on the axes that it has by now.

    Attributes:
        tiles: for each axis, how many elements share a scale; None: all of it.
        apart: how many leading axes a loop takes apart. Each element of theirs is quantized on its own, which matters to
            schemes whose scales are more than one a tile.
    """

    tiles: tuple[Tile, ...]
    apart: int = 0

    @classmethod
    def along(cls, scheme: Scheme, axis: tuple[int, ...], shape: tuple[int, ...], apart: int) -> "Served":
        """The tiles that a scheme has along axes, negative, of an array of which leading axes are taken apart."""
        inner = shape[apart:]
        tiles = laid_along(scheme, axis, inner).tiles(len(inner))
        return cls((1,) * apart + tiles, 0 if _is_local(scheme) else apart)

    def on_last(self, ndim: int) -> "Served":
        """The tiles of an array without the first axes: what a loop left of it."""
        gone = len(self.tiles) - ndim
        return self if not gone else Served(self.tiles[gone:], max(self.apart - gone, 0))

    def after(self, eqn: Any, scheme: Scheme) -> "Served":
        """The tiles after an equation that moves the array.

        Raises:
            QuantError: where a scale serves elements that the equation takes away, or that tiles could no longer name.
        """
        name, params = eqn.primitive.name, eqn.params
        shape, new = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
        if name in _UNMOVED or (name == "all_gather" and params["tiled"]):
            return self
        if name in ("slice", "dynamic_slice", "split"):
            return self._cut(eqn, scheme)
        if name in ("squeeze", "expand_dims") or (name == "reshape" and params["dimensions"] is None):
            return self._reshaped(shape, new, scheme)
        if isinstance(scheme.scale, Scheme) or self.apart:
            raise QuantError(f"its scales are no longer those of a tile after {name}")
        if name == "transpose":
            return Served(tuple(self.tiles[a] for a in params["permutation"]))
        if name == "broadcast_in_dim":
            of_axis = dict(zip(params["broadcast_dimensions"], shape, strict=True))
            one = tuple(of_axis.get(a, 1) for a in range(len(new)))
            tiles = self._reshaped(shape, one, scheme).tiles
            return Served(tuple(1 if n != m else t for t, n, m in zip(tiles, one, new, strict=True)))
        if name == "rev" and all(shape[a] % (self.tiles[a] or shape[a]) == 0 for a in params["dimensions"]):
            return self
        raise QuantError(f"its tiles cannot be followed through {name}")

    def _reshaped(self, shape: tuple[int, ...], new: tuple[int, ...], scheme: Scheme) -> "Served":
        lost = next((k for k in range(self.apart + 1) if shape[k : self.apart] == new[: self.apart - k]), None)
        if lost is None or any(n != 1 for n in shape[:lost]):
            raise QuantError("the reshape reaches over axes that a loop takes apart")
        kept, rest, new_rest = self.apart - lost, shape[self.apart :], new[self.apart - lost :]
        if isinstance(scheme.scale, Scheme) and rest != new_rest:
            raise QuantError("its scales are quantized, in tiles of the array as it was")
        tiles = zip(rest, self.tiles[self.apart :], strict=True)
        axes = reshaped([Axis(n, _held(tile, n)) for n, tile in tiles], new_rest)
        return Served((1,) * kept + tuple(axis.tile for axis in axes), kept)

    def _cut(self, eqn: Any, scheme: Scheme) -> "Served":
        shape, params = eqn.invars[0].aval.shape, eqn.params
        for axis, n in enumerate(shape):
            tile = _held(self.tiles[axis], n)
            lengths = [out.aval.shape[axis] for out in eqn.outvars]
            if lengths == [n] or (tile == 1 and (_is_local(scheme) or axis < self.apart)):
                continue
            starts, strides = [0], None
            if eqn.primitive.name == "split":
                starts = [sum(lengths[:i]) for i in range(len(lengths))]
            elif eqn.primitive.name == "slice":
                starts, strides = [params["start_indices"][axis]], params["strides"]
            is_known = eqn.primitive.name != "dynamic_slice" and (strides is None or strides[axis] == 1)
            ends = [start + length for start, length in zip(starts, lengths, strict=True)]
            if not is_known or tile is None or not _is_local(scheme):
                raise QuantError(f"a scale serves more of axis {axis} than {eqn.primitive.name} leaves")
            if any(start % tile or (end % tile and end != n) for start, end in zip(starts, ends, strict=True)):
                raise QuantError(f"{eqn.primitive.name} cuts tiles of {tile} on axis {axis}")
        return self

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...] | None = None) -> QArray:
        """The array quantized with these tiles; where a product contracts axes, with codes that share bytes along the last."""
        if self.apart:
            inward = None if axis is None else tuple(a - x.ndim for a in axis)
            return jax.vmap(lambda x: Served(self.tiles[1:], self.apart - 1).quantized(x, scheme, inward))(x)
        if axis is not None and self._is_along(scheme, axis, x.shape):
            return quantize(x, scheme, axis=axis)
        tiled = [a for a, (t, n) in enumerate(zip(self.tiles, x.shape, strict=True)) if _held(t, n) != 1]
        packed = axis[-1] if axis is not None else tiled[-1] if tiled else x.ndim - 1
        tiles = list(self.tiles)
        tiles.append(tiles.pop(packed))  # where `quantize` takes that of its axis from
        return quantize(x, scheme.with_tiles(tuple(tiles), -1), axis=packed)

    def _is_along(self, scheme: Scheme, axis: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        along = laid_along(scheme, axis, shape).tiles(len(shape))
        pairs = zip(self.tiles, along, shape, strict=True)
        return all(_held(own, n) == _held(other, n) for own, other, n in pairs)


def _held(tile: Tile, length: int) -> Tile:
    """The tile of an axis by one name: 1 where it has one element, None where it is the whole of it."""
    return 1 if length == 1 else None if tile is None or tile >= length else tile


def _is_local(scheme: Scheme) -> bool:
    """Whether every scale hangs on the elements of its own tile alone."""
    return not scheme.tensor_scale and not isinstance(scheme.scale, Scheme)

"""Indexing of tiled arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._tiles import Tile
from ..errors import QuantError
from .layout import Axis, sliced
from .packing import codes_per_unit
from .scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Indexed:
    """An index, for each part of a quantized array.

    Attributes:
        codes: for the codes.
        scale: for the scales.
        shape: of the result.
        scheme: of the result.
    """

    codes: tuple[Any, ...]
    scale: tuple[Any, ...]
    shape: tuple[int, ...]
    scheme: Scheme

    def of_leaf(self, leaf_shape: Sequence[int], scale_shape: Sequence[int]) -> tuple[Any, ...]:
        """The scale's index, for a leaf that may have one element along an axis where the scale has more."""
        lengths = iter(zip(leaf_shape, scale_shape, strict=True))
        steps: list[Any] = []
        for step in self.scale:
            if step is not None:
                length, scale_length = next(lengths)
                if length != scale_length:
                    step = slice(None) if isinstance(step, slice) else 0
            steps.append(step)
        return tuple(steps)


def axes_of(scheme: Scheme, shape: Sequence[int], tiles: Sequence[Tile]) -> list[Axis]:
    """The axes of an array of a scheme with these tiles."""
    packed = scheme.pack_axis + len(shape)
    unit = codes_per_unit(scheme.format.bits, scheme.packing)
    return [
        Axis(n, tile, unit if i == packed else 1, i == packed and unit > 1)
        for i, (n, tile) in enumerate(zip(shape, tiles, strict=True))
    ]


def packed_axis(axes: Sequence[Axis]) -> int:
    """The axis whose codes share bytes, from the end. The last when each code has its own byte."""
    return next((i - len(axes) for i, axis in enumerate(axes) if axis.is_packed), -1)


def indexed(
    scheme: Scheme, axes: Sequence[Axis], scale_shape: Sequence[int], index: object, *, decode: str = "fb.take(q, {}, axis)"
) -> Indexed:
    """What an index takes of an array.

    Args:
        scheme: that of the array.
        axes: its axes.
        scale_shape: the shape of its scales.
        index: integers, slices, `...` and None.
        decode: for messages, what decodes elements at an index `{}`.

    Returns:
        The index for each part.

    Raises:
        QuantError: when a tile or a byte would be cut, or for an index array.
        IndexError: for an integer out of bounds.
    """
    on_codes: list[Any] = []
    on_scale: list[Any] = []
    kept: list[Axis] = []
    places: dict[int, int] = {}
    lengths = enumerate(zip(axes, scale_shape, strict=True))
    for step in _expanded(index, len(axes), decode):
        if step is None:
            on_codes.append(None)
            on_scale.append(None)
            kept.append(Axis(1, 1))
            continue
        place, (axis, count) = next(lengths)
        of_codes, of_scale, new_axis = _along(axis, count, step, scheme.format.bits, decode)
        on_codes.append(of_codes)
        on_scale.append(of_scale)
        if new_axis is not None:
            places[place] = len(kept)
            kept.append(new_axis)
    if not kept:
        raise QuantError("an integer for every axis gives a scalar; a quantized array has at least one axis")
    # Codes that share no bytes may lose the packed axis; the last one serves as such then.
    packed = places.get(scheme.pack_axis + len(axes), len(kept) - 1)
    cut = scheme.with_tiles(tuple(axis.tile for axis in kept), packed - len(kept))
    return Indexed(tuple(on_codes), tuple(on_scale), tuple(axis.length for axis in kept), cut)


def _expanded(index: object, ndim: int, decode: str) -> list[Any]:
    """The index as a list of integers, slices and Nones, `...` expanded."""
    if not isinstance(index, tuple):
        index = (index,)
    steps: list[Any] = list(index)
    for step in steps:
        if not (step is None or step is ... or isinstance(step, int | np.integer | slice)) or isinstance(step, bool):
            raise QuantError(
                f"a QArray is indexed with integers, slices, ... and None, not {type(step).__name__}; "
                f"{decode.format('indices')} gathers rows"
            )
    missing = ndim - sum(step is not None and step is not ... for step in steps)
    if missing < 0:
        raise QuantError(f"too many indices: {len(steps)} for an array of {ndim} axes")
    if ... not in steps:
        steps.append(...)
    place = steps.index(...)
    if ... in steps[place + 1 :]:
        raise QuantError("an index has at most one ...")
    return [*steps[:place], *([slice(None)] * missing), *steps[place + 1 :]]


def _along(axis: Axis, count: int, step: int | np.integer | slice, bits: int, decode: str) -> tuple[Any, Any, Axis | None]:
    """One axis's index for the codes and for the scales. With the resulting axis, which is None if it is dropped."""
    tile = axis.tile_length
    if not isinstance(step, slice):
        at = int(step)
        if not -axis.length <= at < axis.length:
            raise IndexError(f"index {at} is out of bounds for an axis of {axis.length}")
        if axis.is_packed:
            raise QuantError(f"the integer {at} on the packed axis would cut bytes; {decode.format(at)} decodes it")
        at %= axis.length
        return at, min(at // tile, count - 1), None
    start, stop, stride = step.indices(axis.length)
    if (start, stop, stride) == (0, axis.length, 1):
        return slice(None), slice(None), axis
    length = len(range(start, stop, stride))
    if not length:
        raise QuantError(f"the slice {start}:{stop}:{stride} of an axis of {axis.length} is empty")
    one_scale = dataclasses.replace(axis, tile=1)  # any part of a tile keeps its scale
    sliced(one_scale if count == 1 else axis, slice(start, stop, stride))
    strided = slice(start, stop if stop >= 0 else None, stride)
    on_scale = slice(start // tile, -(-stop // tile))
    if count == 1:
        on_scale = slice(None)
    elif tile == 1:
        on_scale = strided
    new_axis = dataclasses.replace(axis, length=length)
    if not axis.is_packed:
        return strided, on_scale, new_axis
    return slice(start * bits // 8, None if stop == axis.length else stop * bits // 8), on_scale, new_axis

"""Shape arithmetic of tiled arrays.

Codes never change; the result must be expressible with one tile per axis.
"""

import dataclasses
from collections.abc import Sequence

from .._tiles import Tile
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a quantized array.

    Attributes:
        length: how many elements it has.
        tile: how many of them share a scale; None: all.
        unit: the packed bytes can be cut at multiples of this many codes; 1 for an axis that is not packed.
        is_packed: whether codes share bytes along it.
    """

    length: int
    tile: Tile
    unit: int = 1
    is_packed: bool = False

    @property
    def tile_length(self) -> int:
        """The tile in elements."""
        if self.tile is None:
            return self.length
        return self.tile


def sliced(axis: Axis, step: slice) -> Axis:
    """The axis after a slice of whole tiles and bytes.

    Args:
        axis: the axis.
        step: start, stop and step as of `slice.indices`; the start None where it is known at run time only, and the stop then
            the length.

    Raises:
        QuantError: where a tile or a byte would be cut.
    """
    if step == slice(0, axis.length, 1):
        return axis
    for unit, what in ((axis.tile_length, "tiles of {}"), (axis.unit, "bytes that {} codes share")):
        is_aligned = step.start is not None and step.step == 1 and step.start % unit == 0
        if unit != 1 and not (is_aligned and (step.stop % unit == 0 or step.stop == axis.length)):
            where = f"{step.start}:{step.stop}:{step.step}"
            if step.start is None:
                where = f"of {step.stop} elements, whose start is known at run time only,"
            raise QuantError(f"the slice {where} cuts {what.format(unit)}; slice at their multiples, by steps of 1")
    return dataclasses.replace(axis, length=len(range(step.start or 0, step.stop, step.step)))


def regrouped(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The groups of old and new axes of a reshape, in order. The axes of a group map to each other.

    >>> regrouped((6, 4, 5), (3, 2, 20))
    [([0], [0, 1]), ([1, 2], [2])]
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old: list[int] = []
        new: list[int] = []
        size = new_size = 1
        while (not old and not new) or size != new_size:
            if size <= new_size and i < len(shape):
                size *= shape[i]
                old.append(i)
                i += 1
            else:
                new_size *= new_shape[j]
                new.append(j)
                j += 1
        # Axes of length 1 join the neighbouring group when one side would otherwise stay empty.
        while i < len(shape) and shape[i] == 1 and (not old or j == len(new_shape)):
            old.append(i)
            i += 1
        while j < len(new_shape) and new_shape[j] == 1 and (not new or i == len(shape)):
            new.append(j)
            j += 1
        groups.append((old, new))
    return groups


def merged(axes: Sequence[Axis]) -> Axis:
    """Merges adjacent axes into one, row-major. QuantError if a tile or a byte would not stay contiguous."""
    axes = [a for a in axes if a.length != 1 or a.is_packed] or list(axes[:1])
    if not axes:
        return Axis(1, 1)
    if len(axes) == 1:
        return axes[0]
    length, tile = 1, 1
    for axis in reversed(axes):
        own = axis.tile_length
        if own != 1 and (tile != length or (own != axis.length and axis.length % own)):
            raise QuantError(f"axes of lengths {[a.length for a in axes]} with tiles {[a.tile for a in axes]} cannot merge")
        tile, length = tile * own, length * axis.length
    packed = [a for a in axes if a.is_packed]
    if packed and (packed[0] is not axes[-1] or packed[0].length % packed[0].unit):
        raise QuantError("the packed axis can merge only as the last of its group, and only whole bytes of it")
    whole = None if tile == length else tile
    return Axis(length, whole, max((a.unit for a in packed), default=1), bool(packed))


def split(axis: Axis, lengths: Sequence[int]) -> list[Axis]:
    """Splits an axis into axes of these lengths, row-major. QuantError if a tile or a byte would span two of them."""
    if list(lengths).count(1) == len(lengths) - 1 and axis.length in lengths:
        place = len(lengths) - 1 - list(lengths)[::-1].index(axis.length)
        unit_axes = [Axis(1, 1)] * (len(lengths) - 1)
        return [*unit_axes[:place], axis, *unit_axes[place:]]
    remaining = axis.tile_length
    if remaining != 1 and axis.length % remaining:
        raise QuantError(f"an axis of {axis.length} elements with a short last tile ({axis.tile}) cannot be split")
    result: list[Axis] = []
    for length in reversed(lengths):
        if remaining % length == 0:
            result.append(Axis(length, 1 if length == 1 and axis.tile is not None else None))
            remaining //= length
        elif length % remaining == 0:
            result.append(Axis(length, remaining))
            remaining = 1
        else:
            raise QuantError(f"tiles of {axis.tile} on an axis of {axis.length} do not fit new axes {tuple(lengths)}")
    result.reverse()
    if axis.is_packed:
        inner = max((i for i, n in enumerate(lengths) if n != 1), default=len(lengths) - 1)
        if lengths[inner] % axis.unit and lengths[inner] != axis.length:
            raise QuantError(f"codes share bytes in runs of {axis.unit}; a new axis of {lengths[inner]} would cut one")
        result[inner] = dataclasses.replace(result[inner], unit=axis.unit, is_packed=True)
    return result


def reshaped(axes: Sequence[Axis], new_shape: Sequence[int]) -> list[Axis]:
    """The axes after a reshape. QuantError if the size differs, or a tile or a byte would be cut."""
    result: list[Axis] = []
    for old, new in regrouped([a.length for a in axes], new_shape):
        group = [axes[i] for i in old]
        lengths = [new_shape[j] for j in new]
        if [a.length for a in group] == lengths:
            result += group
        elif lengths:
            result += split(merged(group), lengths)
        elif any(a.is_packed for a in group):
            raise QuantError("the packed axis cannot be dropped")
    return result

"""Where the elements of a parameter are after layout operations.

A product sees its weight after transposes, reshapes and slices. The offsets map each axis of that operand to elements of the stored
parameter, so that statistics can be put in the parameter's order. They are NumPy arrays, computed while tracing.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from ...array.axis_move import AxisMove
from ...errors import UnsupportedError

_LONGEST_AXIS = 1 << 24
"""How many elements a merged axis may have for its offsets to be known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Offsets:
    """Where the elements of a parameter are after layout operations.

    Element `[i, j, ..]` is the parameter's element `first + axes[0][i] + axes[1][j] + ..`, counted in row-major order. Along axes of
    which a loop takes each element, or an index at run time one, it counts from that element.

    Attributes:
        shape: the parameter's shape.
        axes: the offsets along each axis; None where they are unknown.
        first: what is added to them; None where it is unknown.
        looped: how many of the parameter's first axes loops take an element of; None where it is another one.
    """

    shape: tuple[int, ...]
    axes: tuple[np.ndarray | None, ...]
    first: int | None = 0
    looped: int | None = 0

    @classmethod
    def of(cls, shape: Sequence[int]) -> Self:
        """The offsets of a parameter itself."""
        return cls(tuple(shape), tuple(map(_row_major, shape, _strides(shape))))

    def moved(self, move: AxisMove) -> Self:
        """The offsets after a layout operation."""
        axes = [self.axes[a] for a in move.order]
        if move.slices:
            axes = [_sliced(own, part, n) for own, part, n in zip(axes, move.slices, move.lengths, strict=True)]
            for axis in self.indexed(move):
                axes[move.order.index(axis)] = np.zeros(1, np.int64)
        split = [
            one for old, new in move.groups for one in _split(_merged([axes[a] for a in old]), [move.units[a] for a in new])
        ]
        first = self.first
        if first is not None:
            before, after = _first(axes), _first(split)
            first = None if before is None or after is None else first + before - after
        found = []
        for axis, (own, n) in enumerate(zip(split, move.result, strict=True)):
            if own is not None and len(own) != n:
                own = np.full(n, own[0])  # repeated
            if own is not None and axis in move.flipped:
                own = own[::-1]
            found.append(own)
        return dataclasses.replace(self, axes=tuple(found), first=first)

    def indexed(self, move: AxisMove) -> dict[int, int]:
        """The axes of which a layout operation takes one element, chosen at run time, if they are axes of the parameter.

        Returns:
            For each of these axes the parameter's, negative.
        """
        found = {}
        for axis, part in zip(move.order, move.slices, strict=False):
            if part.start is None and part.stop == 1 and move.shape[axis] > 1:
                found.update(zip([axis], self.parameter_axes([axis]), strict=False))
        return found

    def element(self) -> Self:
        """The offsets of one element of the first axis."""
        looped, whole = None, self.whole_axis(0)
        if self.looped is not None and whole is not None and whole[0] == self.looped - len(self.shape):
            looped = self.looped + 1
        return dataclasses.replace(self, axes=self.axes[1:], looped=looped)

    def whole_axis(self, axis: int) -> tuple[int, int] | None:
        """The parameter's axis, negative, that an axis is, and the step along it: -1 where it is reversed, else 1.

        None where it is none of them, such as a part of one, or several merged.
        """
        own = self.axes[axis]
        if own is None:
            return None
        for step in (1, -1):
            if found := dataclasses.replace(self, axes=(own[::step],)).parameter_axes((0,)):
                return found[0], step
        return None

    def layer(self) -> dict[int, int]:
        """Which element of stacked layers this is: its index along each of their axes, negative ones of the parameter.

        These are the parameter's first axes, after those that loops take elements of, if all others are axes of this array. Empty if it
        is a part of a layer or of several, or if its place is unknown. An index that is known at run time counts as 0.
        """
        own, ndim = self.parameter_axes(range(len(self.axes))), len(self.shape)
        start = _first(self.axes)
        if self.first is None or self.looped is None or start is None or len(own) < len(self.axes):
            return {}
        end = ndim - len(own)
        if set(own) != set(range(end - ndim, 0)):
            return {}
        indices = np.unravel_index(self.first + start, self.shape)
        return {axis - ndim: int(indices[axis]) for axis in range(self.looped, end)}

    def parameter_axes(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The parameter's axis, negative, that each of some axes is. Empty where one is none of them."""
        found: list[int] = []
        for own in (self.axes[a] for a in axes):
            for axis, (n, stride) in enumerate(zip(self.shape, _strides(self.shape), strict=True)):
                if axis not in found and own is not None and np.array_equal(own - own[:1], _row_major(n, stride)):
                    found.append(axis)
                    break
            else:
                return ()
        return tuple(axis - len(self.shape) for axis in found)

    def order(self, axes: Sequence[int]) -> np.ndarray | None:
        """The order of the elements of some merged axes in which they are in the parameter; None where they are in it.

        Raises:
            UnsupportedError: where it is unknown.
        """
        merged = _merged([self.axes[a] for a in axes])
        if merged is None:
            raise UnsupportedError(
                "its products contract elements that are chosen at run time, or in an order that is no transpose of its axes; store "
                "it in the order of its products"
            )
        if np.all(np.diff(merged) >= 0):
            return None
        return np.argsort(merged, kind="stable")


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[a + 1 :]) for a in range(len(shape))]


def _row_major(length: int, stride: int) -> np.ndarray:
    return stride * np.arange(length, dtype=np.int64)


def _first(axes: Sequence[np.ndarray | None]) -> int | None:
    """The sum of the first offsets; None where one is unknown."""
    if any(own is None or not len(own) for own in axes):
        return None
    return sum(int(own[0]) for own in axes if own is not None)


def _sliced(own: np.ndarray | None, part: slice, length: int) -> np.ndarray | None:
    """The offsets of a slice. A slice whose start is None starts anywhere."""
    if own is None or len(own) == length:
        return own
    return None if part.start is None else own[part]


def _merged(axes: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The offsets of several axes that are merged."""
    known = [own for own in axes if own is not None]
    if len(known) < len(axes) or math.prod(map(len, known)) > _LONGEST_AXIS:
        return None
    return functools.reduce(lambda outer, inner: np.add.outer(outer, inner).ravel(), known, np.zeros(1, np.int64))


def _split(own: np.ndarray | None, lengths: Sequence[int]) -> list[np.ndarray | None]:
    """The offsets of the axes that an axis is split into. They are unknown where they depend on each other."""
    if own is None or len(lengths) < 2:
        return [own] * len(lengths)
    grid = own.reshape(lengths)
    lines: list[np.ndarray | None] = []
    for axis in range(len(lengths)):
        line = np.moveaxis(grid, axis, 0).reshape(lengths[axis], -1)[:, 0]
        lines.append(line - line[:1])
    merged = _merged(lines)
    if merged is None or not np.array_equal(merged, own - own[:1]):
        return [None] * len(lengths)
    return lines

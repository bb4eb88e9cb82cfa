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

    Element `[i, j, ..]` is the parameter's element `axes[0][i] + axes[1][j] + ..`, counted in row-major order from an unknown first.

    Attributes:
        shape: the parameter's shape.
        axes: the offsets along each axis; None where they are unknown.
    """

    shape: tuple[int, ...]
    axes: tuple[np.ndarray | None, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Self:
        """The offsets of a parameter itself."""
        return cls(tuple(shape), tuple(map(_row_major, shape, _strides(shape))))

    def moved(self, move: AxisMove) -> Self:
        """The offsets after a layout operation."""
        axes = [self.axes[a] for a in move.order]
        if move.slices:
            axes = [_sliced(own, part, n) for own, part, n in zip(axes, move.slices, move.lengths, strict=True)]
        split = [
            one for old, new in move.groups for one in _split(_merged([axes[a] for a in old]), [move.units[a] for a in new])
        ]
        found = []
        for axis, (own, n) in enumerate(zip(split, move.result, strict=True)):
            if own is not None and len(own) != n:
                own = np.zeros(n, np.int64)  # repeated
            if own is not None and axis in move.flipped:
                own = own[::-1]
            found.append(own)
        return dataclasses.replace(self, axes=tuple(found))

    def element(self) -> Self:
        """The offsets of one element of the first axis."""
        return dataclasses.replace(self, axes=self.axes[1:])

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

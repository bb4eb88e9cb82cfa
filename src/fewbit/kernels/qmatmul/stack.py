"""A quantized operand as native kernels take it: a stack of matrices, whose rows or columns are contracted."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._tiles import Tile
from ...array import QArray, Scheme
from ...array.layout import Axis, merged
from ...array.packing import code_capacity, codes_per_unit
from ...errors import QuantError
from .problem import Operand

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Which axes of an operand become the batch, the rows and the columns of `[B, R, C]`.

    Attributes:
        batch: the first axes.
        rows: the axes after them.
        cols: the last axes.
        contracts_cols: whether the columns are contracted, or the rows.
        merged: what the rows and the columns are as one axis each.
        scheme: the scheme of the stack.
    """

    batch: Axes
    rows: Axes
    cols: Axes
    contracts_cols: bool
    merged: tuple[Axis, Axis]
    scheme: Scheme

    @property
    def contracted(self) -> Axes:
        """The contracted axes in the order in which they lie in memory."""
        return self.cols if self.contracts_cols else self.rows

    def of(self, q: QArray) -> QArray:
        """The stack of a QArray; no code is moved."""
        full = tuple(n if a in self.batch else m for a, (n, m) in enumerate(zip(q.shape, q.scale.shape, strict=True)))

        def folded(leaf: Any) -> Any:
            if isinstance(leaf, QArray):
                scheme = leaf.scheme.with_tiles(_stacked_tiles(leaf.scheme, leaf.tiles, self), -1)
                return _replaced(leaf, folded, self, scheme)
            wide = _spread_shape(leaf.shape, full, self)
            return (leaf if wide == leaf.shape else jnp.broadcast_to(leaf, wide)).reshape(_shape(wide, self))

        return _replaced(q, folded, self, self.scheme)


def stack_of(operand: Operand, contracted: Axes, batch: Axes) -> Stack:
    """How a quantized operand becomes a stack of matrices.

    Args:
        operand: its description.
        contracted: its contracted axes.
        batch: its batch axes.

    Raises:
        QuantError: where it does not without moving elements, or a tile or a byte would be torn.
    """
    assert operand.scheme is not None
    first, ndim = len(batch), len(operand.shape)
    if batch != tuple(range(first)):
        raise QuantError(f"its batch axes {batch} are not its first ones")
    rest, held = tuple(range(first, ndim)), set(contracted)
    split = ndim - len(held)
    if not held or (set(rest[len(rest) - len(held) :]) != held and set(rest[: len(held)]) != held):
        raise QuantError(f"it contracts axes {contracted}; the first or the last ones after the batch are expected")
    contracts_cols = set(rest[len(rest) - len(held) :]) == held
    split = ndim - len(held) if contracts_cols else first + len(held)
    rows, cols = tuple(range(first, split)), tuple(range(split, ndim))
    axes = _axes(operand)
    if any(axes[a].is_packed for a in batch):
        raise QuantError("its codes share bytes along a batch axis")
    row, col = (merged([axes[a] for a in group]) if group else Axis(1, 1) for group in (rows, cols))
    if apart := [a for a in operand.stacked if a not in batch]:
        raise QuantError(f"its tensor scale varies along axes {tuple(apart)}, which are no batch axes")
    tiles: tuple[Tile, ...] = (_batch_tile([axes[a] for a in batch], operand.scheme), row.tile, col.tile)
    scheme = operand.scheme.with_tiles(tiles, -2 if row.is_packed else -1)
    return Stack(batch, rows, cols, contracts_cols, (row, col), scheme)


def _axes(operand: Operand) -> list[Axis]:
    """The axes of an operand for the algebra of layouts."""
    scheme, ndim = operand.scheme, len(operand.shape)
    assert scheme is not None
    unit = codes_per_unit(scheme.format.bits, scheme.packing)
    axes = []
    for axis, (n, tile) in enumerate(zip(operand.shape, scheme.tiles(ndim), strict=True)):
        own = None if n != 1 and (tile is None or tile >= n) else 1 if n == 1 else tile
        is_packed = unit > 1 and axis == scheme.pack_axis + ndim
        axes.append(Axis(n, own, unit if is_packed else 1, is_packed))
    return axes


def _batch_tile(axes: list[Axis], scheme: Scheme) -> Tile:
    """The tile of the one axis that the batch axes become: None where they share their scales, else 1.

    Raises:
        QuantError: where a tile holds some matrices of an axis, and not all.
    """
    tiles = {axis.tile for axis in axes if axis.length != 1}
    if cut := tiles - {None, 1}:
        raise QuantError(f"{next(iter(cut))} matrices of a batch axis share their scales")
    if len(tiles) > 1 and isinstance(scheme.scale, Scheme):
        raise QuantError("its scales, which are quantized, are shared along some of its batch axes")
    return 1 if 1 in tiles else None


def _spread_shape(shape: tuple[int, ...], full: tuple[int, ...], stack: Stack) -> tuple[int, ...]:
    """The shape that scales must have to be folded: within a group of axes there is one for all, or one for each."""
    wide = list(shape)
    for group in (stack.batch, stack.rows, stack.cols):
        for axis in group if any(shape[a] != 1 for a in group) else ():
            wide[axis] = full[axis]
    return tuple(wide)


def _stacked_tiles(scheme: Scheme, tiles: tuple[Tile, ...], stack: Stack) -> tuple[Tile, ...]:
    """The tiles of scales that are quantized themselves: one for all, or each its own."""
    if all(t is None or t == 1 for t in tiles) and scheme.format.bits == 8:
        return tuple(None if all(tiles[a] is None for a in group) else 1 for group in (stack.batch, stack.rows, stack.cols))
    raise QuantError("its scales are quantized in tiles")


def _shape(shape: tuple[int, ...], stack: Stack) -> tuple[int, int, int]:
    """The shape of an array whose axes are folded."""
    batch, rows, cols = (int(np.prod([shape[a] for a in group])) for group in (stack.batch, stack.rows, stack.cols))
    return batch, rows, cols


def _replaced(q: QArray, folded: Any, stack: Stack, scheme: Scheme) -> QArray:
    """The QArray with folded leaves under another scheme."""
    codes, slack = q.codes.reshape(_shape(q.codes.shape, stack)), 0
    if scheme.format.bits < 8 or scheme.packing.interleave:
        length = q.shape[q.scheme.pack_axis] * (codes.shape[scheme.pack_axis] // q.codes.shape[q.scheme.pack_axis])
        slack = code_capacity(codes.shape[scheme.pack_axis], scheme.format.bits) - length
    zero, tensor = (None if leaf is None else folded(leaf) for leaf in (q.zero_point, q.tensor_scale))
    return QArray(codes, folded(q.scale), zero, tensor, scheme, jnp.dtype(q.dtype), slack, None)

"""Operands, and quantized ones viewed as `[B, R, C]`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._tiles import Tile
from ...array.layout import Axis, merged
from ...array.packing import code_capacity, codes_per_unit
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError

Axes = tuple[int, ...]
DimensionNumbers: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """The description of one operand.

    Attributes:
        shape: its logical shape.
        dtype: the name of its logical dtype.
        scheme: its Scheme, with the tiles of its scales; None for an array.
        stacked: axes along which the tensor scale varies, because arrays with one each were stacked.
    """

    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None
    stacked: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: "QArray | jax.Array") -> Self:
        """Describes an operand."""
        shape, dtype = tuple(x.shape), jnp.dtype(x.dtype).name
        if not isinstance(x, QArray):
            return cls(shape, dtype, None)
        stacked = ()
        if x.tensor_scale is not None:
            stacked = tuple(a for a, n in enumerate(x.tensor_scale.shape) if n != 1)
        return cls(shape, dtype, _scheme_of(x), stacked)

    def __str__(self) -> str:
        kind = self.dtype
        if self.scheme is not None:
            kind = self.scheme.name
        return f"{kind}[{','.join(map(str, self.shape))}]"


def _scheme_of(q: QArray) -> Scheme:
    """The scheme of a QArray, with tile 1 along stacked axes."""
    named = q.scheme.tiles(q.ndim)
    tiles = tuple(1 if m == n != 1 else t for t, n, m in zip(named, q.shape, q.scale.shape, strict=True))
    if tiles == named:
        return q.scheme
    return q.scheme.with_tiles(tiles, q.scheme.pack_axis)


@dataclasses.dataclass(frozen=True)
class MatrixView:
    """How the axes of an operand become the batch, rows and columns of `[B, R, C]`.

    Attributes:
        batch: the first axes.
        rows: the axes after them.
        cols: the last axes.
        contracts_cols: whether the columns are contracted, or the rows.
        merged: the rows and the columns as one axis each.
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
        """The contracted axes, in memory order."""
        if self.contracts_cols:
            return self.cols
        return self.rows

    @property
    def free(self) -> Axes:
        """The axes that are not contracted, in memory order."""
        if self.contracts_cols:
            return self.rows
        return self.cols

    @property
    def contraction(self) -> Axis:
        """The contracted axes as one axis."""
        return self.merged[int(self.contracts_cols)]

    def groups_of(self, numbers: DimensionNumbers, at: int, ndim: int) -> tuple[Axes, Axes, Axes]:
        """Batch, free and contracted axes of the other operand, number `at`."""
        contracting, batch = numbers[0], numbers[1][at]
        contracted = tuple(contracting[at][contracting[1 - at].index(axis)] for axis in self.contracted)
        return batch, tuple(a for a in range(ndim) if a not in contracted and a not in batch), contracted

    def unfolded(
        self, y: jax.Array, x: jax.Array | QArray, q: QArray, groups: tuple[Axes, Axes, Axes], at: int
    ) -> jax.Array:
        """The product `[B, M, N]` with the operands' axes; x is operand `at`."""
        batch, free, _ = ([x.shape[a] for a in group] for group in groups)
        own = [q.shape[a] for a in self.free]
        if at == 1:
            return jnp.swapaxes(y, 1, 2).reshape(*batch, *own, *free)
        return y.reshape(*batch, *free, *own)

    def of(self, q: QArray) -> QArray:
        """Views a QArray as the stack, without moving codes."""
        full = tuple(n if a in self.batch else m for a, (n, m) in enumerate(zip(q.shape, q.scale.shape, strict=True)))

        def folded(leaf: Any) -> Any:
            if isinstance(leaf, QArray):
                scheme = leaf.scheme.with_tiles(_stacked_tiles(leaf.scheme, leaf.tiles, self), -1)
                return _replaced(leaf, folded, self, scheme)
            wide = _folded_shape(leaf.shape, full, self)
            if wide != leaf.shape:
                leaf = jnp.broadcast_to(leaf, wide)
            return leaf.reshape(_shape(wide, self))

        return _replaced(q, folded, self, self.scheme)


def folded_axes(a: jax.Array, groups: tuple[Axes, ...]) -> jax.Array:
    """The array with each group of axes merged into one."""
    shape = [int(np.prod([a.shape[axis] for axis in group])) for group in groups]
    return a.transpose([axis for group in groups for axis in group]).reshape(shape)


def contracted_axis(contracts_cols: bool) -> int:
    """The contracted axis of `[B, R, C]`. The free one is 3 minus it."""
    return 1 + contracts_cols


def matrix_view(operand: Operand, contracted: Axes, batch: Axes) -> MatrixView:
    """Views an operand with these contracted and batch axes as `[B, R, C]`.

    Raises:
        QuantError: if that would move elements, or split a block or a byte.
    """
    assert operand.scheme is not None
    first, ndim, count = len(batch), len(operand.shape), len(set(contracted))
    if batch != tuple(range(first)):
        raise QuantError(f"its batch axes {batch} are not its first ones")
    contracts_cols = set(contracted) == set(range(ndim - count, ndim))
    if not count or not (contracts_cols or set(contracted) == set(range(first, first + count))):
        raise QuantError(f"it contracts axes {contracted}; the first or the last ones after the batch are expected")
    split = ndim - count if contracts_cols else first + count
    rows, cols = tuple(range(first, split)), tuple(range(split, ndim))
    axes = _axes(operand)
    if any(axes[a].is_packed for a in batch):
        raise QuantError("its codes share bytes along a batch axis")
    row, col = (merged([axes[a] for a in group]) for group in (rows, cols))
    if varying := tuple(a for a in operand.stacked if a not in batch):
        raise QuantError(f"its tensor scale varies along axes {varying}, which are not batch axes")
    tiles: tuple[Tile, ...] = (_batch_tile([axes[a] for a in batch], operand.scheme), row.tile, col.tile)
    scheme = operand.scheme.with_tiles(tiles, -2 if row.is_packed else -1)
    return MatrixView(batch, rows, cols, contracts_cols, (row, col), scheme)


def _axes(operand: Operand) -> list[Axis]:
    """The axes of an operand, for `array.layout`."""
    scheme, ndim = operand.scheme, len(operand.shape)
    assert scheme is not None
    unit = codes_per_unit(scheme.format.bits, scheme.packing)
    axes = []
    for axis, (n, tile) in enumerate(zip(operand.shape, scheme.tiles(ndim), strict=True)):
        if n == 1:
            tile = 1
        elif tile is not None and tile >= n:
            tile = None
        is_packed = unit > 1 and axis == scheme.pack_axis + ndim
        axes.append(Axis(n, tile, unit if is_packed else 1, is_packed))
    return axes


def _batch_tile(axes: list[Axis], scheme: Scheme) -> Tile:
    """The tile of the merged batch axis: None (shared scales) or 1.

    Raises:
        QuantError: if some matrices of an axis share scales, but not all.
    """
    tiles = {axis.tile for axis in axes if axis.length != 1}
    if cut := tiles - {None, 1}:
        raise QuantError(f"{next(iter(cut))} matrices of a batch axis share their scales")
    if len(tiles) > 1 and isinstance(scheme.scale, Scheme):
        raise QuantError("its scales, which are quantized, are shared along only some of its batch axes")
    return 1 if 1 in tiles else None


def _folded_shape(shape: tuple[int, ...], full: tuple[int, ...], view: MatrixView) -> tuple[int, ...]:
    """The shape to which scales are broadcast before folding: per group of axes, 1 or full."""
    wide = list(shape)
    for group in (view.batch, view.rows, view.cols):
        if any(shape[a] != 1 for a in group):
            for axis in group:
                wide[axis] = full[axis]
    return tuple(wide)


def _stacked_tiles(scheme: Scheme, tiles: tuple[Tile, ...], view: MatrixView) -> tuple[Tile, ...]:
    """The folded tiles of scales that are quantized themselves."""
    if all(t is None or t == 1 for t in tiles) and scheme.format.bits == 8:
        return tuple(None if all(tiles[a] is None for a in group) else 1 for group in (view.batch, view.rows, view.cols))
    raise QuantError("its scales are quantized in tiles")


def _shape(shape: tuple[int, ...], view: MatrixView) -> tuple[int, int, int]:
    """The shape of an array with folded axes, `[B, R, C]`."""
    batch, rows, cols = (int(np.prod([shape[a] for a in group])) for group in (view.batch, view.rows, view.cols))
    return batch, rows, cols


def _replaced(q: QArray, folded: Callable[[Any], Any], view: MatrixView, scheme: Scheme) -> QArray:
    """The QArray with folded leaves and another scheme."""
    codes, slack = q.codes.reshape(_shape(q.codes.shape, view)), 0
    if scheme.format.bits < 8 or scheme.packing.interleave:
        length = q.shape[q.scheme.pack_axis] * (codes.shape[scheme.pack_axis] // q.codes.shape[q.scheme.pack_axis])
        slack = code_capacity(codes.shape[scheme.pack_axis], scheme.format.bits) - length
    zero, tensor = jax.tree.map(folded, (q.zero_point, q.tensor_scale))
    return QArray(codes, folded(q.scale), zero, tensor, scheme, jnp.dtype(q.dtype), slack, None)

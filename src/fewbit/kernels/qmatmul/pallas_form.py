"""A product as the TPU kernel sees it: activations, and a matrix of bytes with its scales, the axis of both first.

The bytes are not moved for it: a matrix that is stored the other way round is transposed block by block, in VMEM.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray, Scheme
from ...array.packing import codes_per_unit
from ...formats import AbstractFormat, Integer
from .pallas_decode import undecodable


@dataclasses.dataclass(frozen=True)
class Form:
    """A product of activations `[M, C]` with a packed matrix of `rows x columns` bytes, contracting one of its axes.

    A row is one byte, or of codes that straddle bytes a group of `span` bytes (3 of codes of 6 bits). It holds `planes` codes
    that follow each other along the axis of the rows: row `i` of a column has the elements `i * planes .. i * planes +
    planes - 1`, in the order of `Packing.interleave` where codes have another one. Of whole numbers of 4 bits a row is one
    code, half a byte: the kernel has them in order without planes.

    Attributes:
        m: rows of activations.
        planes: how many codes a row holds.
        rows: rows along the packed axis; of 8-bit codes, along the tiled one.
        bytes_along: the bytes there; the last row may be short of some.
        columns: elements along the other axis.
        length: elements along the packed axis; the last row may hold fewer than `planes`.
        contracts_rows: whether the packed axis is contracted, or the other one.
        is_transposed: whether the bytes are stored `[columns, rows]`.
        tile: how many rows share a scale; None: all.
        column_tile: how many columns share a scale; None: all.
        scheme: the scheme of the matrix.
        dtype: of the operands of the products, bfloat16 or float32.
        result: the dtype of the result, likewise.
        precision: of the products.
    """

    m: int
    planes: int
    rows: int
    bytes_along: int
    columns: int
    length: int
    contracts_rows: bool
    is_transposed: bool
    tile: int | None
    column_tile: int | None
    scheme: Scheme
    dtype: np.dtype
    result: np.dtype
    precision: jax.lax.Precision | None

    @classmethod
    def of(
        cls,
        x: jax.Array | jax.ShapeDtypeStruct,
        q: QArray,
        *,
        contracts_last: bool,
        result: Any,
        precision: Any = None,
        halves: bool = True,
    ) -> "Form":
        """The form of `x @ w` or `x @ w.T` for each matrix of a stack.

        Args:
            x: `[B, M, K]`.
            q: `[B, R, C]`.
            contracts_last: whether K is C, or R.
            result: the dtype of the result.
            precision: as in `lax.dot_general`.
            halves: as in `Config`.
        """
        is_transposed = _is_transposed(q.scheme)
        row_axis, column_axis = (-1, -2) if is_transposed else (-2, -1)
        tiles, counts = q.scheme.tiles(3), q.scale.shape
        row_tile, column_tile = tiles[row_axis], tiles[column_axis]
        is_bfloat16 = x.dtype == q.dtype == jnp.bfloat16
        planes, bytes_along = _planes(q.scheme, halves=halves), q.codes.shape[row_axis]
        return cls(
            m=x.shape[1],
            planes=planes,
            rows=math.ceil(bytes_along * 8 / (planes * q.scheme.format.bits)),
            bytes_along=bytes_along,
            columns=q.shape[column_axis],
            length=q.shape[row_axis],
            contracts_rows=contracts_last == is_transposed,
            is_transposed=is_transposed,
            tile=None if counts[row_axis] == 1 else (row_tile or 1) // planes,
            column_tile=None if counts[column_axis] == 1 else column_tile or 1,
            scheme=q.scheme,
            dtype=np.dtype(jnp.bfloat16 if is_bfloat16 else np.float32),
            result=np.dtype(jnp.bfloat16 if result == jnp.bfloat16 else np.float32),
            precision=None if is_bfloat16 else float32_precision(precision),
        )

    @property
    def is_split(self) -> bool:
        """Whether a byte is two rows."""
        return self.planes == 1 and self.scheme.format.bits == 4

    @property
    def span(self) -> int:
        """How many bytes a row has; of rows that are half a byte, one."""
        return self.in_bytes(1) or 1

    def in_bytes(self, rows: int) -> int:
        """The bytes of so many rows."""
        return rows * self.planes * self.scheme.format.bits // 8

    @property
    def tiles(self) -> int:
        """How many scales there are along the rows."""
        return 1 if self.tile is None else math.ceil(self.rows / self.tile)

    @property
    def scale_columns(self) -> int:
        """How many scales there are along the columns; those of longer tiles are repeated."""
        return 1 if self.column_tile is None else self.columns

    @property
    def scale_sublanes(self) -> int:
        """How many rows of scales, and of zero points, a block must have a multiple of: 8 of four bytes, 32 of one."""
        kept = [h for h in (self.scheme.scale, self.scheme.zero_point) if h is not None and not isinstance(h, Scheme)]
        return max((32 if isinstance(h, AbstractFormat) else 32 // np.dtype(h).itemsize for h in kept), default=8)

    @property
    def has_offsets(self) -> bool:
        """Whether the zero points are float numbers that are added after the scale, and not codes."""
        return self.scheme.zero_point is not None and not isinstance(self.scheme.zero_point, AbstractFormat)

    @property
    def scales_sums(self) -> bool:
        """Whether one scale serves the whole contraction, so that the sums take it, and not each number."""
        return self.contracts_rows and self.tiles == 1 and not self.has_offsets


def refusal(scheme: Scheme, tile: int | None, *dtypes: Any, precision: Any) -> str | None:
    """Why the kernel cannot compute with a stack of matrices of a scheme; None when it can.

    Args:
        scheme: the scheme of the stack `[B, R, C]`.
        tile: how many elements share a scale along the packed axis; None: all.
        dtypes: those of the operands and of the result.
        precision: as in `lax.dot_general`.
    """
    if (wrong := next((d for d in map(jnp.dtype, dtypes) if d not in (jnp.bfloat16, jnp.float32)), None)) is not None:
        return f"it multiplies bfloat16 and float32, not {wrong.name}"
    try:
        float32_precision(precision)
    except ValueError:
        return f"precision is {precision!r}; None or a name of jax.lax.Precision is expected"
    planes = codes_per_unit(scheme.format.bits, scheme.packing)
    holders = [h for h in (scheme.format, scheme.scale, scheme.zero_point) if isinstance(h, AbstractFormat)]
    if (reason := next(filter(None, map(undecodable, holders)), None)) is not None:
        return reason
    if scheme.packing.interleave and scheme.format.bits == 8:
        return "its bytes are interleaved; bytes in order are read, and narrower codes in any"
    if tile is not None and tile % planes:
        return f"tiles of {tile} along the packed axis cut bytes of {planes} codes"
    return None


def float32_precision(precision: Any) -> jax.lax.Precision:
    """The precision of float32 products: the highest, but where `Precision.DEFAULT` is named, one pass in bfloat16.

    >>> float32_precision(None).name, float32_precision("default").name
    ('HIGHEST', 'DEFAULT')
    """
    sides = precision if isinstance(precision, tuple) else (precision,)
    named = {None if side is None else jax.lax.Precision(side) for side in sides}
    return jax.lax.Precision.DEFAULT if named == {jax.lax.Precision.DEFAULT} else jax.lax.Precision.HIGHEST


def _planes(scheme: Scheme, *, halves: bool) -> int:
    """How many codes a row holds."""
    is_split = halves and isinstance(scheme.format, Integer) and scheme.format.bits == 4 and not scheme.packing.high_first
    return 1 if is_split else codes_per_unit(scheme.format.bits)


def _is_transposed(scheme: Scheme) -> bool:
    """Whether bytes and scales run along the last axis: the packed one, or of 8-bit codes the one with tiles."""
    if scheme.format.bits < 8:
        return scheme.pack_axis == -1
    _, rows, columns = scheme.tiles(3)
    return columns not in (1, None) and rows in (1, None)

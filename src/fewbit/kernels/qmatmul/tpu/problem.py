"""The TPU kernel's view of a product: activations and a matrix of bytes.

The packed axis of the matrix is first. Bytes are not moved for it: a matrix stored `[columns, rows]` is transposed block by
block in VMEM.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....array.packing import codes_per_unit
from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ...pallas.decode import undecodable
from ..precision import float32_precision, refused_float32_precision


@dataclasses.dataclass(frozen=True)
class Form:
    """Activations `[M, C]` times a packed matrix `[rows, columns]`, contracting either axis.

    A row is one byte, or for codes that straddle bytes a group of `span` bytes (3 for 6-bit codes). It has `planes` codes that
    are adjacent along the packed axis: row `i` of a column has the elements `i * planes .. i * planes + planes - 1`, permuted by
    `Packing.interleave`. For 4-bit integers a row is one code, half a byte: the kernel reads them in order without planes.

    Attributes:
        m: rows of activations.
        planes: codes per row.
        rows: rows along the packed axis; for 8-bit codes, along the tiled one.
        bytes_along: bytes along it; the last row may be incomplete.
        columns: elements along the other axis.
        length: elements along the packed axis; the last row may have fewer than `planes`.
        contracts_rows: whether the packed axis is contracted, or the other one.
        is_transposed: whether the bytes are stored `[columns, rows]`.
        tile: rows per scale; None: all.
        column_tile: columns per scale; None: all.
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
        result: DTypeLike,
        precision: object = None,
        halves: bool = True,
    ) -> "Form":
        """The form of `x @ w` or `x @ w.T` for the matrices of a stack.

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
        dtype = kernel_dtype(x.dtype)
        if x.dtype != q.dtype:
            dtype = np.dtype(np.float32)
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
            dtype=dtype,
            result=kernel_dtype(result),
            precision=None if dtype == jnp.bfloat16 else float32_precision(precision),
        )

    @property
    def is_split(self) -> bool:
        """Whether a byte has two rows."""
        return self.planes == 1 and self.scheme.format.bits == 4

    @property
    def span(self) -> int:
        """Bytes per row; one for rows of half a byte."""
        return self.in_bytes(1) or 1

    def in_bytes(self, rows: int) -> int:
        """The bytes of a number of rows."""
        return rows * self.planes * self.scheme.format.bits // 8

    @property
    def tiles(self) -> int:
        """The number of scales along the rows."""
        return math.ceil(self.rows / (self.tile or self.rows))

    @property
    def scale_columns(self) -> int:
        """The number of scales along the columns; those of longer tiles are repeated."""
        return 1 if self.column_tile is None else self.columns

    @property
    def scale_sublanes(self) -> int:
        """Sublane multiple of scale blocks: 8 for four bytes, 32 for one."""
        sublanes = [8]
        for stored in (self.scheme.scale, self.scheme.zero_point):
            if isinstance(stored, AbstractFormat):
                sublanes.append(32)
            elif stored is not None and not isinstance(stored, Scheme):
                sublanes.append(32 // np.dtype(stored).itemsize)
        return max(sublanes)

    @property
    def has_offsets(self) -> bool:
        """Whether zero points are floats added after scaling, instead of codes."""
        return self.scheme.zero_point is not None and not isinstance(self.scheme.zero_point, AbstractFormat)

    @property
    def scales_sums(self) -> bool:
        """Whether the sums are scaled instead of each weight: one scale along the contraction."""
        return self.contracts_rows and self.tiles == 1 and not self.has_offsets


def refusal(scheme: Scheme, tile: int | None, *dtypes: DTypeLike, precision: object) -> str | None:
    """Why the kernel does not support a stack of a scheme, or None.

    `tile` is the block size along the packed axis, or None; `dtypes` are those of the operands and of the result.
    """
    for dtype in dtypes:
        if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
            return f"it multiplies bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if reason := refused_float32_precision(precision):
        return reason
    planes = codes_per_unit(scheme.format.bits, scheme.packing)
    for fmt in (scheme.format, scheme.scale, scheme.zero_point):
        if isinstance(fmt, AbstractFormat) and (reason := undecodable(fmt)) is not None:
            return reason
    if scheme.packing.interleave and scheme.format.bits == 8:
        return "its 8-bit codes are interleaved; only narrower codes may be"
    if tile is not None and tile % planes:
        return f"tiles of {tile} along the packed axis split bytes of {planes} codes"
    return None


def kernel_dtype(dtype: DTypeLike) -> np.dtype:
    """bfloat16 if the dtype is, else float32."""
    if dtype == jnp.bfloat16:
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.float32)


def _planes(scheme: Scheme, *, halves: bool) -> int:
    """Codes per row."""
    if halves and isinstance(scheme.format, Integer) and scheme.format.bits == 4 and not scheme.packing.high_first:
        return 1
    return codes_per_unit(scheme.format.bits)


def _is_transposed(scheme: Scheme) -> bool:
    """True if the last axis is packed (8-bit codes: has the tiles)."""
    if scheme.format.bits < 8:
        return scheme.pack_axis == -1
    _, rows, columns = scheme.tiles(3)
    return columns not in (1, None) and rows in (1, None)

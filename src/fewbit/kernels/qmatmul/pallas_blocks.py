"""How the TPU kernel cuts a product: the blocks that move between HBM and VMEM, and the bytes that this takes.

Everything here is plain arithmetic on shapes, so it can be checked, and counted, without a TPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .pallas_form import Form

LANES = 128


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of blocks, and what is approximated.

    Attributes:
        m: rows of activations in a block, at most.
        codes: codes along the packed axis of a block, about.
        columns: elements along the other axis of a block, about.
        halves: whether whole numbers of 4 bits are read as registers of int4, which TPUs before v5e do slowly, and not by planes.
        nf4_polynomial: whether NF4 is decoded by the polynomial of degree 5, which errs by `NF4_ERROR` at most, and not exactly.
    """

    m: int = 256
    codes: int = 1024
    columns: int = 512
    halves: bool = True
    nf4_polynomial: bool = False


PLAIN = Config()
"""The blocks that are taken where nothing else is said, and exact decoding."""

PAIRS = Config(m=1024)
"""The same where both operands are quantized: more rows of x for each byte that is read."""


@dataclasses.dataclass(frozen=True)
class Block:
    """One array as it is cut.

    Attributes:
        name: what it is.
        shape: of the array.
        dtype: of the array.
        block: the shape of a block.
        index: which block a step of the grid needs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    block: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A product cut into blocks; the grid runs over rows of activations, the result's other axis and the contraction.

    Attributes:
        form: the product.
        m: rows of activations in a block.
        rows: rows of the form, which are bytes or groups of them, along the packed axis in a block.
        columns: elements along the other axis in a block.
    """

    form: Form
    m: int
    rows: int
    columns: int

    @classmethod
    def of(cls, form: Form, config: Config) -> "Cut":
        """The cut of a product: blocks that divide their axes where there are such, and whole axes where they are short."""
        # Mosaic wants blocks of whole tiles of its own, 8 x 128 for four bytes and 32 x 128 for one, or whole axes. Rows lie
        # along the lanes of the activations or of the result; and 8 scales along them are 8 tiles of ours.
        unit = math.lcm(LANES * (2 if form.is_split else 1), form.scale_sublanes * (form.tile or 1))
        rows = fitting(form.rows, unit, config.codes // form.planes)
        columns = config.columns * config.codes // max(rows * form.planes, config.codes)
        return cls(form, min(form.m, config.m), rows, fitting(form.columns, LANES, columns))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of activations' rows, of the result's other axis, and of the contraction."""
        rows, columns = math.ceil(self.form.rows / self.rows), math.ceil(self.form.columns / self.columns)
        free, contracted = (columns, rows) if self.form.contracts_rows else (rows, columns)
        return math.ceil(self.form.m / self.m), free, contracted

    @property
    def contracted_block(self) -> int:
        """The length of a block along the contraction, in rows or in columns."""
        return self.rows if self.form.contracts_rows else self.columns

    @property
    def contracted(self) -> int:
        """The length of the contraction, in rows or in columns."""
        return self.form.rows if self.form.contracts_rows else self.form.columns

    @property
    def is_ragged(self) -> bool:
        """Whether the last block of the contraction reaches beyond the matrix."""
        return self.contracted % self.contracted_block > 0

    def activations(self) -> Block:
        """The activations, one matrix for each plane where the packed axis is contracted; filled up to whole blocks."""
        planes = self.form.planes if self.form.contracts_rows else 1
        shape = (planes, self.form.m, self.grid[2] * self.contracted_block)
        return Block("x", shape, self.form.dtype, (planes, self.m, self.contracted_block), lambda i, j, k: (0, i, k))

    def codes(self) -> Block:
        """The bytes, as they are stored."""
        in_bytes = self.form.bytes_along if self.rows == self.form.rows else self.form.in_bytes(self.rows)
        block, index = self._over_matrix(in_bytes, self.columns)
        shape = (self.form.bytes_along, self.form.columns)
        if self.form.is_transposed:
            return Block("codes", shape[::-1], np.dtype(np.uint8), block[::-1], lambda *step: index(*step)[::-1])
        return Block("codes", shape, np.dtype(np.uint8), block, index)

    def beside(self, name: str, dtype: np.dtype) -> Block:
        """Scales, zero points or the tensor scale: one for each tile of rows, and each column where columns have their own."""
        form = self.form
        shape = (1, 1) if name == "tensor_scale" else (form.tiles, form.scale_columns)
        whole, index = self._over_matrix(math.ceil(self.rows / (form.tile or 1)), self.columns)
        many = [n > 1 for n in shape]
        block = tuple(size if is_many else 1 for size, is_many in zip(whole, many, strict=True))

        def own(*step: Any) -> tuple[Any, ...]:
            return tuple(at if is_many else 0 for at, is_many in zip(index(*step), many, strict=True))

        return Block(name, shape, dtype, block, own)

    def result(self) -> Block:
        """The result, one matrix for each plane where the packed axis is not contracted."""
        form = self.form
        planes = 1 if form.contracts_rows else form.planes
        free, block = (form.columns, self.columns) if form.contracts_rows else (form.rows, self.rows)
        return Block("y", (planes, form.m, free), form.result, (planes, self.m, block), lambda i, j, k: (0, i, j))

    def stream(self) -> tuple[tuple[int, int], ...]:
        """The shapes of scratch in which codes that straddle bytes are read, a byte in each word; none for others.

        Each holds 128 columns, since that is as wide as what Mosaic reads with a stride.
        """
        count = math.ceil(self.columns / LANES) if self.form.span > 1 else 0
        return ((self.rows * self.form.span, LANES),) * count

    def _over_matrix(self, rows: int, columns: int) -> tuple[tuple[int, int], Callable[..., tuple[Any, ...]]]:
        by_rows = self.form.contracts_rows
        return (rows, columns), lambda i, j, k: (k, j) if by_rows else (j, k)


def fitting(length: int, unit: int, wanted: int) -> int:
    """The length of blocks of an axis: all of it where it is short, else a multiple of `unit` near `wanted`.

    Among the multiples from a half of `wanted` on, the largest that divides the axis is taken, and where there is none the
    largest, whose last block reaches beyond the end.

    >>> fitting(100, 32, 512), fitting(4096, 128, 512), fitting(576, 32, 512), fitting(1030, 32, 512)
    (100, 512, 288, 512)
    """
    if length <= max(wanted, unit):
        return length
    multiples = range(max(wanted // unit, 1) * unit, max(wanted // 2 - 1, 0), -unit)
    return next((n for n in multiples if length % n == 0), multiples[0])


def bytes_moved(blocks: list[Block], grid: tuple[int, ...]) -> dict[str, int]:
    """The bytes that each array moves between HBM and VMEM: a block stays where it is while the grid's steps need the same.

    Args:
        blocks: the arrays as they are cut.
        grid: how many steps each of its axes has; the last runs fastest.

    Returns:
        For each name, the bytes.
    """
    moved = dict.fromkeys((block.name for block in blocks), 0)
    for block in blocks:
        last = None
        for step in itertools.product(*map(range, grid)):
            at = block.index(*step)
            if at != last:
                moved[block.name] += _bytes_at(block, at)
            last = at
    return moved


def _bytes_at(block: Block, at: tuple[int, ...]) -> int:
    """The bytes of one block, without what lies beyond the array."""
    inside = (min(size, n - i * size) for n, size, i in zip(block.shape, block.block, at, strict=True))
    return math.prod(inside) * block.dtype.itemsize

"""Block shapes and index maps of TPU kernels.

Everything here is arithmetic on shapes, so it can be tested without a TPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .problem import Form

LANES = 128
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Config:
    """Block sizes and approximations.

    Attributes:
        m: rows of activations per block, at most.
        codes: codes along the packed axis per block, about.
        columns: elements along the other axis per block, about.
        halves: whether 4-bit integers are converted as int4 registers, which is slow before v5e, instead of in planes.
        nf4_polynomial: whether NF4 is decoded by a polynomial of degree 5, with an error of at most `NF4_ERROR`, instead of exactly.
    """

    m: int = 256
    codes: int = 1024
    columns: int = 512
    halves: bool = True
    nf4_polynomial: bool = False


PLAIN = Config()
"""The default blocks, with exact decoding."""

PAIRS = Config(m=1024)
"""The defaults for two quantized operands: more rows of x per byte read."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The block of one array.

    Attributes:
        name: of the array.
        shape: of the array.
        dtype: of the array.
        block: the shape of a block.
        index: the index map, from a grid step to a block.
        is_weight: whether it belongs to the weight, not to the rows of x or the result.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    block: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]
    is_weight: bool = False


@dataclasses.dataclass(frozen=True)
class Cut:
    """A product in blocks; its grid is (activation rows, free axis, contraction).

    Attributes:
        form: the product.
        m: rows of activations per block.
        rows: rows of the form (bytes, or groups of bytes) along the packed axis per block.
        columns: elements along the other axis per block.
    """

    form: Form
    m: int
    rows: int
    columns: int

    @classmethod
    def of(cls, form: Form, config: Config) -> "Cut":
        """Blocks that divide their axes where possible, and full axes where they are short."""
        # Mosaic needs blocks that are multiples of its tiles, 8 x 128 for four bytes and 32 x 128 for one, or full axes. Rows
        # run along the lanes of the activations or the result; and 8 scales along them are 8 of our tiles.
        lanes = LANES
        if form.is_split:
            lanes *= 2
        unit = math.lcm(lanes, form.scale_sublanes * (form.tile or 1))
        rows = fitting(form.rows, unit, config.codes // form.planes)
        columns = config.columns * config.codes // max(rows * form.planes, config.codes)
        return cls(form, min(form.m, config.m), rows, fitting(form.columns, LANES, columns))

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of activation rows, of the weight's free axis, and of the contraction."""
        rows, columns = math.ceil(self.form.rows / self.rows), math.ceil(self.form.columns / self.columns)
        return math.ceil(self.form.m / self.m), *self._swapped(rows, columns)

    @property
    def contracted_block(self) -> int:
        """The length of a block along the contraction, in rows or in columns."""
        return self._swapped(self.rows, self.columns)[1]

    @property
    def contracted(self) -> int:
        """The length of the contraction, in rows or in columns."""
        return self._swapped(self.form.rows, self.form.columns)[1]

    @property
    def is_ragged(self) -> bool:
        """Whether the last block of the contraction extends past the matrix."""
        return self.contracted % self.contracted_block > 0

    def activations(self) -> Block:
        """The padded activations, one matrix per plane if the packed axis is contracted."""
        planes = self._swapped(self.form.planes, 1)[1]
        shape = (planes, self.form.m, self.grid[2] * self.contracted_block)
        return Block("x", shape, self.form.dtype, (planes, self.m, self.contracted_block), lambda i, j, k: (0, i, k))

    def codes(self) -> Block:
        """The bytes, as stored."""
        in_bytes = self.form.in_bytes(self.rows)
        if self.rows == self.form.rows:
            in_bytes = self.form.bytes_along
        block, shape = (in_bytes, self.columns), (self.form.bytes_along, self.form.columns)
        if self.form.is_transposed:
            turned = (shape[::-1], np.dtype(np.uint8), block[::-1])
            return Block("codes", *turned, lambda i, j, k: self._swapped(j, k)[::-1], is_weight=True)
        return Block("codes", shape, np.dtype(np.uint8), block, lambda i, j, k: self._swapped(j, k), is_weight=True)

    def scales(self, name: str, dtype: np.dtype) -> Block:
        """Scales, zero points or tensor scale, per tile of rows and column."""
        shape = (self.form.tiles, self.form.scale_columns)
        if name == "tensor_scale":
            shape = (1, 1)
        full = (math.ceil(self.rows / (self.form.tile or 1)), self.columns)
        block = tuple(map(min, full, shape))

        def index(_: T, j: T, k: T) -> tuple[T | int, ...]:
            return tuple(at if n > 1 else 0 for at, n in zip(self._swapped(j, k), shape, strict=True))

        return Block(name, shape, dtype, block, index, is_weight=True)

    def result(self) -> Block:
        """The result, one matrix per plane if the packed axis is not contracted."""
        planes = self._swapped(self.form.planes, 1)[0]
        shape = (planes, self.form.m, self._swapped(self.form.rows, self.form.columns)[0])
        block = (planes, self.m, self._swapped(self.rows, self.columns)[0])
        return Block("y", shape, self.form.result, block, lambda i, j, k: (0, i, j))

    def stream(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the scratch for codes that straddle bytes; else none.

        Each has 128 columns, the widest that Mosaic reads with a stride.
        """
        if self.form.span == 1:
            return ()
        return ((self.rows * self.form.span, LANES),) * math.ceil(self.columns / LANES)

    def _swapped(self, rows: T, columns: T) -> tuple[T, T]:
        """From (rows, columns) to (free, contracted) and back."""
        if self.form.contracts_rows:
            return columns, rows
        return rows, columns


def fitting(length: int, unit: int, wanted: int) -> int:
    """The block length of an axis: all, or a multiple of `unit` near `wanted`.

    Among the multiples from `wanted / 2` to `wanted`, the largest that divides the axis; if there is none the largest, whose last
    block extends past the end.

    >>> fitting(100, 32, 512), fitting(4096, 128, 512), fitting(576, 32, 512), fitting(1030, 32, 512)
    (100, 512, 288, 512)
    """
    if length <= max(wanted, unit):
        return length
    multiples = range(max(wanted // unit, 1) * unit, max(wanted // 2 - 1, 0), -unit)
    return next((n for n in multiples if length % n == 0), multiples[0])


def bytes_moved(blocks: list[Block], grid: tuple[int, ...]) -> dict[str, int]:
    """Bytes moved between HBM and VMEM by array; consecutive steps share blocks."""
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
    """The bytes of one block within the array."""
    inside = (min(size, n - i * size) for n, size, i in zip(block.shape, block.block, at, strict=True))
    return math.prod(inside) * block.dtype.itemsize

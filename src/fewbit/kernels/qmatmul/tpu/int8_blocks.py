"""Block shapes and index maps of the TPU's integer product."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from ....array.qarray import QArray
from ....formats.format import AbstractFormat
from ..code_product import native_float
from ..matrix_view import contracted_axis
from .blocks import LANES, PAIRS, Block, Config, fitting
from .problem import kernel_dtype

Index = int | jax.Array


@dataclasses.dataclass(frozen=True)
class Pair:
    """A product of bytes `[M, K]` with packed codes of K and N, and its blocks.

    Attributes:
        lengths: M, and K and N rounded up to full bytes.
        blocks: the same, of a block.
        k: the length of the contraction.
        n: the length of the result's last axis.
        tile: the block size of scales along K; None: one scale.
        contracts_last: whether K is the last axis of the stored matrix.
        packs_last: whether codes share bytes along its last axis.
        left: the format of x.
        right: the format of the matrix.
        result: the dtype of the result.
    """

    lengths: tuple[int, int, int]
    blocks: tuple[int, int, int]
    k: int
    n: int
    tile: int | None
    contracts_last: bool
    packs_last: bool
    left: AbstractFormat
    right: AbstractFormat
    result: np.dtype

    @classmethod
    def of(cls, x: QArray, q: QArray, *, contracts_last: bool, result: DTypeLike, config: Config = PAIRS) -> "Pair":
        """The product of `[B, M, K]` bytes with `[B, R, C]`, as `paired_stacks` passes them."""
        k_axis, codes = contracted_axis(contracts_last), 8 // q.scheme.format.bits
        k, n = q.shape[k_axis], q.shape[3 - k_axis]
        tile = None
        if x.scale.shape[2] > 1:
            tile = x.tiles[2]
        elif q.scale.shape[k_axis] > 1:
            tile = q.tiles[k_axis]
        packed = q.scheme.pack_axis + 3
        units = {packed: codes}
        whole_k, whole_n = (math.ceil(q.shape[a] / units.get(a, 1)) * units.get(a, 1) for a in (k_axis, 3 - k_axis))
        unit = LANES * codes
        if tile is not None:
            unit = math.lcm(unit, 8 * tile)
        rows = fitting(whole_k, unit, config.codes)
        columns = fitting(whole_n, LANES * codes, config.columns * config.codes // max(rows, config.codes))
        return cls(
            lengths=(x.shape[1], whole_k, whole_n),
            blocks=(min(x.shape[1], config.m), rows, columns),
            k=k,
            n=n,
            tile=tile,
            contracts_last=contracts_last,
            packs_last=packed == 2,
            left=x.scheme.format,
            right=q.scheme.format,
            result=kernel_dtype(result),
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along M, N and K."""
        m, k, n = (math.ceil(length / block) for length, block in zip(self.lengths, self.blocks, strict=True))
        return m, n, k

    @property
    def codes(self) -> int:
        """Codes per byte."""
        return 8 // self.right.bits

    @property
    def tiles(self) -> int:
        """Scale blocks along K."""
        return math.ceil(self.k / (self.tile or self.k))

    @property
    def block_tiles(self) -> int:
        """Scale blocks along K of a kernel block."""
        return math.ceil(self.blocks[1] / (self.tile or self.blocks[1]))

    @property
    def is_whole(self) -> bool:
        """Whether codes are integers."""
        return native_float(self.right) is None

    def array(self, name: str, dtype: np.dtype, count: int) -> Block:
        """The block of an array.

        Args:
            name: "x", "codes", "ones", "y", or scales, zero points and sums: "x_..." per row of x, others per column of the result.
            dtype: its dtype.
            count: for scales and the like, their number along K: one, or one per scale block.
        """
        (m, _, n), (bm, bk, bn) = self.lengths, self.blocks
        wide = self.grid[2] * bk
        if name == "x":
            return Block(name, (m, wide), dtype, (bm, bk), lambda i, j, k: (i, k))
        if name == "y":
            return Block(name, (m, n), dtype, (bm, bn), lambda i, j, k: (i, j))
        if name == "ones":
            return Block(name, (8, wide), dtype, (8, bk), lambda i, j, k: (0, k))
        if name == "codes":
            return self._stored(dtype)
        of_x = name.startswith("x_")
        length, block = (m, bm) if of_x else (n, bn)
        shape, block = (count, length), (min(count, self.block_tiles), block)
        return Block(name, shape, dtype, block, lambda i, j, k: (k if count > 1 else 0, (j, i)[of_x]), is_weight=not of_x)

    def _stored(self, dtype: np.dtype) -> Block:
        """The packed bytes, as stored."""

        def order(k: Index, n: Index) -> tuple[Any, Any]:
            if self.contracts_last:
                return n, k
            return k, n

        units = [1, 1]
        units[int(self.packs_last)] = self.codes
        shape, block = (
            tuple(length // unit for length, unit in zip(order(*lengths[1:]), units, strict=True))
            for lengths in (self.lengths, self.blocks)
        )
        return Block("codes", shape, dtype, block, lambda i, j, k: order(k, j), is_weight=True)

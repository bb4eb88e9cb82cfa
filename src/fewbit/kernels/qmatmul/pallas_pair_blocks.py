"""How the TPU kernel cuts a product of two quantized operands into blocks: plain arithmetic on shapes."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...array import QArray
from ...formats import AbstractFormat
from .codes import native_float
from .pallas_blocks import LANES, PAIRS, Block, Config, fitting


@dataclasses.dataclass(frozen=True)
class Pair:
    """A product of bytes `[M, K]` with packed codes of K and N, and its blocks.

    Attributes:
        lengths: M, and K and N in whole bytes of codes.
        blocks: the same of a block.
        k: the length of the contraction.
        n: that of the result's last axis.
        tile: how many codes along K share scales; None: all.
        contracts_last: whether the stored matrix has K last.
        packs_last: whether codes share bytes along its last axis.
        left: the format of x.
        right: that of the matrix.
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
    def of(cls, x: QArray, q: QArray, *, contracts_last: bool, result: Any, config: Config = PAIRS) -> "Pair":
        """The product of `[B, M, K]` bytes with `[B, R, C]`, as `paired_product` hands them on."""
        k_axis, codes = 2 if contracts_last else 1, 8 // q.scheme.format.bits
        k, n = q.shape[k_axis], q.shape[3 - k_axis]
        tiles = [t for t, count in ((x.tiles[2], x.scale.shape[2]), (q.tiles[k_axis], q.scale.shape[k_axis])) if count > 1]
        packed = q.scheme.pack_axis + 3
        units = [codes if packed == axis else 1 for axis in (k_axis, 3 - k_axis)]
        whole_k, whole_n = (math.ceil(length / unit) * unit for length, unit in zip((k, n), units, strict=True))
        unit = LANES * codes if not tiles else math.lcm(LANES * codes, 8 * (tiles[0] or 1))
        rows = fitting(whole_k, unit, config.codes)
        columns = fitting(whole_n, LANES * codes, config.columns * config.codes // max(rows, config.codes))
        return cls(
            lengths=(x.shape[1], whole_k, whole_n),
            blocks=(min(x.shape[1], config.m), rows, columns),
            k=k,
            n=n,
            tile=tiles[0] if tiles else None,
            contracts_last=contracts_last,
            packs_last=packed == 2,
            left=x.scheme.format,
            right=q.scheme.format,
            result=np.dtype(jnp.bfloat16 if result == jnp.bfloat16 else np.float32),
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many blocks lie along M, N and K."""
        m, k, n = (math.ceil(length / block) for length, block in zip(self.lengths, self.blocks, strict=True))
        return m, n, k

    @property
    def codes(self) -> int:
        """How many codes share a byte."""
        return 8 // self.right.bits

    @property
    def tiles(self) -> int:
        """How many tiles lie along K."""
        return 1 if self.tile is None else math.ceil(self.k / self.tile)

    @property
    def block_tiles(self) -> int:
        """How many tiles a block has along K."""
        return 1 if self.tile is None else math.ceil(self.blocks[1] / self.tile)

    @property
    def is_whole(self) -> bool:
        """Whether codes are integers."""
        return native_float(self.right) is None

    def array(self, name: str, dtype: Any, count: int) -> Block:
        """An array as it is cut.

        Args:
            name: "x", "codes", "ones", "y"; "x_..." for what lies beside the rows of x; others lie beside the result's columns.
            dtype: its dtype.
            count: of what lies beside, how many it has along K: one, or one a tile.
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
        is_left, rows = name.startswith("x_"), min(count, self.block_tiles)
        length, block = (m, bm) if is_left else (n, bn)
        return Block(
            name, (count, length), dtype, (rows, block), lambda i, j, k: (k if count > 1 else 0, i if is_left else j)
        )

    def _stored(self, dtype: Any) -> Block:
        """The bytes, as they are stored."""

        def order(k: Any, n: Any) -> tuple[Any, Any]:
            return (n, k) if self.contracts_last else (k, n)

        packed = [self.codes if axis == int(self.packs_last) else 1 for axis in (0, 1)]
        shape, block = order(*self.lengths[1:]), order(*self.blocks[1:])
        in_bytes = [tuple(length // unit for length, unit in zip(whole, packed, strict=True)) for whole in (shape, block)]
        return Block("codes", in_bytes[0], dtype, in_bytes[1], lambda i, j, k: order(k, j))

"""A packed matrix and its compile-time constants for the GPU kernels."""

import dataclasses
from typing import Any

import numpy as np

from ...._tiles import Tile
from ....array.scheme import Scheme
from ....formats.codebook import Codebook
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ....formats.minifloat import Minifloat
from ...triton.constants import Codes, Scales

LONGEST = 1 << 30
"""The longest axis: element indices are 32 bits, byte offsets 64."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The right operand of `y[m, n] = sum_k x[m, k] w[k, n]`, with any strides.

    Attributes:
        scheme: its scheme, for `[K, N]`.
        k: length of the contraction.
        n: columns of the result.
    """

    scheme: Scheme
    k: int
    n: int

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self.scheme.format.bits

    @property
    def packs_k(self) -> bool:
        """True if codes that share a byte are adjacent along K, or have 8 bits."""
        return self.bits == 8 or self.scheme.pack_axis == -2

    @property
    def tile_k(self) -> int:
        """The block size along K; 0: one scale for the axis."""
        return _tile(self.scheme.tiles(2)[0], self.k)

    @property
    def tile_n(self) -> int:
        """The block size along N; 0: one scale for the axis."""
        return _tile(self.scheme.tiles(2)[1], self.n)

    def unsupported(self) -> str | None:
        """Why no kernel supports it, in a sentence; None when one does."""
        scheme, fmt = self.scheme, self.scheme.format
        if fmt.bits not in (4, 8):
            return f"codes of {fmt.bits} bits; 4 and 8 are supported"
        if not _is_decodable(fmt):
            return f"codes of {fmt.name}, which the kernels do not decode"
        if isinstance(scheme.scale, Scheme):
            return "scales that are quantized themselves"
        if isinstance(scheme.scale, AbstractFormat) and not _is_known_scale(scheme.scale):
            return f"scales stored as {scheme.scale.name}"
        if isinstance(scheme.zero_point, AbstractFormat) and not isinstance(scheme.zero_point, Integer):
            return f"zero points stored as {scheme.zero_point.name}"
        if scheme.tensor_scale and scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat):
            return "float zero points together with a tensor scale"
        if scheme.packing.to_json():
            return f"codes packed as {scheme.packing}; codes in order are supported"
        for tile in (self.tile_k, self.tile_n):
            if tile & (tile - 1):
                return f"tiles of {tile}; powers of two and per-channel scales are supported"
        if max(self.k, self.n) > LONGEST:
            return f"an axis of length {max(self.k, self.n)}; at most {LONGEST} is supported"
        return None

    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time constants for the codes and the scales."""
        scheme = self.scheme
        return {"CODES": Codes.of(scheme.format), "SCALES": Scales.of(scheme), "TK": self.tile_k, "TN": self.tile_n}

    def table(self) -> np.ndarray | None:
        """A codebook's float32 values in code order; None for other formats."""
        fmt = self.scheme.format
        if not isinstance(fmt, Codebook):
            return None
        return np.asarray(fmt.values(), np.float32)


def _tile(tile: Tile, length: int) -> int:
    """The block size along an axis, 0 if one scale covers it."""
    if tile is None or tile >= length:
        return 0
    return tile


def _is_decodable(fmt: AbstractFormat) -> bool:
    """True if the kernels decode the codes of a format."""
    if isinstance(fmt, Minifloat):
        return fmt.signed and fmt.specials != "fnuz"
    return isinstance(fmt, Integer | Codebook)


def _is_known_scale(fmt: AbstractFormat) -> bool:
    """True for decodable scales: E8M0, and E4M3 with an unused sign bit."""
    if isinstance(fmt, Minifloat):
        return fmt.specials in ("fn", "none") and fmt.mantissa in (3, 4)
    return fmt.name == "e8m0"

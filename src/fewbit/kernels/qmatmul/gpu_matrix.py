"""A packed matrix as the GPU's kernels are told of it: where its codes and scales lie, and what they mean."""

import dataclasses
from typing import Any

import numpy as np

from ..._tiles import Tile
from ...array import Scheme
from ...formats import AbstractFormat, Codebook, Integer, Minifloat
from ..quantize.triton_problem import CODEBOOK, INTEGER, MINIFLOAT, TileProblem

NO_ZERO, ZERO_CODES, OFFSETS = 0, 1, 2
FINITE, WITH_NAN, IEEE = 0, 1, 2
LONGEST = 1 << 30
"""Axes up to this length are counted in 32 bits; bytes in 64."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The right operand of `y[m, n] = sum_k x[m, k] w[k, n]`, however its bytes are strided.

    Attributes:
        scheme: its scheme, as it applies to `[K, N]`.
        k: how many elements are contracted.
        n: how many columns the result has.
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
        """Whether codes that share a byte follow each other along K; those of 8 bits share none."""
        return self.bits == 8 or self.scheme.pack_axis == -2

    @property
    def tile_k(self) -> int:
        """How many elements along K share a scale; 0: all."""
        return _tile(self.scheme.tiles(2)[0], self.k)

    @property
    def tile_n(self) -> int:
        """How many elements along N share a scale; 0: all."""
        return _tile(self.scheme.tiles(2)[1], self.n)

    def unsupported(self) -> str | None:
        """Why no kernel multiplies with it, in a sentence; None when one does."""
        scheme, fmt = self.scheme, self.scheme.format
        if fmt.bits not in (4, 8):
            return f"codes of {fmt.bits} bits; 4 and 8 are read"
        if (reason := _unknown_numbers(fmt)) is not None:
            return reason
        if isinstance(scheme.scale, Scheme):
            return "scales that are quantized themselves"
        if isinstance(scheme.scale, AbstractFormat) and not _is_known_scale(scheme.scale):
            return f"scales held as {scheme.scale.name}"
        if isinstance(scheme.zero_point, AbstractFormat) and not isinstance(scheme.zero_point, Integer):
            return f"zero points held as {scheme.zero_point.name}"
        if scheme.tensor_scale and self._zero() == OFFSETS:
            return "offsets beside a tensor scale"
        if scheme.packing.to_json():
            return f"codes packed as {scheme.packing}; codes in order are read"
        odd = [tile for tile in (self.tile_k, self.tile_n) if tile & (tile - 1)]
        if odd:
            return f"tiles of {odd[0]}; powers of two, and whole axes, are read"
        return None if max(self.k, self.n) <= LONGEST else f"an axis of {max(self.k, self.n)}; up to {LONGEST} are counted"

    def constants(self) -> dict[str, Any]:
        """What a kernel is compiled for, of the codes and the scales."""
        fmt, problem = self.scheme.format, TileProblem(self.scheme, self.k, self.n)
        scales = problem.scale_numbers()
        used = ("SCALE", "SCALE_MAN", "SCALE_BIAS", "SCALE_HIGH", "HAS_UNIT")
        specials = {"ieee": IEEE, "fn": WITH_NAN}.get(getattr(fmt, "specials", ""), FINITE)
        kind = MINIFLOAT if isinstance(fmt, Minifloat) else INTEGER if isinstance(fmt, Integer) else CODEBOOK
        return {
            "KIND": kind,
            "BITS": fmt.bits,
            "MAN": getattr(fmt, "mantissa", 0),
            "BIAS": getattr(fmt, "bias", 0),
            "HIGH": float(fmt.max),
            "STEP": float(getattr(fmt, "step", 1.0)),
            "SIGNED": bool(getattr(fmt, "signed", True)),
            "SPECIALS": specials,
            **{name: scales[name] for name in used},
            "ZERO": self._zero(),
            "ZERO_SIGNED": bool(getattr(self.scheme.zero_point, "signed", False)),
            "TK": self.tile_k,
            "TN": self.tile_n,
        }

    def table(self) -> np.ndarray | None:
        """The numbers of a codebook in code order, float32; None for formats whose numbers are computed."""
        fmt = self.scheme.format
        return np.asarray(fmt.values(), np.float32) if isinstance(fmt, Codebook) else None

    def _zero(self) -> int:
        if self.scheme.zero_point is None:
            return NO_ZERO
        return ZERO_CODES if isinstance(self.scheme.zero_point, AbstractFormat) else OFFSETS


def _tile(tile: Tile, length: int) -> int:
    """The tile of an axis, 0 where it is the whole axis."""
    return 0 if tile is None or tile >= length else tile


def _unknown_numbers(fmt: AbstractFormat) -> str | None:
    """Why the numbers of a format are not decoded; None when they are."""
    is_float = isinstance(fmt, Minifloat) and fmt.signed and fmt.specials != "fnuz"
    return None if is_float or isinstance(fmt, Integer | Codebook) else f"the numbers of {fmt.name}"


def _is_known_scale(held: AbstractFormat) -> bool:
    """Whether scales in a format are decoded: E8M0, and E4M3 without a sign that is used."""
    return held.name == "e8m0" or (
        isinstance(held, Minifloat) and held.specials in ("fn", "none") and held.mantissa in (3, 4)
    )

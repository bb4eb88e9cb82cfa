"""Compile-time constants and launch sizes of Triton quantizers."""

import dataclasses
import math
from typing import Any, Literal, Self

import numpy as np

from ...._tiles import Tile
from ....array.scales.absmax import AbsMax
from ....array.scales.mx import MX, bits_added
from ....array.scales.search.candidates import last_useful_scale, needed_doublings, needed_halvings, stored_scales
from ....array.scales.search.mse import MSE, SNR
from ....array.scales.search.stored import proven_window
from ....array.scheme import Scheme
from ....formats.codebook import Codebook
from ....formats.e8m0 import E8M0
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ....formats.minifloat import Minifloat
from ...triton.constants import Codes, Scales

LARGEST_TILE = 16384
"""The longest tile that fits in the registers of one program."""

CODES_IN_BYTES = {4: 2, 6: 4, 8: 1}
"""The least codes of each width that fill whole bytes."""

ELEMENTS = 2048
"""Elements of a program of four warps, unless a tile is longer: 16 a thread, two 128-bit loads in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a program, a constant of its kernel.

    Attributes:
        length: elements of a tile.
        padded: `length` rounded up to a power of two, and to whole bytes of codes.
        count: the number of tiles a program.
        is_even: whether tiles divide the rows and need no padding.
    """

    length: int
    padded: int
    count: int
    is_even: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """How the scale of a tile is computed, a constant of the quantize kernel.

    Attributes:
        kind: from the largest magnitude, by a search, or given by the caller.
        bound: the magnitude that a scale of 1 maps the largest one to.
        factor: a factor of the largest magnitude.
        top_exponent: the exponent of the largest number of the codes.
        largest_power: the largest exponent of a power of two that is stored.
        round_up: added to the bits of the largest magnitude, below its exponent.
        doublings: larger powers of two that a search tries.
        halvings: smaller ones.
        below: minifloat scales that a search tries below the first that saturates nothing.
        above: scales above it.
        low_places: how many of the smallest scales share one window of candidates.
        low_last: the last scale of that window.
        is_proven: whether the window is proven to contain the best scale; else all smaller ones are tried.
        fractions: how many fractions of the float scale are tried.
    """

    kind: Literal["fixed", "search", "given"]
    bound: float
    factor: float
    top_exponent: int
    largest_power: int
    round_up: int
    doublings: int
    halvings: int
    below: int
    above: int
    low_places: int
    low_last: int
    is_proven: bool
    fractions: int


@dataclasses.dataclass(frozen=True)
class TileProblem:
    """Rows to quantize or dequantize in tiles (blocks) along them.

    Attributes:
        scheme: the scheme of the rows `[rows, length]`.
        length: elements a row.
        rows: the number of rows.
    """

    scheme: Scheme
    length: int
    rows: int

    @classmethod
    def of(cls, scheme: Scheme, shape: tuple[int, ...], tiles: tuple[Tile, ...]) -> Self:
        """The problem of an array: its rows along the packed axis.

        Args:
            scheme: its scheme.
            shape: its shape.
            tiles: its tiles, as its scales have them.
        """
        axis, length = scheme.pack_axis, shape[scheme.pack_axis]
        others = [
            (t, n) for place, (t, n) in enumerate(zip(tiles, shape, strict=True), -len(shape)) if place != axis and n > 1
        ]
        cut = [t for t, n in others if t is not None and 1 < t < n]
        shared = None if any(t != 1 for t, _ in others) else 1
        row_tile = max(cut, default=shared)
        return cls(scheme.with_tiles((row_tile, tiles[axis]), -1), length, math.prod(shape) // max(1, length))

    @property
    def tile(self) -> int:
        """The tile (block) size."""
        return min(self.scheme.tiles(2)[1] or self.length, self.length)

    @property
    def tiles_in_row(self) -> int:
        """The number of tiles a row."""
        return -(-self.length // self.tile)

    @property
    def padded_tile(self) -> int:
        """The tile size rounded up to a power of two, and to whole bytes of codes."""
        return max(CODES_IN_BYTES[self.scheme.format.bits], 1 << (self.tile - 1).bit_length())

    @property
    def tiles_in_program(self) -> int:
        """The number of tiles a program."""
        return max(1, ELEMENTS // self.padded_tile)

    @property
    def warps(self) -> int:
        """The number of warps a program."""
        return min(16, max(4, self.padded_tile // 1024))

    @property
    def programs(self) -> int:
        """The number of programs."""
        return -(-self.rows * self.tiles_in_row // self.tiles_in_program)

    def unsupported(self) -> str | None:
        """Why the kernels cannot quantize this; None when they can."""
        scheme, calibration = self.scheme, self.scheme.calibration
        if reason := self.unsupported_layout():
            return reason
        if self.rows > 1 and scheme.tiles(2)[0] is None:
            return "rows share a scale; the kernel computes one for each row"
        is_matched = isinstance(calibration, MSE) or isinstance(calibration, MX) == isinstance(scheme.scale, E8M0)
        if isinstance(calibration, SNR):
            is_matched = not isinstance(scheme.scale, AbstractFormat)
        if not is_matched:
            return f"calibration {calibration} with scales stored as {scheme.scale}"
        if calibration == MX("threshold") and scheme.format.name != "e2m1":
            return "the rule mx,threshold is defined for e2m1 only"
        if not isinstance(calibration, MX | MSE | SNR | AbsMax):
            return f"calibration {calibration}; mx, mse, snr and absmax are supported"
        return None

    def unsupported_layout(self) -> str | None:
        """Why the kernels do not support these codes, with scales of each row or of all; None when they do."""
        scheme, fmt = self.scheme, self.scheme.format
        whole_codes = CODES_IN_BYTES.get(fmt.bits)
        is_ordered = isinstance(fmt, Codebook) and list(fmt.table) == sorted(fmt.table) and len(fmt.table) == 16
        is_signed_float = isinstance(fmt, Minifloat) and fmt.signed and fmt.specials != "fnuz"
        if not (is_signed_float or (isinstance(fmt, Integer) and fmt.signed) or is_ordered) or 0.0 not in fmt.values():
            return f"the numbers of {fmt.name}"
        if whole_codes is None or (self.tile % whole_codes and self.tiles_in_row > 1):
            return f"codes of {fmt.bits} bits in tiles of {self.tile}"
        if (tile := scheme.tiles(2)[0]) not in (1, None):
            return f"tiles on several axes: {tile} rows share a scale"
        if self.padded_tile > LARGEST_TILE:
            return f"tiles of {self.tile}; up to {LARGEST_TILE} fit in registers"
        scale = scheme.scale
        is_e4m3 = isinstance(scale, Minifloat) and scale.specials in ("fn", "none") and scale.mantissa in (3, 4)
        is_plain = scheme.zero_point is None and not isinstance(scale, Scheme) and not scheme.packing.to_json()
        if not is_plain or (isinstance(scale, AbstractFormat) and not (isinstance(scale, E8M0) or is_e4m3)):
            return f"scales stored as {scale}, zero points, or interleaved or high-first packing"
        if scheme.tensor_scale and isinstance(scale, E8M0):
            return "a tensor scale over powers of two"
        return None

    @property
    def fractions(self) -> np.ndarray:
        """The fractions of the absmax scale that a search of float scales tries, float32; empty without one."""
        calibration = self.scheme.calibration
        found = np.empty(0)
        if isinstance(calibration, MSE) and not isinstance(self.scheme.scale, AbstractFormat):
            found = np.linspace(1.0, calibration.low, int(calibration.steps))
        elif isinstance(calibration, SNR):
            found = np.arange(1.0, calibration.low - calibration.step / 2, -calibration.step)
        return found.astype(np.float32)

    @property
    def tiles(self) -> Tiles:
        """The constants of the layout."""
        is_even = self.length % self.tile == 0 and self.tile == self.padded_tile
        return Tiles(self.tile, self.padded_tile, self.tiles_in_program, is_even)

    def encoding(self, capability: int = 0) -> dict[str, Any]:
        """The constants of quantize, with inline PTX for a compute capability (times 10); 0: none."""
        scale = self.scheme.scale
        is_e4m3 = isinstance(scale, Minifloat) and scale.name in ("e4m3fn", "ue4m3")
        is_e2m1 = self.scheme.format.name == "e2m1" and self.tiles.is_even and capability in (100, 103)
        ptx = {"PTX_E2M1": is_e2m1, "PTX_E4M3": is_e4m3 and capability >= 89}
        return self.decoding() | {"RULE": self.rule()} | ptx

    def decoding(self) -> dict[str, Any]:
        """The constants of dequantize."""
        return {"TILES": self.tiles, "CODES": Codes.of(self.scheme.format), "SCALES": Scales.of(self.scheme)}

    def rule(self) -> Rule:
        """The constants of the scale computation."""
        scheme, fmt, calibration = self.scheme, self.scheme.format, self.scheme.calibration
        kind: Literal["fixed", "search"] = "fixed"
        doublings, halvings, window = 0, 0, (0, 0, 0, 0, False)
        if isinstance(calibration, MSE | SNR) or calibration == MX("optimal"):
            kind = "search"
            if isinstance(scheme.scale, E8M0):
                doublings, halvings = needed_doublings(fmt), needed_halvings(fmt, self.tile)
            elif isinstance(scheme.scale, Minifloat):
                window = self._window()
        below, above, low_places, low_last, is_proven = window
        return Rule(
            kind=kind,
            bound=float(np.float32(fmt.bound)),
            factor=float(np.float32(calibration.factor)) if isinstance(calibration, AbsMax) else 1.0,
            top_exponent=int(np.frexp(fmt.max)[1]) - 1,
            largest_power=int(np.frexp(Scales.of(scheme).high)[1]) - 1,
            round_up=int(bits_added(calibration.rule if isinstance(calibration, MX) else "optimal", fmt)),
            doublings=doublings,
            halvings=halvings,
            below=below,
            above=above,
            low_places=low_places,
            low_last=low_last,
            is_proven=is_proven,
            fractions=len(self.fractions),
        )

    def _window(self) -> tuple[int, int, int, int, bool]:
        """Candidates below and above the first scale that saturates nothing; how many indices are low, and their last."""
        fmt, scale = self.scheme.format, self.scheme.scale
        assert isinstance(scale, AbstractFormat)
        places = np.arange(len(stored_scales(scale)))
        proven = proven_window(fmt, scale, self.tile)
        if proven is None:
            return 0, int((last_useful_scale(fmt, scale) - places).max()), 0, 0, False
        first, last = proven
        low = int(np.argmax((first != 0) | (last != last[0])))  # the first indices, which share a window
        return int((places - first)[low:].max()), int((last - places)[low:].max()), low, int(last[0]), True

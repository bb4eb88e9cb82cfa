"""What the Triton quantizers are told of a scheme: the numbers that a kernel is compiled for, read off its formats."""

import dataclasses
from typing import Any

import numpy as np

from ...array import Scheme
from ...array.quantize import scale_limit
from ...array.scales import MSE, MX, SNR, AbsMax, ScaleStore
from ...array.scales.candidates import last_useful_scale, needed_doublings, needed_halvings, stored_scales
from ...array.scales.mx import bits_added
from ...array.scales.search import proven_window
from ...formats import E8M0, AbstractFormat, Codebook, Integer, Minifloat
from ...formats.rounding import rounding_table

LARGEST_TILE = 16384
"""A tile is held in the registers of one program."""

ELEMENTS = 2048
"""How many elements a program of four warps holds, unless one tile is longer: 16 a thread, two loads of 128 bits in bfloat16."""

MINIFLOAT, INTEGER, CODEBOOK = 0, 1, 2
POWER, SMALL_FLOAT, FLOAT = 0, 1, 2
FIXED, SEARCH, GIVEN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class TileProblem:
    """Rows of numbers to be cut into tiles of one length, by a scheme.

    Attributes:
        scheme: the scheme; its tiles are along the rows.
        length: how many numbers a row has.
        rows: how many rows there are.
    """

    scheme: Scheme
    length: int
    rows: int

    @property
    def tile(self) -> int:
        """The length of a tile."""
        tile = self.scheme.tile.get(self.scheme.pack_axis, self.scheme.tile.get(...))
        return self.length if tile is None else min(tile, self.length)

    @property
    def tiles_in_row(self) -> int:
        """How many tiles a row has."""
        return -(-self.length // self.tile)

    @property
    def padded_tile(self) -> int:
        """The power of two that a tile is held in."""
        return 1 << (self.tile - 1).bit_length()

    @property
    def tiles_in_program(self) -> int:
        """How many tiles one program takes."""
        return max(1, ELEMENTS // self.padded_tile)

    @property
    def warps(self) -> int:
        """How many warps one program has."""
        return min(16, max(4, self.padded_tile // 1024))

    @property
    def programs(self) -> int:
        """How many programs there are."""
        return -(-self.rows * self.tiles_in_row // self.tiles_in_program)

    def unsupported(self) -> str | None:
        """Why no Triton kernel quantizes this, in a sentence; None when one does."""
        reason = self.unsupported_layout()
        scheme, calibration = self.scheme, self.scheme.calibration
        if reason is not None:
            return reason
        if isinstance(calibration, MX) != isinstance(scheme.scale, E8M0) and not isinstance(calibration, MSE | SNR):
            return f"calibration {calibration} with scales held as {scheme.scale}"
        if calibration == MX("threshold") and scheme.format.name != "e2m1":
            return "the rule mx,threshold is known for e2m1 only"
        if isinstance(calibration, SNR) and isinstance(scheme.scale, AbstractFormat):
            return f"calibration {calibration} with scales held as {scheme.scale}"
        return None if isinstance(calibration, MX | MSE | SNR | AbsMax) else f"calibration {calibration}"

    def unsupported_layout(self) -> str | None:
        """Why no kernel reads or writes these codes and scales; None when one does."""
        scheme, fmt = self.scheme, self.scheme.format
        whole_codes = {4: 2, 6: 4, 8: 1}.get(fmt.bits)
        is_ordered = isinstance(fmt, Codebook) and list(fmt.table) == sorted(fmt.table) and len(fmt.table) == 16
        is_signed_float = isinstance(fmt, Minifloat) and fmt.signed and fmt.specials != "fnuz"
        if not (is_signed_float or (isinstance(fmt, Integer) and fmt.signed) or is_ordered) or 0.0 not in fmt.values():
            return f"the numbers of {fmt.name}"
        if whole_codes is None or (self.tile % whole_codes and self.tiles_in_row > 1):
            return f"codes of {fmt.bits} bits in tiles of {self.tile}"
        if any(length != 1 for axis, length in scheme.tile.items() if axis != scheme.pack_axis):
            return f"tiles on several axes, {scheme.tile}"
        if self.padded_tile > LARGEST_TILE:
            return f"tiles of {self.tile}; up to {LARGEST_TILE} are held in registers"
        held = scheme.scale
        is_e4m3 = isinstance(held, Minifloat) and held.specials in ("fn", "none") and held.mantissa in (3, 4)
        is_plain = scheme.zero_point is None and not isinstance(held, Scheme) and not scheme.packing.to_json()
        if not is_plain or (isinstance(held, AbstractFormat) and not (isinstance(held, E8M0) or is_e4m3)):
            return f"scales held as {held}, zero points and other orders of packing"
        return "a tensor scale over powers of two" if scheme.tensor_scale and isinstance(held, E8M0) else None

    @property
    def fractions(self) -> np.ndarray:
        """The fractions of the largest scale that a search of float scales tries, float32; empty for other choices."""
        calibration = self.scheme.calibration
        found = np.empty(0)
        if isinstance(calibration, MSE) and not isinstance(self.scheme.scale, AbstractFormat):
            found = np.linspace(1.0, calibration.low, int(calibration.steps))
        elif isinstance(calibration, SNR):
            found = np.arange(1.0, calibration.low - calibration.step / 2, -calibration.step)
        return found.astype(np.float32)

    def layout(self) -> dict[str, Any]:
        """The constants of the layout."""
        is_even = self.length % self.tile == 0 and self.tile == self.padded_tile
        return {"K": self.tile, "KP": self.padded_tile, "R": self.tiles_in_program, "EVEN": is_even}

    def numbers(self) -> dict[str, Any]:
        """The constants of the format of the codes."""
        fmt = self.scheme.format
        kind = MINIFLOAT if isinstance(fmt, Minifloat) else INTEGER if isinstance(fmt, Integer) else CODEBOOK
        is_codebook = isinstance(fmt, Codebook)
        return {
            "KIND": kind,
            "BITS": fmt.bits,
            "MAN": getattr(fmt, "mantissa", 0),
            "BIAS": getattr(fmt, "bias", 0),
            "LOW": fmt.min,
            "HIGH": fmt.max,
            "STEP": getattr(fmt, "step", 1.0),
            "THRESHOLDS": tuple(rounding_table(fmt).thresholds.tolist()) if is_codebook else (),
            "TABLE": fmt.table if is_codebook else (),
        }

    def scale_numbers(self) -> dict[str, Any]:
        """The constants of the scales."""
        held = self.scheme.scale
        holder = held if isinstance(held, AbstractFormat) else np.dtype(held)  # type: ignore[arg-type]
        store = ScaleStore(holder, limit=scale_limit(self.scheme))
        kind = POWER if isinstance(held, E8M0) else SMALL_FLOAT if isinstance(held, Minifloat) else FLOAT
        return {
            "SCALE": kind,
            "SCALE_MAN": getattr(held, "mantissa", 0),
            "SCALE_BIAS": getattr(held, "bias", 0),
            "SCALE_LOW": store.smallest,
            "SCALE_HIGH": store.largest,
            "SCALE_NAN": rounding_table(held).nan if isinstance(held, AbstractFormat) else 0,
            "HAS_UNIT": self.scheme.tensor_scale,
        }

    def encoding(self, capability: int = 0) -> dict[str, Any]:
        """The constants of a quantization; `capability` as for `ptx`."""
        return self.layout() | self.numbers() | self.scale_numbers() | self.choice() | self.ptx(capability)

    def decoding(self) -> dict[str, Any]:
        """The constants of a decoding."""
        numbers, scales = self.numbers(), self.scale_numbers()
        used = ("KIND", "BITS", "MAN", "BIAS", "HIGH", "STEP", "TABLE")
        has_inf = getattr(self.scheme.format, "specials", "") == "ieee"
        scales_used = ("SCALE", "SCALE_MAN", "SCALE_BIAS", "SCALE_HIGH", "HAS_UNIT")
        parts = {name: numbers[name] for name in used} | {name: scales[name] for name in scales_used}
        return self.layout() | parts | {"HAS_INF": has_inf}

    def choice(self) -> dict[str, Any]:
        """The constants of how scales are chosen."""
        scheme, fmt, calibration = self.scheme, self.scheme.format, self.scheme.calibration
        top = np.frexp(fmt.max)
        is_search = isinstance(calibration, MSE | SNR) or calibration == MX("optimal")
        is_power = isinstance(scheme.scale, E8M0)
        window = self._window() if is_search and isinstance(scheme.scale, Minifloat) else (0, 0, 0, 0, False)
        return {
            "NAN": rounding_table(fmt).nan,
            "BOUND": float(np.float32(fmt.bound)),
            "FACTOR": float(np.float32(calibration.factor)) if isinstance(calibration, AbsMax) else 1.0,
            "TOP_EXPONENT": int(top[1]) - 1,
            "LARGEST_POWER": int(np.frexp(self.scale_numbers()["SCALE_HIGH"])[1]) - 1,
            "ROUND_UP": bits_added(calibration.rule if isinstance(calibration, MX) else "optimal", fmt),
            "RULE": SEARCH if is_search else FIXED,
            "DOUBLINGS": needed_doublings(fmt) if is_search and is_power else 0,
            "HALVINGS": needed_halvings(fmt, self.tile) if is_search and is_power else 0,
            **dict(zip(("BELOW", "ABOVE", "LOW_PLACES", "LOW_LAST", "PROVEN"), window, strict=True)),
            "FRACTIONS": len(self.fractions),
        }

    def ptx(self, capability: int) -> dict[str, bool]:
        """Which conversions inline PTX makes on a device of this compute capability (times 10); 0: none."""
        held, is_even = self.scheme.scale, self.layout()["EVEN"]
        is_e4m3 = isinstance(held, Minifloat) and held.name in ("e4m3fn", "ue4m3")
        is_e2m1 = self.scheme.format.name == "e2m1" and is_even and capability in (100, 103)
        return {"PTX_E2M1": is_e2m1, "PTX_E4M3": is_e4m3 and capability >= 89}

    def _window(self) -> tuple[int, int, int, int, bool]:
        """Candidates below and above the first scale that saturates nothing; how many first places are low, and their last."""
        fmt, held = self.scheme.format, self.scheme.scale
        assert isinstance(held, AbstractFormat)
        places = np.arange(len(stored_scales(held)))
        proven = proven_window(fmt, held, self.tile)
        if proven is None:
            return 0, int((last_useful_scale(fmt, held) - places).max()), 0, 0, False
        first, last = proven
        low = int(np.argmax((first != 0) | (last != last[0])))  # the first places, which all have the same window
        return int((places - first)[low:].max()), int((last - places)[low:].max()), low, int(last[0]), True

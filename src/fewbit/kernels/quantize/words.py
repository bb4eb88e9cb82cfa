"""Formats and calibrations as the C++ kernels read them: a few whole numbers and a few floats each."""

import dataclasses
import math
from typing import Any

import numpy as np

from ...array import Scheme
from ...array.quantize import scale_limit
from ...array.scales import MSE, MX, AbsMax, MinMax, ScaleStore
from ...array.scales.candidates import needed_halvings
from ...array.scales.limits import LARGEST, OFFSET_END, largest_step, largest_unit
from ...array.scales.signed_max import SignedMax
from ...formats import E8M0, AbstractFormat, Binary, Codebook, Integer, Minifloat, Ternary

_INTEGER, _MINIFLOAT, _CODEBOOK, _FLOAT32, _BFLOAT16, _FLOAT16, _E8M0 = range(7)
_ABSENT = -1
_FLOATS = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "float16": _FLOAT16}
_ABSMAX, _MINMAX, _SIGNED_MAX, _FLOOR, _EVEN, _CEILING, _BEST_POWER, _BEST_CODE = range(1, 9)
_LARGEST_CODEBOOK = 16
_SMALLEST_FACTOR = 2.0**-20
_LARGEST_SEARCHED_TILE = 256
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Words:
    """What describes one thing to the kernels; its parts become attributes of the call."""

    whole: tuple[int, ...]
    floats: tuple[float, ...]

    def attributes(self, whole_name: str, floats_name: str) -> dict[str, np.ndarray]:
        """The two attributes, by these names."""
        return {whole_name: np.asarray(self.whole, np.int32), floats_name: np.asarray(self.floats, np.float32)}


NOTHING = Words((_ABSENT, 0, 0), (0.0,))
"""What stands for a format that a scheme does not have."""


def format_words(fmt: AbstractFormat) -> Words | None:
    """The kind, the bits, the code of NaN, and what the kind needs; None for formats that the kernels cannot encode."""
    if type(fmt) is Integer:
        return Words((_INTEGER, fmt.bits, 0, 0), (1 / fmt.step, fmt.min / fmt.step, fmt.max / fmt.step))
    if type(fmt) is Ternary:
        return Words((_INTEGER, 2, 1, 1), (1.0, -1.0, 1.0))
    if type(fmt) is Binary:
        return Words((_CODEBOOK, 1, 1, -1, -1, 0, 1), (-_TINY,))
    if type(fmt) is Minifloat:
        return _minifloat_words(fmt)
    return _codebook_words(fmt) if type(fmt) is Codebook and len(fmt.table) <= _LARGEST_CODEBOOK else None


def _minifloat_words(fmt: Minifloat) -> Words:
    is_fnuz = fmt.specials == "fnuz"
    whole = (_MINIFLOAT, fmt.bits, fmt.nan_code or 0, fmt.mantissa, fmt.bias, fmt.max_code, fmt.signed, is_fnuz)
    return Words(whole, (fmt.max,))


def _codebook_words(fmt: Codebook) -> Words:
    _, codes, thresholds = fmt.sorted_numbers
    zeros = fmt.zero_codes or (-1, -1)
    nan_code = zeros[0] if fmt.zero_codes else int(codes[(thresholds < 0).sum()])
    return Words((_CODEBOOK, fmt.bits, nan_code, *zeros, *map(int, codes)), tuple(map(float, thresholds)))


def holder_words(holder: Any) -> Words | None:
    """What holds scales or float offsets: a float dtype, E8M0, or a minifloat; None for what the kernels cannot store."""
    if isinstance(holder, E8M0):
        return Words((_E8M0, 8, 255), (0.0,))
    if isinstance(holder, AbstractFormat):
        return format_words(holder) if type(holder) is Minifloat else None
    return None if isinstance(holder, Scheme) else Words((_FLOATS[np.dtype(holder).name], 0, 0), (0.0,))


def rule_words(scheme: Scheme, tile_lengths: tuple[int, ...]) -> Words | None:
    """How scales are chosen; None for calibrations that the kernels do not have.

    Args:
        scheme: the scheme.
        tile_lengths: for each axis over which a tile extends, its length.
    """
    fmt, rule = scheme.format, _rule(scheme, math.prod(tile_lengths))
    if rule is None or isinstance(scheme.scale, Scheme):
        return None
    kind, bound, factor, halvings, is_windowed = rule
    store = ScaleStore(scheme.scale, limit=scale_limit(scheme))  # type: ignore[arg-type]
    contains_zero = isinstance(scheme.calibration, MinMax) and bool(scheme.calibration.contains_zero)
    top = int(np.float32(fmt.max).view(np.int32))
    mantissa_bits = fmt.mantissa if isinstance(fmt, Minifloat) else fmt.bits - 2
    whole = (kind, contains_zero, mantissa_bits, (top >> 23) - 127, top & 0x7FFFFF, halvings, is_windowed)
    no_scale = 1.0 if 0.0 in fmt.values() else 0.0
    end = LARGEST if scheme.zero_point is None or isinstance(scheme.zero_point, AbstractFormat) else OFFSET_END
    limits = (end, largest_step(fmt), largest_unit(fmt, store.largest) if scheme.tensor_scale else LARGEST)
    return Words(whole, (factor, bound, store.smallest, store.largest, fmt.max - fmt.min, no_scale, *limits))


def _rule(scheme: Scheme, tile_size: int) -> tuple[int, float, float, int, bool] | None:
    """The rule, the number of the format it aims at, its factor, the halvings and the window of a search."""
    fmt, calibration = scheme.format, scheme.calibration
    symmetric = scheme.zero_point is None
    if not symmetric and not _is_simple_range(scheme):
        return None
    if isinstance(calibration, AbsMax | MinMax) and calibration.factor >= _SMALLEST_FACTOR:
        return (_ABSMAX if isinstance(calibration, AbsMax) else _MINMAX), fmt.bound, calibration.factor, 0, False
    if not symmetric or (isinstance(calibration, SignedMax | MSE) and tile_size > _LARGEST_SEARCHED_TILE):
        return None
    if isinstance(calibration, SignedMax) and not scheme.tensor_scale:
        return _SIGNED_MAX, fmt.min, 1.0, 0, False
    if isinstance(calibration, MX) and calibration.rule != "optimal":
        kind = {"floor": _FLOOR, "even": _EVEN, "rceil": _CEILING}.get(calibration.rule)
        return None if kind is None else (kind, fmt.bound, 1.0, 0, False)
    return _search(scheme, tile_size) if isinstance(calibration, MX | MSE) and _has_mirrored_grid(fmt) else None


def _search(scheme: Scheme, tile_size: int) -> tuple[int, float, float, int, bool] | None:
    """The search of a symmetric scheme whose numbers lie mirrored about zero."""
    if tile_size > _LARGEST_SEARCHED_TILE:
        return None
    if isinstance(scheme.calibration, MX) or isinstance(scheme.scale, E8M0):
        return _BEST_POWER, scheme.format.bound, 1.0, needed_halvings(scheme.format, tile_size), False
    if not isinstance(scheme.scale, Minifloat):
        return None
    is_windowed = scheme.format.name == "e2m1" and scheme.scale.name in ("e4m3fn", "ue4m3") and tile_size <= 32
    return _BEST_CODE, scheme.format.bound, 1.0, 0, is_windowed


def _is_simple_range(scheme: Scheme) -> bool:
    """Whether zero points are those of unsigned integers whose least number is 0."""
    if type(scheme.format) is not Integer or scheme.format.signed:
        return False
    zero = scheme.zero_holder
    if isinstance(zero, AbstractFormat):
        return type(zero) is Integer and not zero.signed and zero.step == 1
    # Whether a NaN survives JAX's minimum is not told, and the offset would show it.
    return isinstance(scheme.calibration, AbsMax) or (
        isinstance(scheme.calibration, MinMax) and not scheme.calibration.contains_zero
    )


def _has_mirrored_grid(fmt: AbstractFormat) -> bool:
    return (type(fmt) is Minifloat and fmt.signed) or (type(fmt) is Integer and fmt.narrow)

"""Formats and calibrations as FFI attributes."""

import dataclasses
import math

import numpy as np

from ....array.scales.absmax import AbsMax
from ....array.scales.limits import LARGEST, OFFSET_END, largest_step, largest_unit
from ....array.scales.minmax import MinMax
from ....array.scales.mx import MX
from ....array.scales.search.candidates import needed_halvings
from ....array.scales.search.mse import MSE
from ....array.scales.signed_max import SignedMax
from ....array.scales.store import ScaleStore
from ....array.scheme import ScaleHolder, Scheme
from ....formats.codebook import Codebook
from ....formats.e8m0 import E8M0
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ....formats.minifloat import Minifloat
from ....formats.ternary import Binary, Ternary

_INTEGER, _MINIFLOAT, _CODEBOOK, _FLOAT32, _BFLOAT16, _FLOAT16, _E8M0 = range(7)
_ABSENT = -1
_FLOATS = {"float32": _FLOAT32, "bfloat16": _BFLOAT16, "float16": _FLOAT16}
_ABSMAX, _MINMAX, _SIGNED_MAX, _COVERING, _FLOOR, _EVEN, _CEILING, _BEST_POWER, _BEST_CODE = range(1, 10)
_LARGEST_CODEBOOK = 16
_SMALLEST_FACTOR = 2.0**-20
_LARGEST_SEARCHED_TILE = 256
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Words:
    """The integers and floats that describe a format or a rule to the kernels."""

    whole: tuple[int, ...]
    floats: tuple[float, ...]

    def attributes(self, whole_name: str, floats_name: str) -> dict[str, np.ndarray]:
        """Both as FFI attributes of these names."""
        return {whole_name: np.asarray(self.whole, np.int32), floats_name: np.asarray(self.floats, np.float32)}


NOTHING = Words((_ABSENT, 0, 0), (0.0,))
"""In place of a format that a scheme does not have."""


def format_words(fmt: AbstractFormat) -> Words | None:
    """The kind, bits, NaN code and parameters of a format; None if the kernels cannot encode it."""
    if type(fmt) is Integer:
        return Words((_INTEGER, fmt.bits, 0, 0), (1 / fmt.step, fmt.min / fmt.step, fmt.max / fmt.step))
    if type(fmt) is Ternary:
        return Words((_INTEGER, 2, 1, 1), (1.0, -1.0, 1.0))
    if type(fmt) is Binary:
        return Words((_CODEBOOK, 1, 1, -1, -1, 0, 1), (-_TINY, -1.0, 1.0))
    if type(fmt) is Minifloat and fmt.mantissa == 0:  # a tie is rounded to an even step there, not to an even code
        return None
    if type(fmt) is Minifloat:
        is_fnuz = fmt.specials == "fnuz"
        whole = (_MINIFLOAT, fmt.bits, fmt.nan_code or 0, fmt.mantissa, fmt.bias, fmt.max_code, fmt.signed, is_fnuz)
        return Words(whole, (fmt.max,))
    if type(fmt) is not Codebook or len(fmt.table) > _LARGEST_CODEBOOK:
        return None
    numbers, codes, thresholds = fmt.sorted_numbers
    if fmt.zero_codes:
        nan_code, zeros = fmt.zero_codes[0], fmt.zero_codes
    else:
        nan_code, zeros = int(codes[(thresholds < 0).sum()]), (-1, -1)
    return Words((_CODEBOOK, fmt.bits, nan_code, *zeros, *map(int, codes)), tuple(map(float, (*thresholds, *numbers))))


def holder_words(holder: ScaleHolder) -> Words | None:
    """The storage of scales or float offsets: a float dtype, E8M0 or a minifloat; None if the kernels do not support it."""
    if isinstance(holder, E8M0):
        return Words((_E8M0, 8, 255), (0.0,))
    if type(holder) is Minifloat:
        return format_words(holder)
    if isinstance(holder, AbstractFormat | Scheme):
        return None
    return Words((_FLOATS[np.dtype(holder).name], 0, 0), (0.0,))  # type: ignore[arg-type]


def rule_words(scheme: Scheme, tile_lengths: tuple[int, ...], *, is_stochastic: bool = False) -> Words | None:
    """The rule of a calibration; None if the kernels do not support it.

    Args:
        scheme: the scheme.
        tile_lengths: the length of a tile along each axis over which it extends.
        is_stochastic: whether codes are rounded stochastically, for which no element may saturate.
    """
    fmt = scheme.format
    if is_stochastic:
        rule, unit_bound = _covering_rule(scheme), fmt.max
    else:
        rule, unit_bound = _rule(scheme, math.prod(tile_lengths)), fmt.bound
    if rule is None or isinstance(scheme.scale, Scheme):
        return None
    kind, bound, factor, halvings, is_windowed = rule
    store = ScaleStore(scheme.scale, limit=scheme.scale_limit)  # type: ignore[arg-type]
    contains_zero = isinstance(scheme.calibration, MinMax) and bool(scheme.calibration.contains_zero)
    top = int(np.float32(fmt.max).view(np.int32))
    mantissa_bits = fmt.mantissa if isinstance(fmt, Minifloat) else fmt.bits - 2
    whole = (kind, contains_zero, mantissa_bits, (top >> 23) - 127, top & 0x7FFFFF, halvings, is_windowed)
    end = LARGEST if isinstance(scheme.zero_point, AbstractFormat | None) else OFFSET_END
    unit_end = largest_unit(fmt, store.largest) if scheme.tensor_scale else LARGEST
    no_scale = float(0.0 in fmt.values())
    limits = (fmt.max - fmt.min, no_scale, end, largest_step(fmt), unit_end, unit_bound, fmt.max, fmt.min)
    return Words(whole, (factor, bound, store.smallest, store.largest, *limits))


def _rule(scheme: Scheme, tile_size: int) -> tuple[int, float, float, int, bool] | None:
    """The rule, its bound and factor, and the halvings and the window of a search."""
    fmt, calibration = scheme.format, scheme.calibration
    symmetric = scheme.zero_point is None
    if not symmetric and not _is_simple_range(scheme):
        return None
    # The kernels derive a tensor scale from the amax, for symmetric ranges. (Over powers of two it is 1.)
    if scheme.tensor_scale and (not symmetric or calibration.exceeds_amax or isinstance(scheme.scale, E8M0)):
        return None
    if isinstance(calibration, AbsMax | MinMax) and calibration.factor >= _SMALLEST_FACTOR:
        kind = _ABSMAX if isinstance(calibration, AbsMax) else _MINMAX
        return kind, fmt.bound, calibration.factor, 0, False
    if not symmetric or (isinstance(calibration, SignedMax | MSE) and tile_size > _LARGEST_SEARCHED_TILE):
        return None
    if isinstance(calibration, SignedMax) and not scheme.tensor_scale:
        return _SIGNED_MAX, fmt.min, 1.0, 0, False
    if isinstance(calibration, MX) and calibration.rule != "optimal":
        kinds = {"floor": _FLOOR, "even": _EVEN, "rceil": _CEILING}
        return (kinds[calibration.rule], fmt.bound, 1.0, 0, False) if calibration.rule in kinds else None
    # A search needs numbers that are symmetric about zero.
    is_mirrored = (type(fmt) is Minifloat and fmt.signed) or (type(fmt) is Integer and fmt.narrow)
    if not isinstance(calibration, MX | MSE) or not is_mirrored or tile_size > _LARGEST_SEARCHED_TILE:
        return None
    if isinstance(calibration, MX) or isinstance(scheme.scale, E8M0):
        return _BEST_POWER, fmt.bound, 1.0, needed_halvings(fmt, tile_size), False
    if not isinstance(scheme.scale, Minifloat):
        return None
    is_windowed = fmt.name == "e2m1" and scheme.scale.name in ("e4m3fn", "ue4m3") and tile_size <= 32
    return _BEST_CODE, fmt.bound, 1.0, 0, is_windowed


def _covering_rule(scheme: Scheme) -> tuple[int, float, float, int, bool] | None:
    """The rule of `scales.unsaturated`: searches are not run, and the amax's own scale may be larger."""
    if scheme.zero_point is not None or isinstance(scheme.scale, Scheme):
        return None
    if scheme.tensor_scale and scheme.calibration.largest_stored(scheme.scale) is not None:  # type: ignore[arg-type]
        return None
    if scheme.calibration.uses_error_weights:
        return _COVERING, math.inf, 1.0, 0, False
    if isinstance(scheme.calibration, AbsMax) and scheme.calibration.factor == 1:
        return _COVERING, scheme.format.bound, 1.0, 0, False
    return None


def _is_simple_range(scheme: Scheme) -> bool:
    """Whether the scheme is an unsigned integer format with zero points that the kernels compute."""
    if type(scheme.format) is not Integer or scheme.format.signed:
        return False
    zero = scheme.zero_holder
    if isinstance(zero, AbstractFormat):
        return type(zero) is Integer and not zero.signed and zero.step == 1
    # JAX does not specify whether its minimum propagates NaN, and the offset would depend on it.
    return isinstance(scheme.calibration, AbsMax) or (
        isinstance(scheme.calibration, MinMax) and not scheme.calibration.contains_zero
    )

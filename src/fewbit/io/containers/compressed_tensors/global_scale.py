"""Global scales of NVFP4: factors in fewbit, divisors in compressed-tensors.

fewbit decodes `code * (scale * factor)`, compressed-tensors `code * (scale / divisor)`, each in float32 and the result rounded to
bfloat16. For most factors no float32 divisor gives the same float32 scales. Near the reciprocal there nearly always is one that
gives the same bfloat16 values of every scale and code; it is searched here. Where there is none, as for 7 / 2048, a value times
a code is halfway between two bfloat16 numbers, and the factor moves before it is used.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ....formats.format import FORMATS

_E4M3 = FORMATS["e4m3fn"].values()
_SCALES = _E4M3[np.isfinite(_E4M3) & (_E4M3 > 0)].astype(np.float32)[:, None]  # [scales, 1]
_CODES = np.unique(np.abs(FORMATS["e2m1"].values())).astype(np.float32)
_STEPS = np.array([0, 1, -1, 2, -2, 3, -3, 4, -4], np.int32)  # in units of the last place


def divisor_of(factor: np.float32) -> np.float32 | None:
    """The divisor that decodes like a factor; None if there is none."""
    return _equivalent(factor, lambda factor: _SCALES * factor, lambda divisors: _SCALES / divisors)


def with_divisor(factor: np.float32) -> np.float32:
    """The nearest factor that has a divisor, at most 8 units in the last place away; 0, NaN and infinity as they are.

    >>> bool(with_divisor(np.float32(7 / 2048)) == np.nextafter(np.float32(7 / 2048), np.float32(1)))
    True
    """
    for step in range(9):
        for near in (factor.view(np.int32) + np.int32(step), factor.view(np.int32) - np.int32(step)):
            found = np.int32(near).view(np.float32)
            if divisor_of(found) is not None:
                return found
    return factor


def factor_of(divisor: np.float32) -> np.float32 | None:
    """The factor that decodes like a divisor; None if there is none. An infinite divisor is the factor 0."""
    if divisor == np.inf:
        return np.float32(0)
    return _equivalent(divisor, lambda divisor: _SCALES / divisor, lambda factors: _SCALES * factors)


_ScalesOf: TypeAlias = Callable[[Any], np.ndarray]


def _equivalent(given: np.float32, own_scales: _ScalesOf, scales_of: _ScalesOf) -> np.float32 | None:
    """The number nearest to the reciprocal that gives the same scales, or else the same bfloat16 products."""
    if not (np.isfinite(given) and given > 0):
        return None
    with np.errstate(all="ignore"):
        scales, reciprocal = own_scales(given), np.float32(1) / given
        near = (reciprocal.view(np.int32) + _STEPS).view(np.float32)
        near = near[np.isfinite(near) & (near > 0)]
        found = scales_of(near)  # [scales, candidates]
        is_same = (found == scales).all(axis=0)
        if not is_same.any():
            is_same = (_products(found) == _products(scales)).all(axis=(0, 1))
    if not is_same.any():
        return None
    return near[int(is_same.argmax())]


def _products(scales: np.ndarray) -> np.ndarray:
    """Every code times every scale, in bfloat16: [codes, scales, candidates]."""
    return (_CODES[:, None, None] * scales).astype(ml_dtypes.bfloat16)

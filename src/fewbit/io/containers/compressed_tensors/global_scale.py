"""Global scales of NVFP4: factors in fewbit, divisors in compressed-tensors.

fewbit decodes `code * (scale * factor)`, compressed-tensors `code * (scale / divisor)`, each in float32 and the result rounded to
bfloat16. For most factors no float32 divisor gives the same float32 scales. Near the reciprocal there nearly always is one that
gives the same bfloat16 values of every scale and code; it is searched here. Where there is none, as for 7 / 2048, a value times
a code is halfway between two bfloat16 numbers, and the factor moves before it is used.
"""

import ml_dtypes
import numpy as np

from ....formats.format import FORMATS

_E4M3 = FORMATS["e4m3fn"].values()
_SCALES = _E4M3[np.isfinite(_E4M3) & (_E4M3 > 0)].astype(np.float32)[:, None]  # [scales, 1]
_CODES = np.unique(np.abs(FORMATS["e2m1"].values())).astype(np.float32)
_STEPS = np.array([0, 1, -1, 2, -2, 3, -3, 4, -4], np.int32)  # in units of the last place


def divisor_of(factor: np.float32) -> np.float32 | None:
    """The divisor that decodes like a factor; None if there is none."""
    with np.errstate(all="ignore"):
        divisors = _near_reciprocal(factor)
        return _first_equivalent(divisors, _SCALES / divisors, _SCALES * factor)


def with_divisor(factor: np.float32) -> np.float32:
    """The nearest factor that has a divisor.

    It is at most 8 units in the last place away; 0, NaN and infinity stay as they are.

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
    with np.errstate(all="ignore"):
        factors = _near_reciprocal(divisor)
        return _first_equivalent(factors, _SCALES * factors, _SCALES / divisor)


def _near_reciprocal(number: np.float32) -> np.ndarray:
    """The candidates, best first: [candidates]; none where the number has no reciprocal."""
    if not (np.isfinite(number) and number > 0):
        return np.zeros(0, np.float32)
    near = ((np.float32(1) / number).view(np.int32) + _STEPS).view(np.float32)
    return near[np.isfinite(near) & (near > 0)]


def _first_equivalent(candidates: np.ndarray, found: np.ndarray, scales: np.ndarray) -> np.float32 | None:
    """The first candidate that gives the same scales, or else the same bfloat16 products.

    Args:
        candidates: [candidates].
        found: the scales that each gives, [scales, candidates].
        scales: those to give, [scales, 1].
    """
    is_same = (found == scales).all(axis=0)
    if not is_same.any():
        is_same = (_products(found) == _products(scales)).all(axis=(0, 1))
    if not is_same.any():
        return None
    return candidates[int(is_same.argmax())]


def _products(scales: np.ndarray) -> np.ndarray:
    """Every code times every scale, in bfloat16: [codes, scales, candidates]."""
    return (_CODES[:, None, None] * scales).astype(ml_dtypes.bfloat16)

"""Integer codes in 32-bit words, as GPTQ and AWQ store them.

Codes are unsigned: a signed code has its offset `2**(bits - 1)` added, which flips its top bit, and that offset is its zero
point. Words are little-endian, and code 0 takes the lowest bits, so codes along one axis are the bytes of a QArray.
"""

import dataclasses

import ml_dtypes
import numpy as np

from ....array.qarray import QArray
from ....array.scheme import SCHEMES, Scheme
from ....formats.integer import Integer
from ..container import Weight, why_not_matrix
from .packed_bits import packed_bits, unpacked_bits
from .stored import packed_codes, per_tile

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def codes_of_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of words (or bytes) along the last axis, one per byte.

    >>> codes_of_words(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    return unpacked_bits(data, data.shape[-1] * 8 // bits, bits)


def words_of_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `codes_of_words`: int32 words. The codes along the last axis fill whole words."""
    return np.ascontiguousarray(packed_bits(codes, bits)).view(np.int32)


def top_bits(bits: int, length: int) -> np.ndarray:
    """`length` bytes of packed codes that have only their top bit.

    >>> top_bits(4, 2).tolist(), top_bits(3, 3).tolist()
    ([136, 136], [36, 73, 146])
    """
    return np.packbits(np.arange(length * 8) % bits == bits - 1, bitorder="little")


def integer_scheme(bits: int, is_symmetric: bool, group: int | None, scale: np.dtype) -> Scheme:
    """The scheme of stored integers: int4 without zero points, or uint4 with them.

    Args:
        bits: per code.
        is_symmetric: whether every zero point is `2**(bits - 1)`.
        group: elements per scale; None: a row.
        scale: the dtype of the scales.
    """
    base = SCHEMES[f"{'' if is_symmetric else 'u'}int{bits}"]
    return dataclasses.replace(base, scale=scale).with_tile(group)


def why_not_linear(weight: Weight) -> str | None:
    """Why a weight is not that of a linear layer whose activations stay in float. None if it is."""
    if weight.activations is not None:
        return "its activations are quantized too, and this program quantizes weights only"
    return why_not_matrix(weight)


def integer_misfit(scheme: Scheme, bits: tuple[int, ...]) -> str | None:
    """Why a scheme is not integers with 16-bit scales.

    The integers have one of these numbers of bits, and groups run along the rows. None if it is. Zero points are integers
    with the bits and the sign of the codes, or there are none.
    """
    form, zero = scheme.format, scheme.zero_point
    if not isinstance(form, Integer) or form.step != 1 or form.bits not in bits:
        return f"its codes are {form.name}, not integers of {' or '.join(map(str, bits))} bits"
    if zero is not None and not isinstance(zero, Integer):
        return "its zero points are not integers"
    if isinstance(zero, Integer) and (zero.bits, zero.signed, zero.step) != (form.bits, form.signed, 1):
        return f"its zero points are {zero.name}, for codes in {form.name}"
    if not isinstance(scheme.scale, np.dtype) or scheme.scale not in _HALVES:
        return f"its scales are {_holder_name(scheme)}, not float16 or bfloat16"
    if scheme.tensor_scale:
        return "it has a tensor scale"
    if scheme.pack_axis != -1 or scheme.tiles(2)[0] != 1:
        return "its groups do not run along the rows"
    return None


def unsigned_bytes(q: QArray) -> np.ndarray:
    """The packed codes of a QArray without sign, the first code in the lowest bits."""
    form, data = q.scheme.format, packed_codes(q)
    assert isinstance(form, Integer)
    if form.signed:
        data = data ^ top_bits(form.bits, data.shape[-1])
    return data


def unsigned_zero_points(q: QArray) -> np.ndarray:
    """The zero point of each scale, for codes without sign."""
    form = q.scheme.format
    assert isinstance(form, Integer)
    offset = np.uint8(2 ** (form.bits - 1) * form.signed)
    if q.zero_point is None:
        return np.full(q.scale.shape, offset)
    return per_tile(q.zero_point, q) ^ offset


def _holder_name(scheme: Scheme) -> str:
    if isinstance(scheme.scale, Scheme):
        return "quantized themselves"
    return getattr(scheme.scale, "name", str(scheme.scale))

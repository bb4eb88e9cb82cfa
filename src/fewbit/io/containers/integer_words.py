"""Integer codes in 32-bit words, as GPTQ and AWQ store them.

Codes are unsigned: a signed code has its offset `2**(bits - 1)` added, which flips its top bit, and that offset is its zero
point. Words are little-endian, and code 0 takes the lowest bits, so codes along one axis are the bytes of a QArray.
"""

import dataclasses

import ml_dtypes
import numpy as np

from ...array.packing import Packing, pack, unpack
from ...array.qarray import QArray
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError
from ...formats.integer import Integer

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of words (or bytes) along the last axis, one per byte.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (data[..., None] >> shifts) & np.uint8(2**bits - 1)
        return codes.reshape(*data.shape[:-1], data.shape[-1] * 8 // bits)
    flags = np.unpackbits(data, axis=-1, bitorder="little")
    flags = flags.reshape(*data.shape[:-1], data.shape[-1] * 8 // bits, bits)
    return np.packbits(flags, axis=-1, bitorder="little")[..., 0]


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpacked`: int32 words. The codes along the last axis fill whole words."""
    if 8 % bits == 0:
        parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 8, 8 // bits)
        data = np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
        return np.ascontiguousarray(data).view(np.int32)
    flags = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    data = np.packbits(flags.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1, bitorder="little")
    return np.ascontiguousarray(data).view(np.int32)


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


def integer_misfit(scheme: Scheme, bits: tuple[int, ...]) -> str | None:
    """Why a scheme is not integers of these bits with 16-bit scales in groups along the rows. None if it is.

    Zero points are integers with the bits and the sign of the codes, or there are none.
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
    form, codes = q.scheme.format, q.codes
    assert isinstance(form, Integer)
    if q.scheme.packing != Packing():
        codes = pack(unpack(codes, form.bits, q.shape[-1], q.scheme.packing), form.bits)
    data = np.asarray(codes)
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
    return np.broadcast_to(np.asarray(q.zero_point), q.scale.shape) ^ offset


def scales_of(q: QArray, name: str) -> np.ndarray:
    """The scales, one per row and group. QuantError for a slice of stacked arrays with one per element."""
    group = q.scheme.tiles(2)[1] or q.shape[1]
    if q.scale.shape != (q.shape[0], -(-q.shape[1] // group)):
        raise QuantError(
            f"{name}: scales of shape {q.scale.shape} are not one per row and group of {group}; quantize it again"
        )
    return np.asarray(q.scale)


def _holder_name(scheme: Scheme) -> str:
    if isinstance(scheme.scale, Scheme):
        return "quantized themselves"
    return getattr(scheme.scale, "name", str(scheme.scale))

"""The orders in which ggml packs the codes of a block."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class PackedCodes:
    """A packing of codes.

    Attributes:
        nbytes: the bytes of a block's codes.
        unpacked: bytes `[..., nbytes]` to codes `[..., elements]`.
        packed: codes to bytes.
    """

    nbytes: int
    unpacked: Callable[[np.ndarray], np.ndarray]
    packed: Callable[[np.ndarray], np.ndarray]


def _same(data: np.ndarray) -> np.ndarray:
    return data


def _nibbles(width: int) -> tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]:
    """The functions that unpack and pack four-bit codes.

    Of each run of `width` codes, codes j and j + width / 2 share byte j, the first in the low bits.
    """
    half = width // 2

    def unpacked(data: np.ndarray) -> np.ndarray:
        runs = data.reshape(*data.shape[:-1], -1, half)
        return np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(*data.shape[:-1], -1)

    def packed(codes: np.ndarray) -> np.ndarray:
        runs = codes.reshape(*codes.shape[:-1], -1, width)
        return (runs[..., :half] | runs[..., half:] << 4).reshape(*codes.shape[:-1], -1)

    return unpacked, packed


_unpacked_nibbles, _packed_nibbles = _nibbles(32)


def _unpacked_fives(data: np.ndarray) -> np.ndarray:
    """Four bytes with the fifth bit of each of 32 codes, then their nibbles."""
    fifth = np.unpackbits(data[..., :4], axis=-1, bitorder="little")
    return _unpacked_nibbles(data[..., 4:]) | fifth << 4


def _packed_fives(codes: np.ndarray) -> np.ndarray:
    fifth = np.packbits(codes >> 4, axis=-1, bitorder="little")
    return np.concatenate([fifth, _packed_nibbles(codes & 15)], axis=-1)


_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[:, None]


def _unpacked_crumbs(data: np.ndarray) -> np.ndarray:
    """Unpacks two-bit codes. Byte j of each 32 has codes j, j + 32, j + 64 and j + 96 of 128."""
    planes = data.reshape(*data.shape[:-1], 2, 1, 32) >> _SHIFTS & 3
    return planes.reshape(*data.shape[:-1], 256)


def _packed_crumbs(codes: np.ndarray) -> np.ndarray:
    planes = codes.reshape(*codes.shape[:-1], 2, 4, 32) << _SHIFTS
    return np.bitwise_or.reduce(planes, axis=-2).reshape(*codes.shape[:-1], 64)


# Runs of bytes and the digits of each: 32 bytes of five, 16 bytes of five, 4 bytes of four.
_TRITS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
_POWERS = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]


def _unpacked_trits(data: np.ndarray) -> np.ndarray:
    """Unpacks base-3 digits.

    A byte is the ceiling of 256 / 243 times a number of five digits, the first code the highest.
    """
    runs = []
    for start, count, digits in _TRITS:
        turned = data[..., None, start : start + count] * _POWERS[:digits]  # modulo 256: the higher digits fall out
        runs.append((turned.astype(np.uint16) * 3 >> 8).reshape(*data.shape[:-1], -1))
    return np.concatenate(runs, axis=-1).astype(np.uint8)


def _packed_trits(codes: np.ndarray) -> np.ndarray:
    runs, position = [], 0
    for _, count, digits in _TRITS:
        part = codes[..., position : position + count * digits]
        position += count * digits
        planes = part.reshape(*codes.shape[:-1], digits, count).astype(np.uint16)
        number = (planes * _POWERS[::-1][:digits]).sum(axis=-2)
        runs.append((number * 256 + 242) // 243)
    return np.concatenate(runs, axis=-1).astype(np.uint8)


CODES = {
    "bytes": PackedCodes(32, _same, _same),
    "nibbles": PackedCodes(16, _unpacked_nibbles, _packed_nibbles),
    "short nibbles": PackedCodes(32, *_nibbles(16)),
    "fives": PackedCodes(20, _unpacked_fives, _packed_fives),
    "crumbs": PackedCodes(64, _unpacked_crumbs, _packed_crumbs),
    "trits": PackedCodes(52, _unpacked_trits, _packed_trits),
}
"""The packings by name."""

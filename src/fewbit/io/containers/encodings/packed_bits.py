"""Bit streams of codes in numpy."""

import numpy as np


def packed_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[..., n]` as a bit stream along the last axis. Code 0 is in the lowest bits of byte 0.

    >>> packed_bits(np.array([[1, 2, 3]], np.uint8), 4).tolist()
    [[33, 3]]
    """
    if bits == 8:
        return codes
    *rows, length = codes.shape
    if 8 % bits == 0 and length * bits % 8 == 0:  # whole bytes, about five times as fast
        parts = codes.reshape(*rows, length * bits // 8, 8 // bits)
        return np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
    split = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(split.reshape(*rows, length * bits), axis=-1, bitorder="little")


def unpacked_bits(packed: np.ndarray, length: int, bits: int) -> np.ndarray:
    """The inverse of `packed_bits`: `[..., length]`.

    >>> unpacked_bits(np.array([[33, 3]], np.uint8), 3, 4).tolist()
    [[1, 2, 3]]
    """
    if bits == 8:
        return packed[..., :length]
    *rows, size = packed.shape
    if 8 % bits == 0:
        codes = (packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8(2**bits - 1)
        return codes.reshape(*rows, size * 8 // bits)[..., :length]
    split = np.unpackbits(packed, axis=-1, count=length * bits, bitorder="little")
    return np.packbits(split.reshape(*rows, length, bits), axis=-1, bitorder="little")[..., 0]

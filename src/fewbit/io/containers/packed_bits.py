"""Bit streams of codes in numpy."""

import numpy as np


def packed_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes `[rows, n]` as a bit stream per row, code 0 in the lowest bits of byte 0.

    >>> packed_bits(np.array([[1, 2, 3]], np.uint8), 4).tolist()
    [[33, 3]]
    """
    if bits == 8:
        return codes
    split = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(split.reshape(len(codes), -1), axis=-1, bitorder="little")


def unpacked_bits(packed: np.ndarray, length: int, bits: int) -> np.ndarray:
    """The inverse of `packed_bits`: `[rows, length]`.

    >>> unpacked_bits(np.array([[33, 3]], np.uint8), 3, 4).tolist()
    [[1, 2, 3]]
    """
    if bits == 8:
        return packed[:, :length]
    split = np.unpackbits(packed, axis=-1, count=length * bits, bitorder="little")
    return np.packbits(split.reshape(len(packed), length, bits), axis=-1, bitorder="little")[..., 0]

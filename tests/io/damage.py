"""Damaged files for the tests: every bit flipped, every length cut, and what reading one gives."""

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from fewbit import QuantError, io

Content = dict[str, list[tuple[str, tuple[int, ...], bytes]]]


EVERY_BIT = pytest.mark.parametrize(
    "bits",
    [pytest.param(1, id="one bit a byte"), pytest.param(8, id="every bit", marks=[pytest.mark.slow, pytest.mark.long])],
)
"""Runs a test on one bit of every byte, another one from byte to byte, and among the slow tests on all of them."""


def flipped(data: bytes, bits: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Each damaged copy with one bit flipped, and the position of its byte; `bits` bits of every byte take turns."""
    for position in range(start, len(data) if stop is None else stop):
        for bit in range(position, position + bits):
            bit %= 8
            yield position, data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


def truncated(data: bytes, step: int = 1) -> Iterator[bytes]:
    """The beginnings of the data, from none of it to all but one byte."""
    return (data[:length] for length in range(0, len(data), step))


def content(checkpoint: io.Checkpoint) -> Content:
    """The bytes of every tensor's arrays, all loaded."""
    return {name: leaves(checkpoint.tensors[name]) for name in checkpoint.tensors}


def leaves(value) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each array of a tensor."""
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(value)]
    return [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]


def outcome(path: pathlib.Path, name: str) -> Content | str:
    """What reading all of a path gives: its content, or the message of the QuantError, which must name the file.

    Any other exception leaves here and fails the test.
    """
    try:
        return content(io.read(path))
    except QuantError as error:
        if name not in str(error):
            raise
        return str(error)

"""Bounds-checked parser of GGUF headers.

The gguf package's own reader trusts the lengths it finds: on a damaged file it may loop forever or read beyond the end. So the
header is parsed here; the package gives the table of tensor types, and decodes those without a scheme in fewbit.

Reference: GGUF specification (ggml, docs/gguf.md).
"""

import dataclasses
import math
import struct
from typing import Any

import numpy as np

from ...errors import QuantError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_AXES = 4


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of the header.

    Attributes:
        name: the tensor's name.
        shape: in numpy's order, the slowest axis first (the file lists the fastest first).
        type_id: the number of its ggml type.
        offset: its first byte, from the beginning of the data.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Attributes:
        metadata: the fields, as plain Python.
        encoded: the bytes of each field's type and value, in the order of the file.
        entries: the tensors in the order of the file.
        data_start: the offset of the data, a multiple of the alignment.
        alignment: the power of two that tensor offsets are multiples of.
    """

    metadata: dict[str, Any]
    encoded: dict[str, bytes]
    entries: tuple[TensorEntry, ...]
    data_start: int
    alignment: int


def read_header(data: np.ndarray, where: str) -> Header:
    """Parses the header of a little-endian GGUF file, version 2 or 3.

    Raises:
        QuantError: for another magic or version, a truncated header, a duplicate name, or impossible values.
    """
    cursor = _Cursor(data, where)
    magic = bytes(data[:4])
    if magic != _MAGIC:
        raise QuantError(f"{where} is not a GGUF file: it begins with {magic!r}, expected {_MAGIC!r}")
    cursor.position = 4
    version = cursor.scalar("I")
    if version and version & 0xFFFF == 0:
        raise QuantError(
            f"{where} is a big-endian GGUF file (version field {version:#x}); convert it to little-endian first"
        )
    if version not in (2, 3):
        raise QuantError(f"{where} has GGUF version {version}; fewbit reads 2 and 3")
    tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.require(field_count, 13, "metadata fields")
    metadata: dict[str, Any] = {}
    encoded: dict[str, bytes] = {}
    for _ in range(field_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise QuantError(f"{where}: the metadata field {key!r} appears twice")
        start = cursor.position
        metadata[key] = cursor.value(cursor.scalar("I"), key)
        encoded[key] = bytes(cursor.data[start : cursor.position])
    cursor.require(tensor_count, 24, "tensors")
    entries = tuple(_entry(cursor) for _ in range(tensor_count))
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise QuantError(f"{where}: the tensor {twice!r} appears twice")
    alignment = _alignment(metadata, where)
    data_start = -(-cursor.position // alignment) * alignment
    return Header(metadata, encoded, entries, data_start, alignment)


class _Cursor:
    """A bounds-checked read position; reading beyond the end raises QuantError."""

    def __init__(self, data: np.ndarray, where: str):
        self.data, self.where, self.position = data.data, where, 0

    def require(self, count: int, size: int, what: str) -> None:
        """Refuses a count of items of at least `size` bytes that exceeds the file."""
        if count * size > len(self.data) - self.position:
            raise QuantError(
                f"{self.where}: {count} {what} are announced at byte {self.position}, more than the file holds; "
                "it is cut off or damaged"
            )

    def scalar(self, code: str) -> Any:
        """Reads one number of a struct code."""
        size = struct.calcsize("<" + code)
        self.require(1, size, "values")
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return value

    def text(self, what: str) -> str:
        """Reads a string: its length, then UTF-8."""
        if len(self.data) - self.position < 8:
            self.require(1, 8, "values")
        start = self.position + 8
        length = int.from_bytes(self.data[self.position : start], "little")
        self.position = start
        if length > len(self.data) - start:
            self.require(length, 1, f"bytes of {what}")
        self.position += length
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise QuantError(
                f"{self.where}: {what} at byte {start} is not UTF-8 ({error.reason}); the file is damaged"
            ) from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """Reads a metadata value of a GGUF type number."""
        if kind == _STRING:
            return self.text(f"the field {key!r}")
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise QuantError(f"{self.where}: the metadata field {key!r} has the unknown type {kind}")
        if kind == 7:
            self._check_flags(1, key)
        return self.scalar(_SCALARS[kind])

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth == _MAX_NESTING:
            raise QuantError(f"{self.where}: the metadata field {key!r} is an array nested too deeply")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind not in _SCALARS:
            # The shortest string takes the 8 bytes of its length, the shortest array the 12 of its type and count.
            shortest = {_STRING: 8}.get(kind, 12)
            self.require(count, shortest, f"elements of the field {key!r}")
            if kind == _STRING:  # a vocabulary: 100,000 strings and more
                what = f"the field {key!r}"
                return [self.text(what) for _ in range(count)]
            return [self.value(kind, key, depth + 1) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[kind].replace("?", "b1"))
        self.require(count, dtype.itemsize, f"elements of the field {key!r}")
        if kind == 7:
            self._check_flags(count, key)
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position += values.nbytes
        return values.tolist()

    def _check_flags(self, count: int, key: str) -> None:
        flags = np.frombuffer(self.data[self.position : self.position + count], np.uint8)
        if (flags > 1).any():
            raise QuantError(
                f"{self.where}: the metadata field {key!r} has a bool that is neither 0 nor 1; the file is damaged"
            )


def is_alignment(value: object) -> bool:
    """Whether a value is an alignment that is read and written: a power of two up to 2**30."""
    return isinstance(value, int) and 1 <= value <= 1 << 30 and not value & (value - 1)


def _alignment(metadata: dict[str, Any], where: str) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not is_alignment(alignment):
        raise QuantError(f"{where}: general.alignment is {alignment!r:.40}, must be a power of two")
    return alignment


def _entry(cursor: _Cursor) -> TensorEntry:
    name = cursor.text("a tensor's name")
    axes = cursor.scalar("I")
    if axes > _MAX_AXES:
        raise QuantError(
            f"{cursor.where}: tensor {name!r} has {axes} axes, at most {_MAX_AXES} are possible; the file is damaged"
        )
    shape = tuple(cursor.scalar("Q") for _ in range(axes))[::-1]
    if 0 in shape or math.prod(shape) >= 1 << 60:
        raise QuantError(f"{cursor.where}: tensor {name!r} has the impossible shape {shape}; the file is damaged")
    return TensorEntry(name, shape, cursor.scalar("I"), cursor.scalar("Q"))

"""Encoding of GGUF headers: metadata fields and tensor entries.

Reference: GGUF specification (ggml, docs/gguf.md).
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ...errors import QuantError
from .header import TensorEntry

Field: TypeAlias = (
    bool | int | float | str | bytes | np.generic | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]
)
"""A metadata value. `bytes` are a type and a value that are encoded already, as `Header.encoded` has them."""

_TYPES = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}
_STRING, _ARRAY = 8, 9
_LARGEST = float(np.finfo(np.float32).max)


def encoded(value: Field, key: str) -> bytes:
    """A metadata value as GGUF stores it: its type, then the value.

    An `int` becomes uint32, a `float` float32; in a sequence an `int` becomes int32. These are the types that llama.cpp expects.
    NumPy scalars keep their dtype.

    Raises:
        QuantError: for a value that GGUF has no type for, or a number out of range.

    >>> encoded(3, "llama.block_count").hex()
    '0400000003000000'
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if not isinstance(value, Sequence):
        kind, data = _scalar(value, "<u4", key)
        return struct.pack("<I", kind) + data
    if value and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_text(str(item)) for item in value)
    items = [_scalar(item, "<i4", key) for item in value]
    kinds = {kind for kind, _ in items}
    if len(kinds) != 1:
        raise QuantError(
            f"the metadata field {key!r} is an array of {len(kinds)} types; GGUF arrays have one, and an element"
        )
    return struct.pack("<IIQ", _ARRAY, *kinds, len(items)) + b"".join(data for _, data in items)


def file_header(fields: Mapping[str, Field], entries: Sequence[TensorEntry], alignment: int) -> bytes:
    """The header of a GGUF file (version 3), padded to the alignment of its data."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(fields))]
    for key, value in fields.items():
        parts += [_text(key), encoded(value, key)]
    for entry in entries:
        parts += [_text(entry.name), struct.pack("<I", len(entry.shape))]
        parts += [struct.pack("<Q", n) for n in reversed(entry.shape)]
        parts.append(struct.pack("<IQ", entry.type_id, entry.offset))
    header = b"".join(parts)
    return header + bytes(-len(header) % alignment)


def _scalar(value: object, integer: str, key: str) -> tuple[int, bytes]:
    """The GGUF type and the bytes of a number. `integer` is the dtype of a Python int."""
    if isinstance(value, np.generic | bool):
        array = np.asarray(value)
    elif isinstance(value, int):
        limits = np.iinfo(integer)
        if not limits.min <= value <= limits.max:
            raise QuantError(f"the metadata field {key!r} is {value}, outside {limits.min} .. {limits.max}")
        array = np.asarray(value, integer)
    elif isinstance(value, float):
        if math.isfinite(value) and abs(value) > _LARGEST:
            raise QuantError(f"the metadata field {key!r} is {value}, more than a float32 holds")
        array = np.asarray(value, "<f4")
    else:
        raise QuantError(f"the metadata field {key!r} has a {type(value).__name__}, which GGUF has no type for")
    kind = _TYPES.get(array.dtype.str[1:])
    if kind is None:
        raise QuantError(f"the metadata field {key!r} has dtype {array.dtype}, which GGUF has no type for")
    return kind, array.astype(array.dtype.newbyteorder("<")).tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data

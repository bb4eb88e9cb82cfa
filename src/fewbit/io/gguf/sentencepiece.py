"""Reads the pieces of a SentencePiece `tokenizer.model`.

The file is a protocol buffer; field 1 of the message repeats the pieces, each with a text (1), a score (2) and a kind (3).
"""

import dataclasses
import struct
from collections.abc import Iterator

from ...errors import QuantError

_NORMAL = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True)
class Piece:
    """One piece of the vocabulary.

    Attributes:
        text: its text, a space as U+2581.
        score: its score; pieces of a higher score are merged first.
        kind: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte: the numbers of GGUF.
    """

    text: str
    score: float
    kind: int


def pieces(data: bytes) -> list[Piece]:
    """The pieces by id.

    Args:
        data: the content of the file.

    Returns:
        The pieces.

    Raises:
        QuantError: when the file is cut off or is not a SentencePiece model.
    """
    found = [_piece(value) for number, value in _message(data) if number == 1 and isinstance(value, bytes)]
    if not found:
        raise QuantError("tokenizer.model has no pieces; it is not a SentencePiece model")
    return found


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, _NORMAL
    for number, value in _message(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _message(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The field numbers and values of a message."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = {_FIXED32: 4, _FIXED64: 8}[wire]
        else:
            raise QuantError(f"tokenizer.model is damaged: wire type {wire} at byte {position}")
        if length > len(data) - position:
            raise QuantError(f"tokenizer.model is cut off: {length} bytes are announced at byte {position}")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise QuantError("tokenizer.model is cut off within a number")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise QuantError(f"tokenizer.model is damaged: a number of more than 10 bytes ends at byte {position}")

"""Pieces of hand-made protocol buffers; a damaged file ends in one sentence."""

import struct

import pytest

from fewbit import QuantError
from fewbit.io.gguf.sentencepiece import Piece, pieces

PIECES = [
    Piece("<unk>", 0.0, 2),
    Piece("<s>", 0.0, 3),
    Piece("<0x0A>", 0.0, 6),
    Piece("\u2581the", -1.5, 1),
    Piece("é" * 100, -3e5, 4),
]


def field(number: int, wire: int, data: bytes) -> bytes:
    return bytes([number << 3 | wire]) + data


def text(data: bytes) -> bytes:
    length, digits = len(data), []
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes([*digits, length]) + data


def model() -> bytes:
    """A ModelProto: pieces between a trainer's and a normalizer's message, as SentencePiece writes them."""
    found = [field(2, 2, text(field(4, 0, b"\x80\x01") + field(7, 1, bytes(8))))]
    for piece in PIECES:
        body = field(1, 2, text(piece.text.encode())) + field(2, 5, struct.pack("<f", piece.score))
        if piece.kind != 1:
            body += field(3, 0, bytes([piece.kind]))
        found.append(field(1, 2, text(body)))
    return b"".join([*found, field(3, 2, text(b""))])


def test_texts_scores_and_kinds():
    assert pieces(model()) == PIECES


def test_every_prefix_is_refused_or_gives_the_first_pieces():
    data = model()
    for end in range(len(data)):
        try:
            found = pieces(data[:end])
        except QuantError:
            continue
        assert found == PIECES[: len(found)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no pieces"),
        (b"\x0b", "wire type 3 at byte 1"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a number of more than 10 bytes"),
        (b"\x0a\xff\xff\xff\xff\x7f", "is cut off: 34359738367 bytes are announced"),
    ],
)
def test_damage_is_named(data, message):
    with pytest.raises(QuantError, match=message):
        pieces(data)

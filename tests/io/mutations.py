"""Mutations of files: of JSON by its structure, of bytes by flips and cuts, of GGUF by its metadata."""

import json
import math
import random
import re
import struct
from typing import Any

RAW = {
    "@digits": "1" * 5000,
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@huge": "1e999",
    "@surrogate": '"\\ud800"',
    "@deep list": "[" * 3000 + "]" * 3000,
    "@deep object": '{"a":' * 3000 + "1" + "}" * 3000,
    "@deepest": "[" * 200_000,
    "@no json": "tru",
}
"""Texts that json.dumps does not write, by the values that stand for them."""

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        7,
        2**31,
        2**63,
        -(2**63),
        2**64,
        10**30,
        10**63,
        1_000_000_000,
        1.5,
        1e9,
        -0.0,
        1e308,
        1e-320,
    ),
    *(
        "",
        "a",
        "3",
        "nf4",
        "int8",
        "\x00",
        "../x",
        "\U0001f600",
        "a" * 3000,
        "*",
        "-1",
        "l(a+)+$",
        "(a|aa)+$",
        "(",
        "x{e}",
        "[[:alpha:]]",
    ),
    *([], {}, [[]], [1, "a"], {"a": 1}, [[1]], [-1], ["a", "b"], {"weight": "int8"}, {"format": "int4"}, {"content": 3}),
    *RAW,
)
"""What a value is replaced by."""


def mutated_json(text: bytes, draw: random.Random) -> bytes:
    """JSON text with one to three changes of its structure, or, one time in eight, of its bytes."""
    if draw.random() < 0.125:
        return mutated_bytes(text, draw)
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed(value, draw)
    changed = json.dumps(value, ensure_ascii=draw.random() < 0.5)
    for mark, raw in RAW.items():
        changed = changed.replace(f'"{mark}"', raw)
    if draw.random() < 0.1:  # a key that stands twice
        changed = re.sub(r'("\w+": )', r"\g<1>0, \g<1>", changed, count=1)
    return changed.encode("utf-8", "surrogatepass")


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bytes with flips, a cut, an insertion, a repetition, or a number written over them."""
    result = bytearray(data)
    place = draw.randrange(len(data) + 1) if draw.random() < 0.5 else draw.randrange(min(len(data), 400) + 1)
    kind = draw.randrange(6)
    if kind == 0:
        for _ in range(draw.choice((1, 1, 4, 32))):
            result[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del result[place:]
    elif kind == 2:
        del result[place : place + draw.choice((1, 8, 100))]
    elif kind == 3:
        result[place:place] = draw.choice((b"\xff", b"\x00" * 8, b"\xef\xbb\xbf", b'"', b"[", draw.randbytes(9)))
    elif kind == 4:
        result[place:place] = result[place : place + draw.choice((4, 64))]
    else:
        number = draw.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1))
        result[place : place + 8] = number.to_bytes(8, "little")
    return bytes(result)


def _changed(value: Any, draw: random.Random) -> Any:
    """A JSON value with one change somewhere within."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(VALUES)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        kind = draw.randrange(6)
        if kind == 0:
            return value[:place] + value[place + 1 :]
        if kind == 1:
            return [*value[:place], draw.choice(VALUES), *value[place:]]
        return [*value[:place], _changed(value[place], draw), *value[place + 1 :]]
    key = draw.choice(list(value))
    kind = draw.randrange(10)
    if kind == 0:
        return {k: v for k, v in value.items() if k != key}
    if kind == 1:
        return {(k + "x" if k == key else k): v for k, v in value.items()}
    if kind == 2:
        return {**value, draw.choice(("more", "", "\x00", "path", "a" * 300)): draw.choice(VALUES)}
    if kind == 3:
        return {**value, key: value[draw.choice(list(value))]}
    return {**value, key: _changed(value[key], draw)}


def gguf_bytes(fields: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> bytes:
    """A GGUF file of float32 tensors of zeros with any metadata; what GGUF has no type for becomes a string."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(fields))]
    for name, value in fields.items():
        kind, data = _gguf_value(value)
        parts += [_gguf_text(name), struct.pack("<I", kind), data]
    offset = 0
    for name, shape in tensors.items():
        parts += [_gguf_text(name), struct.pack("<I", len(shape)), *(struct.pack("<Q", n) for n in reversed(shape))]
        parts.append(struct.pack("<IQ", 0, offset))
        offset += -(-4 * math.prod(shape) // 32) * 32
    header = b"".join(parts)
    return header + b"\x00" * (-len(header) % 32 + offset)


def _gguf_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _gguf_value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return (11, struct.pack("<q", value)) if value < 2**63 else (10, struct.pack("<Q", value))
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list) and value:
        kinds = [_gguf_value(item) for item in value]
        if len({kind for kind, _ in kinds}) == 1:
            return 9, struct.pack("<IQ", kinds[0][0], len(kinds)) + b"".join(data for _, data in kinds)
    return 8, _gguf_text(value if isinstance(value, str) else json.dumps(value))

"""The header walk agrees with the gguf package on sound files, and refuses every impossible one in a sentence."""

import struct

import gguf
import numpy as np
import pytest

from fewbit import QuantError
from fewbit.io.gguf.header import read_header


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(fields: list[bytes] = (), entries: list[bytes] = (), version: int = 3) -> np.ndarray:
    data = b"GGUF" + struct.pack("<IQQ", version, len(entries), len(fields)) + b"".join([*fields, *entries])
    return np.frombuffer(data, np.uint8)


def test_every_kind_of_metadata_is_read_as_the_package_reads_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 1e-300)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "ü\nx")
    writer.add_array("a.texts", ["", "Ġthe", "�"])
    writer.add_array("a.floats", [0.5, -2.0])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("w", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(np.fromfile(tmp_path / "m.gguf", np.uint8), "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    want = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found.metadata == want
    assert found.metadata["a.u64"] == 2**64 - 1
    assert [e.shape for e in found.entries] == [(2, 3)]


def test_nested_arrays_are_read():
    inner = struct.pack("<IQ", 0, 2) + b"\x01\x02"
    data = header([key("a", 9, struct.pack("<IQ", 9, 2) + inner + inner)], [entry("w", (1,))])
    assert read_header(data, "m.gguf").metadata == {"a": [[1, 2], [1, 2]]}


def test_alignment_moves_the_data():
    data = header([key("general.alignment", 4, struct.pack("<I", 128))], [entry("w", (1,))])
    assert read_header(data, "m.gguf").data_start % 128 == 0
    assert read_header(data, "m.gguf").alignment == 128


DEEP = struct.pack("<IQ", 9, 1) * 6
BAD = {
    "version 1": (header(version=1), "has GGUF version 1; fewbit reads 2 and 3"),
    "big-endian": (header(version=3 << 24), "is a big-endian GGUF file"),
    "field twice": (header([key("a", 0, b"1"), key("a", 0, b"1")]), "the metadata field 'a' appears twice"),
    "tensor twice": (header((), [entry("w", (1,)), entry("w", (1,), 0, 32)]), "the tensor 'w' appears twice"),
    "field type": (header([key("a", 13, b"12345678")]), "has the unknown type 13"),
    "flag": (header([key("a", 7, b"\x02")]), "has a bool that is neither 0 nor 1"),
    "flags": (header([key("a", 9, struct.pack("<IQ", 7, 2) + b"\x01\x03")]), "has a bool that is neither 0 nor 1"),
    "not UTF-8": (header([key("a", 8, struct.pack("<Q", 1) + b"\xff")]), "is not UTF-8"),
    "deep": (header([key("a", 9, DEEP)]), "nested too deeply"),
    "numbers": (header([key("a", 9, struct.pack("<IQ", 4, 2**61) + b"1234")]), "elements of the field 'a' are announced"),
    "texts": (header([key("a", 9, struct.pack("<IQ", 8, 2**61))]), "elements of the field 'a' are announced"),
    "long text": (header([key("a", 8, struct.pack("<Q", 2**63))]), "bytes of the field 'a' are announced"),
    "alignment": (header([key("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment is 48, must be a power"),
    "axes": (header((), [entry("w", (1, 1, 1, 1, 1))]), "has 5 axes, at most 4"),
    "no elements": (header((), [entry("w", (3, 0))]), r"impossible shape \(0, 3\)"),
    "too many elements": (header((), [entry("w", (2**40, 2**40))]), "impossible shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_impossible_header_is_refused(name):
    data, message = BAD[name]
    with pytest.raises(QuantError, match=message) as error:
        read_header(data, "m.gguf")
    assert "m.gguf" in str(error.value)


@pytest.mark.parametrize("counts", [(2**63, 0), (0, 2**63)], ids=["tensors", "fields"])
def test_impossible_counts_are_refused_at_once(counts):
    data = np.frombuffer(b"GGUF" + struct.pack("<IQQ", 3, *counts), np.uint8)
    with pytest.raises(QuantError, match="are announced at byte 24, more than the file holds"):
        read_header(data, "m.gguf")

"""Encoded headers: the gguf package and our own reader find the same fields and tensors."""

import gguf
import numpy as np
import pytest

from fewbit import QuantError
from fewbit.io.gguf.fields import encoded, file_header
from fewbit.io.gguf.header import TensorEntry, read_header

FIELDS = {
    "general.architecture": "llama",
    "a.count": 3,
    "a.most": 2**32 - 1,
    "a.scale": 0.5,
    "a.flag": True,
    "a.text": "é\u2581",
    "a.empty": "",
    "a.words": ["a", "", "\u0120b"],
    "a.kinds": [1, -3],
    "a.scores": [-1000.0, 0.25],
    "a.flags": [True, False],
    "a.wide": np.int64(-5),
    "a.byte": np.uint8(7),
    "a.double": np.float64(1e300),
}
ENTRIES = [TensorEntry("w", (2, 3), 0, 0), TensorEntry("v", (5,), 0, 32)]


@pytest.mark.parametrize("alignment", [32, 64])
def test_the_package_reads_the_same_fields_and_tensors(tmp_path, alignment):
    path = tmp_path / "m.gguf"
    entries = [ENTRIES[0], TensorEntry("v", (5,), 0, alignment)]
    fields = FIELDS | {"general.alignment": alignment}
    path.write_bytes(file_header(fields, entries, alignment) + bytes(2 * alignment))
    reader = gguf.GGUFReader(path)
    for key, value in fields.items():
        assert reader.fields[key].contents() == value, key
    assert [(t.name, tuple(reversed(t.shape.tolist()))) for t in reader.tensors] == [("w", (2, 3)), ("v", (5,))]


def test_our_reader_gives_the_fields_and_their_bytes_back():
    data = np.frombuffer(file_header(FIELDS, ENTRIES, 32), np.uint8)
    header = read_header(data, "m")
    assert header.metadata == FIELDS
    assert header.entries == tuple(ENTRIES)
    assert file_header(header.encoded, header.entries, 32) == data.tobytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**32, "outside 0 .. 4294967295"),
        (1e308, r"is 1e\+308, more than a float32 holds"),
        (-1, "outside"),
        ([2**31], "outside -2147483648"),
        ([], "an array of 0 types"),
        ([1, 0.5], "an array of 2 types"),
        (["a", 1], "has a str"),
        (np.complex64(1), "has dtype complex64"),
    ],
    ids=str,
)
def test_values_without_a_type_are_refused_with_the_field(value, message):
    with pytest.raises(QuantError, match=f"the metadata field 'a.b' .*{message}"):
        encoded(value, "a.b")

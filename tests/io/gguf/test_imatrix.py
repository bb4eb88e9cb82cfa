"""Importance matrices: byte for byte as llama.cpp writes them, read by the gguf package, and what is damaged."""

import struct

import numpy as np
import pytest

import fewbit as fb
from fewbit.io import Importance, ImportanceMatrix, read_imatrix, write_imatrix
from fewbit.io.gguf.fields import encoded, file_header
from fewbit.io.gguf.header import TensorEntry

UP, DOWN = "blk.0.ffn_up_exps.weight", "blk.0.ffn_down.weight"


def matrix() -> ImportanceMatrix:
    """A dense tensor, and three experts of which one has no token."""
    squares = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    squares[1] = 0
    entries = {
        UP: Importance(squares, np.array([7, 0, 9], np.float32)),
        DOWN: Importance(np.linspace(1, 2, 6, dtype=np.float32)[None], np.array([16], np.float32)),
    }
    return ImportanceMatrix(entries, ("one.txt", "two.txt"), chunk_count=4, chunk_size=4)


def same(a: ImportanceMatrix, b: ImportanceMatrix) -> bool:
    arrays = [(a.entries[n].squares, b.entries[n].squares, a.entries[n].counts, b.entries[n].counts) for n in a.entries]
    rest = [(m.datasets, m.chunk_count, m.chunk_size, sorted(m.entries)) for m in (a, b)]
    return rest[0] == rest[1] and all(np.array_equal(x, y) and np.array_equal(c, d) for x, y, c, d in arrays)


def test_both_layouts_read_what_was_written(tmp_path):
    assert same(read_imatrix(write_imatrix(tmp_path / "a.gguf", matrix())), matrix())
    older = read_imatrix(write_imatrix(tmp_path / "a.dat", matrix()))
    assert (older.datasets, older.chunk_count, older.chunk_size) == (("one.txt, two.txt",), 4, 0)
    means = older.entries[UP].squares / older.entries[UP].counts[:, None]
    expected = matrix().entries[UP].squares[[0, 2]] / np.array([[7], [9]], np.float32)
    np.testing.assert_allclose(means.reshape(3, 4)[[0, 2]], expected, rtol=1e-6)
    np.testing.assert_array_equal(means.reshape(3, 4)[1], 1)  # as llama.cpp stores an expert without a token
    assert same(read_imatrix(write_imatrix(tmp_path / "b.dat", older)), older)


def test_the_gguf_package_reads_ours(tmp_path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(write_imatrix(tmp_path / "a.gguf", matrix()))
    keys = gguf.Keys.IMatrix
    assert reader.get_field("general.type").contents() == gguf.GGUFType.IMATRIX
    assert reader.get_field(keys.DATASETS).contents() == ["one.txt", "two.txt"]
    assert [reader.get_field(key).contents() for key in (keys.CHUNK_COUNT, keys.CHUNK_SIZE)] == [4, 4]
    assert {field.types[-1] for field in (reader.get_field(keys.CHUNK_COUNT), reader.get_field(keys.CHUNK_SIZE))} == {
        gguf.GGUFValueType.UINT32
    }
    found = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist(), tensor.data) for tensor in reader.tensors}
    # ggml writes shapes without trailing ones, the fastest axis first.
    shapes = {UP + ".in_sum2": [4, 3], UP + ".counts": [1, 3], DOWN + ".in_sum2": [6], DOWN + ".counts": [1]}
    assert {name: shape for name, (_, shape, _) in found.items()} == shapes
    assert {kind for kind, _, _ in found.values()} == {"F32"}
    np.testing.assert_array_equal(found[UP + ".in_sum2"][2], matrix().entries[UP].squares)


def test_we_read_those_of_the_gguf_package(tmp_path):
    """Two-axis tensors for dense weights, which its writer keeps, other tensors, and one count for several matrices."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "")
    writer.add_type(gguf.GGUFType.IMATRIX)
    writer.add_array(gguf.Keys.IMatrix.DATASETS, ["text"])
    for key in (gguf.Keys.IMatrix.CHUNK_COUNT, gguf.Keys.IMatrix.CHUNK_SIZE):
        writer.add_uint32(key, 3)
    writer.add_tensor(UP + ".in_sum2", np.ones((3, 4), np.float32))
    writer.add_tensor(UP + ".counts", np.full((1, 1), 5, np.float32))
    writer.add_tensor("other", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_imatrix(tmp_path / "a.gguf")
    assert list(found.entries) == [UP] and found.datasets == ("text",) and found.chunk_count == 3
    np.testing.assert_array_equal(found.entries[UP].counts, [5, 5, 5])


def test_the_older_layout_byte_for_byte(tmp_path):
    """`save_imatrix_legacy`: names with their lengths, mean squares times the chunks, rounded up."""
    values = np.linspace(1, 2, 6, dtype=np.float32)
    expected = struct.pack("<i", 1) + struct.pack("<i", len(DOWN)) + DOWN.encode() + struct.pack("<ii", 4, 6)
    expected += (values / np.float32(14) * np.float32(4)).tobytes() + struct.pack("<ii", 3, 4) + b"text"
    entry = Importance(values[None], np.array([14], np.float32))
    path = write_imatrix(tmp_path / "a.dat", ImportanceMatrix({DOWN: entry}, ("text",), 3, 4))
    assert path.read_bytes() == expected
    path.write_bytes(expected[: -len("text") - 8])  # the oldest files end with the last values
    assert read_imatrix(path).datasets == () and read_imatrix(path).chunk_count == 0


def damaged_gguf(fields, tensors):
    """A file whose parts contradict each other."""
    entries, parts, offset = [], [], 0
    for name, values in tensors.items():
        data = values.tobytes()
        entries.append(TensorEntry(name, values.shape, 0 if values.dtype == np.float32 else 1, offset))
        parts.append(data + bytes(-len(data) % 32))
        offset += len(parts[-1])
    return file_header({key: encoded(value, key) for key, value in fields.items()}, entries, 32) + b"".join(parts)


FIELDS = {"general.type": "imatrix", "imatrix.datasets": ["a"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 1}
ONES = np.ones(4, np.float32)
BOTH = {"a.in_sum2": ONES, "a.counts": ONES[:1]}
GGUF_DAMAGE = {
    "another kind": (FIELDS | {"general.type": "model"}, BOTH, "no importance matrix: general.type is 'model'"),
    "one of two": (FIELDS, {"a.in_sum2": ONES}, "a has only one of a.in_sum2 and a.counts"),
    "negative": (FIELDS, BOTH | {"a.in_sum2": -ONES}, "a: the sums of squares have numbers that are negative"),
    "not finite": (FIELDS, BOTH | {"a.counts": ONES[:1] * np.nan}, "a: the counts have numbers that are negative, infinite"),
    "counts": (FIELDS, BOTH | {"a.counts": ONES[:3]}, r"a: sums of squares \(1, 4\) need counts \(1,\), not \(3,\)"),
    "type": (FIELDS, BOTH | {"a.in_sum2": ONES.astype(np.float16)}, "tensor 'a.in_sum2' has ggml type 1, expected float32"),
    "chunks": (FIELDS | {"imatrix.chunk_size": "x"}, BOTH, "imatrix.chunk_size is 'x', expected a number of 0 or more"),
    "texts": (FIELDS | {"imatrix.datasets": [1]}, BOTH, r"imatrix.datasets is \[1\], expected a list of texts"),
    "a text": (FIELDS | {"imatrix.datasets": "abc"}, BOTH, r"imatrix.datasets is 'abc', expected a list of texts"),
    "nothing": (FIELDS, {}, "an importance matrix without a tensor"),
}


@pytest.mark.parametrize("name", GGUF_DAMAGE)
def test_a_damaged_gguf_file(name, tmp_path):
    fields, tensors, message = GGUF_DAMAGE[name]
    (tmp_path / "a.gguf").write_bytes(damaged_gguf(fields, tensors))
    with pytest.raises(fb.QuantError, match=message):
        read_imatrix(tmp_path / "a.gguf")


def test_a_damaged_file_of_the_older_layout(tmp_path):
    path = write_imatrix(tmp_path / "a.dat", matrix())
    data = path.read_bytes()
    cases = {
        data[:30]: "cut off: the number of chunks of 4 bytes at byte 29",
        data[:-1]: "cut off: the name of the text",
        data + b"x": "1 bytes follow the name of the text",
        b"a text of another kind": "no importance matrix, or cut off",
        struct.pack("<iii", 0, 0, 0): "an importance matrix without a tensor",
        data.replace(DOWN.encode(), b"\xff" * len(DOWN)): "a tensor's name before byte 29 is not UTF-8",
        struct.pack("<iiii", 1, 0, 1, 1) + ONES[:1].tobytes(): "the entry '' appears twice, or is empty",
    }
    for changed, message in cases.items():
        path.write_bytes(changed)
        with pytest.raises(fb.QuantError, match=message):
            read_imatrix(path)


def test_where_it_is_written(tmp_path):
    with pytest.raises(fb.QuantError, match=r"must end in .gguf, or in .dat"):
        write_imatrix(tmp_path / "a.bin", matrix())
    path = write_imatrix(tmp_path / "a.gguf", matrix())
    with pytest.raises(fb.QuantError, match="exists; choose another output"):
        write_imatrix(path, matrix())
    assert write_imatrix(path, matrix(), overwrite=True) == path
    (tmp_path / "model.gguf").write_bytes(damaged_gguf({"general.architecture": "llama"}, {"w": ONES}))
    with pytest.raises(fb.QuantError, match="is no importance matrix, so it is not replaced"):
        write_imatrix(tmp_path / "model.gguf", matrix(), overwrite=True)
    with pytest.raises(fb.QuantError, match="the model itself"):
        write_imatrix(path, matrix(), overwrite=True, sources=[path])
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["a.gguf", "model.gguf"]

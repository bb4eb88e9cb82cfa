"""`.npz` files: numpy's own come back, everything else is one sentence."""

import importlib.util
import io as bytes_io
import json
import pathlib
import zipfile

import numpy as np
import pytest

from fewbit import QuantError, io

from .damage import EVERY_BIT, content, flipped, outcome, truncated


def npy(array: np.ndarray) -> bytes:
    file = bytes_io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def zipped(path: pathlib.Path, members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> pathlib.Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back(tmp_path, save):
    arrays = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3),
        "blocks.0.W": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(3),
        "i": np.arange(4),
    }
    save(tmp_path / "m.npz", **arrays, __config__=json.dumps({"layers": 2}))
    checkpoint = io.read(tmp_path / "m.npz")
    assert (checkpoint.kind, checkpoint.metadata) == ("npz", {"layers": 2})
    assert set(checkpoint.tensors) == set(arrays)
    for name, want in arrays.items():
        assert checkpoint.tensors[name].dtype == want.dtype
        np.testing.assert_array_equal(checkpoint.tensors[name], want)
        assert checkpoint.tensors.info[name].shape == want.shape
    assert checkpoint.tensors.info["a"].stored == "<f2"


def test_arrays_have_the_byte_order_of_the_machine(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.arange(3, dtype=">f4"))
    found = io.read(tmp_path / "a.npz").tensors["w"]
    assert found.dtype == np.float32 and found.dtype.isnative
    assert found.tolist() == [0, 1, 2]


def test_without_a_config_the_metadata_is_empty(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.ones(3))
    assert io.read(tmp_path / "m.npz").metadata == {}


def test_a_config_of_bytes(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.ones(3), __config__=np.array(b'{"a": 1}'))
    assert io.read(tmp_path / "m.npz").metadata == {"a": 1}


def test_a_pickle_is_never_read(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.array([{}], object))
    with pytest.raises(QuantError, match=r"m\.npz: array 'a' is a pickle of Python objects, which fewbit does not read"):
        io.read(tmp_path / "m.npz")


def test_a_torch_file_is_recognised(tmp_path):
    path = zipped(tmp_path / "model.bin", [("archive/data.pkl", b"x")])
    with pytest.raises(
        QuantError, match=r"model\.bin is a zip archive, but not an \.npz file: .* save the weights as safetensors"
    ):
        io.read(path)


TEXT = npy(np.array(["a"]))
BAD = {
    "text": ([("a.npy", TEXT)], "array 'a' has dtype <U1; expected numbers"),
    "no magic": ([("a.npy", b"hello, this is not numpy")], "array 'a' has a damaged header"),
    "nothing": ([("a.npy", b"")], "array 'a' has a damaged header"),
    "version": ([("a.npy", npy(np.ones(3)).replace(b"NUMPY\x01", b"NUMPY\x09"))], "has a damaged header|has .npy version"),
    "short": ([("a.npy", npy(np.ones(3))[:-1])], r"of float64 and shape \(3,\) has 23 bytes of data"),
    "long": ([("a.npy", npy(np.ones(3)) + b"x")], r"of float64 and shape \(3,\) has 25 bytes of data"),
    "shape": ([("a.npy", npy(np.ones(3)).replace(b"(3,)", b"(9,)"))], r"of float64 and shape \(9,\) has 24 bytes of data"),
    "config": ([("a.npy", npy(np.ones(3))), ("__config__.npy", npy(np.ones(3)))], "expected one JSON text"),
    "config text": ([("a.npy", npy(np.ones(3))), ("__config__.npy", TEXT)], "'__config__' is not valid JSON"),
    "none": ([], "holds no tensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_members(tmp_path, name):
    members, message = BAD[name]
    with pytest.raises(QuantError, match=message) as error:
        io.read(zipped(tmp_path / "m.npz", members))
    assert "m.npz" in str(error.value)


def test_a_shape_is_not_believed(tmp_path):
    header = npy(np.ones(3)).replace(b"(3,), }              ", b"(99999999999999,), } ")
    assert b"99999999999999" in header
    with pytest.raises(QuantError, match=r"shape \(99999999999999,\) has 24 bytes of data"):
        io.read(zipped(tmp_path / "m.npz", [("a.npy", header)]))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_stands_twice(tmp_path):
    path = zipped(tmp_path / "m.npz", [("a.npy", npy(np.ones(3))), ("a.npy", npy(np.ones(4)))])
    with pytest.raises(QuantError, match=r"m\.npz: the array 'a' appears twice"):
        io.read(path)


def test_other_compressions_are_refused(tmp_path):
    path = zipped(tmp_path / "m.npz", [("a.npy", npy(np.ones(3)))], zipfile.ZIP_LZMA)
    with pytest.raises(QuantError, match=r"'a\.npy' is compressed by method 14; numpy writes 0 and 8"):
        io.read(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_truncation_is_one_sentence(tmp_path, save):
    path = tmp_path / "m.npz"
    save(path, a=np.arange(3, dtype=np.float16), b=np.ones(2, np.float32))
    for cut in truncated(path.read_bytes(), 3):
        path.write_bytes(cut)
        assert isinstance(outcome(path, "m.npz"), str)


@EVERY_BIT
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_flipped_bit_gives_the_same_content_or_one_sentence(tmp_path, save, bits):
    """All of the file, not only its header: every byte of an array is under the archive's checksum."""
    path = tmp_path / "m.npz"
    save(path, a=np.arange(3, dtype=np.float16), b=np.ones(2, np.float32))
    data = path.read_bytes()
    want = content(io.read(path))
    refused = 0
    for position, damaged in flipped(data, bits):
        path.write_bytes(damaged)
        found = outcome(path, "m.npz")
        assert isinstance(found, str) or found == want, f"byte {position}"
        refused += isinstance(found, str)
    assert refused > bits * len(data) / 2  # more than half of the bits


@pytest.mark.skipif(importlib.util.find_spec("glassllm") is None, reason="glassllm is not installed")
def test_glassllm():
    folder = pathlib.Path(importlib.util.find_spec("glassllm").submodule_search_locations[0]) / "weights"
    checkpoint = io.read(folder / "en.npz")
    want = np.load(folder / "en.npz")
    assert checkpoint.metadata == json.loads(str(want["__config__"]))
    assert [*checkpoint.tensors] == [name for name in want.files if name != "__config__"]
    for name, value in checkpoint.tensors.items():
        np.testing.assert_array_equal(value, want[name])

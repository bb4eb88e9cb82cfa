"""Safetensors files: the package's own reader and writer agree with ours, and damage is one sentence."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy

from fewbit import QuantError
from fewbit.io.safetensors.file import DTYPES, dtype_name, file_header, ordered, read_file
from tests.io.damage import EVERY_BIT, flipped, truncated

# What the package's framework bindings can make here; the others are checked by their bytes.
NUMPY = [
    np.bool_,
    np.uint8,
    np.int8,
    np.uint16,
    np.int16,
    np.uint32,
    np.int32,
    np.uint64,
    np.int64,
    np.float16,
    np.float32,
    np.float64,
]


def saved(path, tensors: dict[str, np.ndarray], metadata=None):
    """A file with our writer's header."""
    tensors = ordered(tensors)
    path.write_bytes(file_header(tensors, metadata or {}) + b"".join(array.tobytes() for array in tensors.values()))
    return path


def raw(path, header: dict | bytes, data: bytes = b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", NUMPY, ids=lambda d: d.__name__)
def test_the_package_writes_and_we_read(tmp_path, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    wanted = {"x": x, "empty": x[:0], "scalar": np.array(x[0, 0])}
    safetensors.numpy.save_file(wanted, tmp_path / "m.safetensors", {"a": "b"})
    tensors, metadata = read_file(tmp_path / "m.safetensors")
    assert metadata == {"a": "b"}
    for name, want in wanted.items():
        got = tensors[name].array()
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)


def test_bfloat16_of_the_package(tmp_path):
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3) / 7
    safetensors.flax.save_file({"x": x}, tmp_path / "m.safetensors")
    got = read_file(tmp_path / "m.safetensors")[0]["x"].array()
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, x)


def test_we_write_and_the_package_reads(tmp_path):
    tensors = {d.__name__: np.arange(5).astype(d) for d in NUMPY}
    path = saved(tmp_path / "m.safetensors", tensors, {"format": "x"})
    found = safetensors.numpy.load_file(path)
    assert set(found) == set(tensors)
    for name, want in tensors.items():
        np.testing.assert_array_equal(found[name], want)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "x"}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, name):
    data = np.arange(64, dtype=np.uint8) & (1 if name == "BOOL" else 255)
    array = data.view(DTYPES[name]).reshape(2, -1)
    path = saved(tmp_path / "m.safetensors", {"x": array})
    with safetensors.safe_open(path, "np") as file:  # the package knows the name, too
        assert file.get_slice("x").get_dtype() == name
    assert read_file(path)[0]["x"].array().dtype == DTYPES[name]
    assert read_file(path)[0]["x"].array().tobytes() == data.tobytes()
    assert dtype_name(DTYPES[name], "x") == name


def test_a_dtype_that_files_do_not_have():
    with pytest.raises(QuantError, match="tensor 'x' has dtype complex128; safetensors files store"):
        dtype_name(np.dtype(np.complex128), "tensor 'x'")


def test_each_tensor_is_aligned(tmp_path):
    odd = {f"u{i}": np.zeros(3, np.uint8) for i in range(3)}
    path = saved(tmp_path / "m.safetensors", {**odd, "f": np.zeros(3, np.float64), "h": np.zeros(3, np.float16)})
    for tensor in read_file(path)[0].values():
        assert tensor.array().flags.aligned


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {
    "cut off": ({"w": F32}, b"1234567", "tensor 'w' is cut off, 1 bytes are missing"),
    "too long": ({"w": F32}, b"123456789", "1 bytes follow the last tensor"),
    "shape": ({"w": F32 | {"shape": [3]}}, b"12345678", r"F32 of shape \(3,\) takes 12 bytes, but its data_offsets span 8"),
    "negative": ({"w": F32 | {"shape": [-2]}}, b"12345678", r"shape\[0\] is -2; expected int >= 0"),
    "fraction": ({"w": F32 | {"shape": [2.0]}}, b"12345678", r"shape\[0\] is 2.0; expected int"),
    "true": ({"w": F32 | {"shape": [True, 2]}}, b"12345678", r"shape\[0\] is True; expected int"),
    "huge": ({"w": F32 | {"shape": [2**62]}}, b"12345678", r"shape\[0\] is 4611686018427387904; expected int <="),
    "no list": ({"w": F32 | {"data_offsets": 8}}, b"12345678", "data_offsets is 8; expected array"),
    "backwards": ({"w": F32 | {"data_offsets": [8, 0]}}, b"12345678", "takes 8 bytes, but its data_offsets span -8"),
    "dtype": ({"w": F32 | {"dtype": "F4"}}, b"12345678", "has dtype 'F4'; fewbit reads BOOL"),
    "field": ({"w": F32 | {"more": 1}}, b"12345678", "tensor 'w' has no field 'more'"),
    "no object": ({"w": 3}, b"", "tensor 'w' is 3; expected object with the fields dtype, shape, data_offsets"),
    "overlap": (
        {"v": F32, "w": F32 | {"data_offsets": [4, 12]}},
        b"123456781234",
        "begins at byte 4 of the data, expected 8",
    ),
    "gap": ({"w": F32 | {"data_offsets": [4, 12]}}, b"123456781234", "begins at byte 4 of the data, expected 0"),
    "twice": (b'{"w":{},"w":{}}', b"", "the key 'w' appears twice"),
    "list": (b"[]", b"", "is a JSON list, but an object is expected"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__ of the header: a is 1; expected str"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_impossible_header_is_refused(tmp_path, name):
    header, data, message = BAD[name]
    with pytest.raises(QuantError, match=message) as error:
        read_file(raw(tmp_path / "m.safetensors", header, data))
    assert "m.safetensors" in str(error.value)


@pytest.mark.parametrize("data", [b"1234", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_an_impossible_length_is_refused(tmp_path, data):
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(QuantError, match=r"m\.safetensors is not a safetensors file"):
        read_file(tmp_path / "m.safetensors")


def found(path):
    """What reading gives: the arrays by name, or the message, which names the file."""
    try:
        tensors, _ = read_file(path)
    except QuantError as error:
        if path.name not in str(error):
            raise
        return str(error)
    return {name: (t.dtype, t.shape, t.part.read().tobytes()) for name, t in tensors.items()}


def test_every_truncation_is_one_sentence(tmp_path):
    path = saved(tmp_path / "m.safetensors", {"w": np.ones((2, 3), np.float32), "u": np.ones(5, np.uint8)})
    for cut in truncated(path.read_bytes()):
        path.write_bytes(cut)
        assert isinstance(found(path), str)


@EVERY_BIT
def test_a_flipped_bit_of_the_header_gives_the_same_bytes_or_one_sentence(tmp_path, bits):
    """The format has no checksum: names, and dtypes and shapes of the same size, can change unseen, but never the bytes."""
    path = saved(tmp_path / "m.safetensors", {"w": np.ones((2, 3), np.float32), "u": np.ones(5, np.uint8)})
    data = path.read_bytes()
    want = sorted(b for _, _, b in found(path).values())
    refused = 0
    for position, damaged in flipped(data, bits, 0, len(data) - 29):
        path.write_bytes(damaged)
        got = found(path)
        if isinstance(got, str):
            refused += 1
        else:
            assert sorted(b for _, _, b in got.values()) == want, f"byte {position}"
    assert refused > bits * len(data) / 2  # more than half of the bits

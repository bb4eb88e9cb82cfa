"""Hugging Face style checkpoints: single files, directories, several files with an index."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fewbit import QuantError, io

X = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones((3, 2), np.float16)}


def directory(path, shards: dict[str, dict[str, np.ndarray]], index: dict | None = None):
    """A directory with files of tensors, a config and a tokenizer."""
    path.mkdir()
    for file, tensors in shards.items():
        safetensors.numpy.save_file(tensors, path / file)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text('{"x": 1}')
    return path


def test_a_single_file(tmp_path):
    safetensors.numpy.save_file(X, tmp_path / "m.safetensors", {"made": "here"})
    checkpoint = io.read(tmp_path / "m.safetensors")
    assert (checkpoint.kind, checkpoint.metadata, checkpoint.files) == ("safetensors", {"made": "here"}, {})
    assert set(checkpoint.tensors) == set(X)
    info = checkpoint.tensors.info["b.weight"]
    assert (info.shape, info.dtype, info.stored, info.nbytes, info.scheme) == ((3, 2), "float16", "F16", 12, None)
    np.testing.assert_array_equal(checkpoint.tensors["a.weight"], X["a.weight"])


def test_a_directory_with_one_file(tmp_path):
    checkpoint = io.read(directory(tmp_path / "m", {"model.safetensors": X}))
    assert checkpoint.kind == "safetensors"
    assert checkpoint.metadata == {"model_type": "llama"}
    assert checkpoint.files == {"tokenizer.json": b'{"x": 1}'}
    np.testing.assert_array_equal(checkpoint.tensors["b.weight"], X["b.weight"])


def test_a_directory_with_one_file_of_another_name(tmp_path):
    assert set(io.read(directory(tmp_path / "m", {"weights.safetensors": X})).tensors) == set(X)


def test_several_files_without_an_index_are_not_guessed_at(tmp_path):
    path = directory(tmp_path / "m", {"one.safetensors": X, "two.safetensors": X})
    with pytest.raises(QuantError, match=r"has 2 safetensors files \(one\.safetensors, two\.safetensors\) and no model"):
        io.read(path)


def sharded(tmp_path, **changes):
    files = {"model-1.safetensors": {"a.weight": X["a.weight"]}, "model-2.safetensors": {"b.weight": X["b.weight"]}}
    index = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"} | changes
    return directory(tmp_path / "m", files, index)


def test_several_files_with_an_index(tmp_path):
    checkpoint = io.read(sharded(tmp_path))
    assert list(checkpoint.tensors) == list(X)
    assert checkpoint.notes == ()
    for name, want in X.items():
        np.testing.assert_array_equal(checkpoint.tensors[name], want)


def test_a_single_file_comes_before_an_index_of_other_files(tmp_path):
    """transformers reads it, and ignores the files of an earlier save in the same directory."""
    old, index = {name: 2 * x for name, x in X.items()}, dict.fromkeys(X, "model-00001-of-00001.safetensors")
    path = directory(tmp_path / "m", {"model.safetensors": X, "model-00001-of-00001.safetensors": old}, index)
    checkpoint = io.read(path)
    np.testing.assert_array_equal(checkpoint.tensors["a.weight"], X["a.weight"])
    assert checkpoint.notes[0].startswith("model.safetensors.index.json names other files than model.safetensors")
    (path / "model-00001-of-00001.safetensors").unlink()
    assert set(io.read(path).tensors) == set(X)


def test_an_index_of_a_single_file(tmp_path):
    checkpoint = io.read(directory(tmp_path / "m", {"model.safetensors": X}, dict.fromkeys(X, "model.safetensors")))
    assert (set(checkpoint.tensors), checkpoint.notes) == (set(X), ())


def test_tensors_beside_the_index_are_named_in_a_note(tmp_path):
    path = sharded(tmp_path)
    safetensors.numpy.save_file(X, path / "model-2.safetensors")
    assert io.read(path).notes == ("1 tensors are in the files but not in the index, and are left out: a.weight",)


def test_a_missing_file(tmp_path):
    path = sharded(tmp_path)
    (path / "model-2.safetensors").unlink()
    with pytest.raises(
        QuantError, match=r"model-2\.safetensors is missing, though model\.safetensors\.index\.json names it"
    ):
        io.read(path)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path):
    with pytest.raises(QuantError, match=r"model-1\.safetensors lacks tensor 'c', which is there according to model"):
        io.read(sharded(tmp_path, c="model-1.safetensors"))


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", ""])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path, name):
    with pytest.raises(QuantError, match=r"index\.json names the file .*; only files of the directory itself"):
        io.read(sharded(tmp_path, c=name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{}", "lacks the field 'weight_map'"),
        ('{"weight_map": 3}', "weight_map is 3; expected object"),
    ],
)
def test_a_damaged_index(tmp_path, text, message):
    path = sharded(tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(QuantError, match=message):
        io.read(path)


def test_a_damaged_config(tmp_path):
    path = directory(tmp_path / "m", {"model.safetensors": X})
    (path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(QuantError, match=r"config\.json is not valid JSON"):
        io.read(path)


def test_bfloat16_and_float8_need_no_framework(tmp_path):
    tensors = {"b": np.ones(4, ml_dtypes.bfloat16), "f": np.ones(4, ml_dtypes.float8_e4m3fn)}
    io.write(tmp_path / "m", tensors)
    for name, want in tensors.items():
        got = io.read(tmp_path / "m").tensors[name]
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_one_file_of_a_fewbit_directory_is_not_read_alone(tmp_path):
    io.write(tmp_path / "m", X)
    with pytest.raises(QuantError, match="is part of a directory that fewbit wrote; pass the directory"):
        io.read(tmp_path / "m" / "fewbit.safetensors")

"""A fewbit directory reads back exactly, or says which file was changed."""

import dataclasses
import os
import shutil

import jax
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, io
from tests.io.damage import EVERY_BIT, content, flipped, outcome, truncated

X = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32)
Q = jax.jit(fb.quantize, static_argnums=1)(X, "q4_1")


@pytest.fixture
def small(tmp_path):
    """A small directory with a quantized and a plain tensor."""
    tensors = {"w": Q, "norm": X[0, :4]}
    return io.write(
        tmp_path / "small", tensors, config={"layers": 2}, files={"tokenizer.json": b"{}"}, facts={"recipe": "nf4"}
    )


def test_everything_comes_back(small):
    checkpoint = io.read(small)
    assert checkpoint.kind == "fewbit"
    assert checkpoint.metadata == {"layers": 2}
    assert checkpoint.files == {"tokenizer.json": b"{}"}
    assert checkpoint.facts == {"recipe": "nf4"}
    assert list(checkpoint.tensors) == ["w", "norm"]
    info = checkpoint.tensors.info["w"]
    assert (info.shape, info.dtype, info.stored, info.nbytes) == ((2, 64), "float32", "q4_1", 2 * 2 * 20)
    assert info.scheme == fb.SCHEMES["q4_1"]
    assert checkpoint.tensors.info["norm"].stored == "F32"


FILES = ("manifest.json", "config.json", "tokenizer.json", "fewbit.safetensors")


@pytest.mark.slow
@EVERY_BIT
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_gives_the_same_content_or_one_sentence(small, name, bits):
    want = content(io.read(small))
    data = (small / name).read_bytes()
    for position, damaged in flipped(data, bits):
        (small / name).write_bytes(damaged)
        found = outcome(small, str(small))
        assert isinstance(found, str) or found == want, f"byte {position}"


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_one_sentence(small, name):
    data = (small / name).read_bytes()
    for cut in truncated(data[:-1], 7):
        (small / name).write_bytes(cut)
        assert isinstance(outcome(small, str(small)), str), f"{len(cut)} bytes"


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(small, name):
    (small / name).unlink()
    with pytest.raises(QuantError, match=f"{name} is missing"):
        io.read(small)


def test_the_messages_say_what_to_do(small):
    (small / "config.json").write_text("{}")
    with pytest.raises(QuantError, match=r"config\.json has 2 bytes, but \d+ were written; copy the file again"):
        io.read(small)
    (small / "tokenizer.json").write_text("[]")
    (small / "config.json").unlink()
    shutil.copy(small / "manifest.json", small / "config.json")
    with pytest.raises(QuantError, match=r"config\.json has \d+ bytes"):
        io.read(small)


def test_a_file_of_the_same_size_is_caught_by_its_hash(small):
    (small / "tokenizer.json").write_text("[]")
    with pytest.raises(QuantError, match=r"tokenizer\.json was changed since it was written \(its SHA-256 differs\)"):
        io.read(small)


def test_files_of_two_directories_do_not_mix(small, tmp_path):
    other = io.write(
        tmp_path / "other", {"w": dataclasses.replace(Q, codes=Q.codes[::-1]), "norm": X[0, :4]}, config={"layers": 2}
    )
    shutil.copy(other / "fewbit.safetensors", small / "fewbit.safetensors")
    with pytest.raises(QuantError, match=r"the bytes of tensor 'w\.codes' were changed"):
        content(io.read(small))


@pytest.mark.parametrize("keep", FILES)
def test_one_sound_mark_is_enough_to_know_the_directory(small, keep):
    for name in set(FILES) - {keep}:
        (small / name).unlink()
    if keep == "tokenizer.json":
        assert not io.is_fewbit_directory(small)
    else:
        assert io.is_fewbit_directory(small)
        with pytest.raises(QuantError, match="is missing"):
            io.read(small)


def test_other_directories_are_not_ours(tmp_path):
    assert not io.is_fewbit_directory(tmp_path)
    assert not io.is_fewbit_directory(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not io.is_fewbit_directory(tmp_path)


@pytest.mark.finding(3)
def test_the_word_fewbit_somewhere_does_not_make_a_directory_ours(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "name": "fewbit", "fewbit": {"note": "format"}}')
    (tmp_path / "manifest.json").write_text('{"app": "fewbit"}')
    assert not io.is_fewbit_directory(tmp_path)


def test_a_directory_that_moved_still_reads(small, tmp_path):
    want = content(io.read(small))
    os.rename(small, tmp_path / "moved")
    assert content(io.read(tmp_path / "moved")) == want

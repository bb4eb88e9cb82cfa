"""Every writer leaves the whole output, or nothing."""

import os

import numpy as np
import pytest

from fewbit import io
from fewbit.errors import QuantError
from fewbit.io import atomic_directory as atomic
from fewbit.io.containers.huggingface import HuggingFace
from fewbit.io.containers.writer import ContainerWriter
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.io.orbax import OrbaxWriter

X = np.arange(8.0, dtype=np.float32)


def container(path):
    return ContainerWriter(path, HuggingFace(), weights=())


def gguf(path):
    return GGUFWriter(path, {"general.architecture": "llama"})


def orbax(path):
    pytest.importorskip("orbax.checkpoint")
    return OrbaxWriter(path)


WRITERS = pytest.mark.parametrize("make", [io.DirectoryWriter, container, gguf, orbax])


@WRITERS
def test_tensors_are_added_within_the_block(make, tmp_path):
    with pytest.raises(QuantError, match=r"with \w+Writer\(\.\.\.\) as writer"):
        make(tmp_path / "m").add("x", X)


def interrupted_block(writer):
    writer.add("x", X)
    raise QuantError("after one tensor of two")


@WRITERS
def test_an_error_in_the_block_leaves_nothing(make, tmp_path):
    with pytest.raises(QuantError, match="two"), make(tmp_path / "m") as writer:
        interrupted_block(writer)
    assert os.listdir(tmp_path) == []


@WRITERS
def test_an_interruption_after_the_rename_says_that_the_output_is_complete(make, tmp_path, monkeypatch):
    real = atomic.StagedDirectory._flush_parents

    def interrupted(self):
        real(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.StagedDirectory, "_flush_parents", interrupted)
    with pytest.raises(KeyboardInterrupt, match="m is already complete"), make(tmp_path / "m") as writer:
        writer.add("x", X)
    assert os.listdir(tmp_path) == ["m"]


@WRITERS
def test_the_same_calls_give_a_complete_output(make, tmp_path):
    with make(tmp_path / "m") as writer:
        writer.add("x", X)
    assert os.listdir(tmp_path) == ["m"]
    np.testing.assert_array_equal(io.read(tmp_path / "m").tensors["x"], X)

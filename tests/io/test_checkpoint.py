"""Tensors load when asked for, each time anew."""

import pathlib

import numpy as np
import pytest

from fewbit import QuantError, io


def test_tensors_load_when_they_are_asked_for():
    loaded = []

    def load(name):
        loaded.append(name)
        return np.zeros(3, np.float32)

    tensors = io.Tensors({n: io.TensorInfo((3,), "float32", "F32", 12) for n in ("b", "a")}, load)
    assert list(tensors) == ["b", "a"]
    assert "a" in tensors
    assert len(tensors) == 2
    assert repr(tensors) == "Tensors(2 tensors, 24 bytes in the file)"
    assert loaded == []
    assert tensors["a"].shape == (3,)
    assert loaded == ["a"]


def test_an_unknown_name_is_answered_with_near_ones():
    tensors = io.Tensors({"weight": io.TensorInfo((1,), "float32", "F32", 4)}, lambda name: np.zeros(1))
    with pytest.raises(KeyError, match="did you mean 'weight'"):
        tensors["weigth"]


def test_a_checkpoint_without_tensors_is_refused():
    with pytest.raises(QuantError, match=r"m\.npz holds no tensors"):
        io.Checkpoint(pathlib.Path("m.npz"), "npz", io.Tensors({}, lambda name: np.zeros(1)), {})

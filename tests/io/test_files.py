"""Paths are checked before they are opened."""

import os

import numpy as np
import pytest

from fewbit import QuantError, workflows
from fewbit.io.files import checked_path, content, mapped


def test_the_bytes_of_a_file_are_mapped_read_only(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    data = mapped(tmp_path / "a")
    assert data.tobytes() == b"abc"
    assert data.dtype == np.uint8
    assert not data.flags.writeable


def test_nothing_at_the_path(tmp_path):
    with pytest.raises(QuantError, match=r"nowhere\.gguf does not exist; pass a \.gguf, \.safetensors or \.npz file"):
        checked_path(tmp_path / "nowhere.gguf")


def test_an_empty_path_is_not_the_working_directory():
    with pytest.raises(QuantError, match="the path is empty; pass a file or a model directory"):
        checked_path("")
    with pytest.raises(QuantError, match="the path is empty"):
        workflows.load("")


def test_what_a_killed_exchange_left_is_named(tmp_path):
    (tmp_path / ".m.fewbit-old").mkdir()
    with pytest.raises(
        QuantError, match=r"m was being replaced when its writer died; the old directory is .*m\.fewbit-old: run"
    ):
        checked_path(tmp_path / "m")


@pytest.mark.parametrize("name", ["a\0b", "x" * 250, "x" * 5_000])
def test_a_path_that_cannot_be(tmp_path, name):
    with pytest.raises(QuantError, match=r"is not a usable path|does not exist"):
        checked_path(tmp_path / name)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(QuantError, match="neither a file nor a directory"):
        checked_path(tmp_path / "pipe")


def test_an_empty_file(tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(QuantError, match=r"is empty \(0 bytes\)"):
        mapped(tmp_path / "a")


def test_a_directory_where_a_file_is_expected(tmp_path):
    with pytest.raises(QuantError, match="is a directory; pass a file"):
        mapped(tmp_path)
    with pytest.raises(QuantError, match="cannot be read: Is a directory"):
        content(tmp_path)

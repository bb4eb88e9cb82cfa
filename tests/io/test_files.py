"""Paths are checked before they are opened."""

import hashlib
import os

import numpy as np
import pytest

from fewbit import QuantError, workflows
from fewbit.io.files import check_spans, checked_path, content, file_sha256, mapped, part_hashes


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


def test_the_hash_of_a_file(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(QuantError, match=r"none cannot be read: No such file or directory"):
        file_sha256(tmp_path / "none")


def test_parts_and_the_whole_are_hashed_together(tmp_path):
    (tmp_path / "a").write_bytes(b"-abcdef")
    hashes, whole = part_hashes(tmp_path / "a", 1, [2, 0, 3])
    assert hashes == [hashlib.sha256(part).hexdigest() for part in (b"ab", b"", b"cde")]
    assert whole == hashlib.sha256(b"abcde").hexdigest()
    assert part_hashes(tmp_path / "a", 5, [9])[1] == hashlib.sha256(b"ef").hexdigest(), "as far as the file goes"


SPANS = {
    "gap": ((0, 64), 108, "tensor 'b' begins at byte 64 of the data, expected 32"),
    "overlap": ((0, 0), 108, "tensor 'b' begins at byte 0 of the data, expected 32"),
    "cut off": ((0, 32), 43, "tensor 'b' is cut off, 1 bytes are missing"),
    "too long": ((0, 32), 65, "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("name", SPANS)
def test_tensors_must_follow_one_another(name):
    begins, size, message = SPANS[name]
    with pytest.raises(QuantError, match=message):
        check_spans([(n, begin, begin + 12) for n, begin in zip("ab", begins, strict=True)], size, "m.gguf", alignment=32)


@pytest.mark.parametrize("size", [44, 64], ids=["without padding at the end", "with it"])
def test_the_padding_of_the_last_tensor_may_be_missing(size):
    check_spans([("a", 0, 12), ("b", 32, 44)], size, "m.gguf", alignment=32)

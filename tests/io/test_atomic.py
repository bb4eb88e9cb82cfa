"""A staged directory appears whole or not at all, whatever goes wrong."""

import errno
import os

import pytest

from fewbit import QuantError
from fewbit.io import atomic
from fewbit.io.atomic import StagedDirectory, exchange


def names(path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.fixture(params=["at once", "in two renames"])
def both_ways(request, monkeypatch):
    """Runs a test with Linux's one exchange, and without it."""
    if request.param == "in two renames":
        monkeypatch.setattr(atomic, "_exchanged_at_once", lambda staged, target: False)


def test_nothing_stands_at_the_target_before_the_commit(tmp_path):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    staged.write("a", [b"hel", b"lo"], 5)
    assert names(tmp_path) == [".m.fewbit-partial"]
    staged.commit()
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["a"]
    assert (tmp_path / "m" / "a").read_bytes() == b"hello"


def test_what_is_discarded_leaves_nothing(tmp_path):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    staged.write("a", [b"x"], 1)
    staged.discard()
    assert names(tmp_path) == []


def test_an_old_directory_is_replaced_whole(tmp_path, both_ways):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    staged = StagedDirectory(tmp_path / "m", overwrite=True)
    staged.write("new", [b"x"], 1)
    assert names(tmp_path / "m") == ["old"]
    staged.commit()
    assert names(tmp_path / "m") == ["new"]
    assert names(tmp_path) == ["m"]


def test_a_target_that_appeared_meanwhile_is_not_replaced(tmp_path):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "other").touch()
    with pytest.raises(QuantError, match="m cannot be written: Directory not empty"):
        staged.commit()
    assert names(tmp_path / "m") == ["other"]
    staged.discard()


def test_a_failed_second_rename_puts_the_old_directory_back(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchanged_at_once", lambda staged, target: False)
    (tmp_path / "m").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "no-such-directory", tmp_path / "m")
    assert names(tmp_path) == ["m"]


def test_what_a_killed_exchange_left_is_put_back(tmp_path):
    """As if the process had been killed between the two renames."""
    (tmp_path / ".m.fewbit-old").mkdir()
    (tmp_path / ".m.fewbit-old" / "old").touch()
    staged = StagedDirectory(tmp_path / "m", overwrite=True)
    assert names(tmp_path / "m") == ["old"]
    staged.discard()
    assert names(tmp_path) == ["m"]


def test_what_a_finished_exchange_left_is_removed(tmp_path):
    (tmp_path / ".m.fewbit-old").mkdir()
    (tmp_path / "m").mkdir()
    StagedDirectory(tmp_path / "m", overwrite=True).discard()
    assert names(tmp_path) == ["m"]


def test_what_a_dead_run_left_is_cleared(tmp_path):
    (tmp_path / ".m.fewbit-partial").mkdir()
    (tmp_path / ".m.fewbit-partial" / "stale").touch()
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    staged.commit()
    assert names(tmp_path / "m") == []


def test_a_living_run_is_left_alone(tmp_path):
    first = StagedDirectory(tmp_path / "m", overwrite=False)
    first.write("a", [b"x"], 1)
    with pytest.raises(
        QuantError, match=r"another process is writing to .*m\.fewbit-partial; wait for it, or choose another"
    ):
        StagedDirectory(tmp_path / "m", overwrite=False)
    first.commit()
    assert names(tmp_path / "m") == ["a"]


def test_the_parent_must_exist(tmp_path):
    with pytest.raises(QuantError, match=r"x/m cannot be written: its parent directory does not exist; create .*x first"):
        StagedDirectory(tmp_path / "x" / "m", overwrite=False)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_left_names_the_target_and_the_bytes(tmp_path, monkeypatch, code):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)

    def full(descriptor, data):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(
        QuantError, match=r"no space left for .*/m: the file being written needs 12,345 bytes, [\d,]+ are free"
    ):
        staged.write("a", [b"x" * 12_345], 12_345)
    staged.discard()
    assert names(tmp_path) == []


def test_another_failure_is_named(tmp_path, monkeypatch):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(QuantError, match="m cannot be written: Input/output error"):
        staged.write("a", [b"x"], 1)
    staged.discard()


def test_short_writes_are_finished(tmp_path, monkeypatch):
    real = os.write
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
        staged.write("a", [b"hello world"], 11)
    assert (staged.path / "a").read_bytes() == b"hello world"
    staged.discard()

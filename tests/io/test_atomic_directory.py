"""A staged directory appears whole or not at all, whatever goes wrong."""

import errno
import os

import pytest

from fewbit import QuantError
from fewbit.io import atomic_directory as atomic
from fewbit.io.atomic_directory import StagedDirectory, exchange


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
    assert names(tmp_path) == [".m.fewbit-lock", ".m.fewbit-partial"]
    staged.commit()
    staged.close()
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["a"]
    assert (tmp_path / "m" / "a").read_bytes() == b"hello"


def test_what_is_discarded_leaves_nothing(tmp_path):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    staged.write("a", [b"x"], 1)
    staged.close()
    assert names(tmp_path) == []


def test_an_old_directory_is_replaced_whole(tmp_path, both_ways):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    staged = StagedDirectory(tmp_path / "m", overwrite=True)
    staged.write("new", [b"x"], 1)
    assert names(tmp_path / "m") == ["old"]
    staged.commit()
    assert names(tmp_path / "m") == ["new"]
    staged.close()
    assert names(tmp_path) == ["m"]


def test_a_target_that_appeared_meanwhile_is_not_replaced(tmp_path):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "other").touch()
    with pytest.raises(QuantError, match="m has appeared while it was being written; nothing was replaced"):
        staged.commit()
    assert names(tmp_path / "m") == ["other"]
    staged.close()


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
    staged.close()
    assert names(tmp_path) == ["m"]


def test_what_a_finished_exchange_left_is_removed(tmp_path):
    (tmp_path / ".m.fewbit-old").mkdir()
    (tmp_path / "m").mkdir()
    StagedDirectory(tmp_path / "m", overwrite=True).close()
    assert names(tmp_path) == ["m"]


def test_what_a_dead_run_left_is_cleared(tmp_path):
    (tmp_path / ".m.fewbit-partial").mkdir()
    (tmp_path / ".m.fewbit-partial" / "stale").touch()
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    staged.commit()
    assert names(tmp_path / "m") == []


def test_missing_parents_are_created_and_go_again_without_a_commit(tmp_path):
    with StagedDirectory(tmp_path / "x" / "y" / "m", overwrite=False):
        assert names(tmp_path / "x" / "y") == [".m.fewbit-lock", ".m.fewbit-partial"]
    assert names(tmp_path) == []
    with StagedDirectory(tmp_path / "x" / "y" / "m", overwrite=False) as staged:
        staged.commit()
    assert names(tmp_path / "x" / "y") == ["m"]
    (tmp_path / "file").touch()
    with pytest.raises(QuantError, match="m cannot be written: Not a directory"):
        StagedDirectory(tmp_path / "file" / "m", overwrite=False)


def test_a_lock_file_that_was_removed_stops_the_commit(tmp_path):
    """Another writer may have come in its place."""
    with StagedDirectory(tmp_path / "m", overwrite=False) as staged:
        (tmp_path / ".m.fewbit-lock").unlink()
        with pytest.raises(QuantError, match=r"the lock file of .*m was removed while it was being written; nothing was"):
            staged.commit()
    assert names(tmp_path) == []


@pytest.fixture
def flushed(monkeypatch) -> list[str]:
    """The names that were flushed, and the renames, in their order."""
    events, opened = [], {}
    real_open, real_fsync, real_rename, real_exchange = os.open, os.fsync, os.rename, atomic.exchange

    def named_open(path, *args, **kwargs):
        descriptor = real_open(path, *args, **kwargs)
        opened[descriptor] = os.path.basename(path)
        return descriptor

    def fsync(descriptor):
        events.append(f"flush {opened[descriptor]}")
        real_fsync(descriptor)

    def rename(source, target):
        events.append(f"rename {os.path.basename(source)} {os.path.basename(target)}")
        real_rename(source, target)

    def exchange(source, target):
        events.append(f"exchange {source.name} {target.name}")
        real_exchange(source, target)

    for name, fn in {"open": named_open, "fsync": fsync, "rename": rename}.items():
        monkeypatch.setattr(os, name, fn)
    monkeypatch.setattr(atomic, "exchange", exchange)
    return events


@pytest.mark.finding(34)
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "replaced"])
def test_files_and_names_are_flushed_before_the_rename_and_the_parent_after_it(tmp_path, flushed, is_there):
    """A power failure finds the old directory or the new one: nothing is renamed before it is on the disk."""
    if is_there:
        (tmp_path / "parent" / "m").mkdir(parents=True)
    with StagedDirectory(tmp_path / "parent" / "m", overwrite=True) as staged:
        staged.write("a", [b"x"], 1)
        staged.write("b", [b"x"], 1)
        staged.rename("b", "c")
        staged.commit()
    moved = "exchange .m.fewbit-partial m" if is_there else "rename .m.fewbit-partial m"
    parents = ["flush parent"] if is_there else ["flush parent", f"flush {tmp_path.name}"]
    assert flushed == ["flush a", "flush b", "rename b c", "flush .m.fewbit-partial", moved, *parents]


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
    staged.close()
    assert names(tmp_path) == []


def test_another_failure_is_named(tmp_path, monkeypatch):
    staged = StagedDirectory(tmp_path / "m", overwrite=False)

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(QuantError, match="m cannot be written: Input/output error"):
        staged.write("a", [b"x"], 1)
    staged.close()


def test_short_writes_are_finished(tmp_path, monkeypatch):
    real = os.write
    staged = StagedDirectory(tmp_path / "m", overwrite=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
        staged.write("a", [b"hello world"], 11)
    assert (staged.path / "a").read_bytes() == b"hello world"
    staged.close()

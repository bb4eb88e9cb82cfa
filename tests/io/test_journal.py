"""The journal of a job, and arrays on their way into files: what is whole is found again, and nothing else."""

import errno
import hashlib
import os

import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.io import files
from fewbit.io.atomic_directory import StagedDirectory
from fewbit.io.journal import Added, Journal, Spool

JOB = {"recipe": "nf4", "layers": [1, 2]}


def journal_of(path, lines) -> None:
    with Journal(path, JOB) as journal:
        for line in lines:
            journal.note(line)


def test_lines_come_back_until_the_job_is_done(tmp_path):
    out = tmp_path / "new" / "m"
    journal_of(out, [{"a": 1}, {"b": [1.5, None]}])
    with Journal(out, dict(reversed(JOB.items()))) as journal:
        assert journal.lines == [{"a": 1}, {"b": [1.5, None]}]
        journal.cut(journal.lines[:1])
    with Journal(out, JOB) as journal:
        assert journal.lines == [{"a": 1}]
        journal.remove()
    assert os.listdir(out.parent) == []


def test_another_job_begins_anew(tmp_path):
    journal_of(tmp_path / "m", [{"a": 1}])
    (tmp_path / ".m.fewbit-work" / "part").mkdir()
    with Journal(tmp_path / "m", {**JOB, "recipe": "int4"}) as journal:
        assert journal.lines == [] and os.listdir(journal.path) == ["journal"]
    assert os.listdir(tmp_path) == [], "a journal without lines goes"


@pytest.mark.parametrize("place", [-1, -5, -30, 100, 70, 3], ids=str)
def test_a_damaged_line_and_what_follows_are_not_believed(tmp_path, place):
    journal_of(tmp_path / "m", [{"a": 1}, {"b": 2}])
    file = tmp_path / ".m.fewbit-work" / "journal"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    damaged = bytes(content[: place % len(content)]).count(b"\n")
    with Journal(tmp_path / "m", JOB) as journal:
        assert journal.lines == [{"a": 1}, {"b": 2}][: max(damaged - 1, 0)]
        journal.note({"c": 3})
    with Journal(tmp_path / "m", JOB) as journal:
        assert journal.lines[-1] == {"c": 3}


def test_one_process_at_a_time(tmp_path):
    with Journal(tmp_path / "m", JOB), pytest.raises(QuantError, match="fewbit-work is being written by process"):
        Journal(tmp_path / "m", JOB).__enter__()
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuantError, match="cannot be written"):
        Journal(tmp_path / "file" / "model", JOB).__enter__()

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal(tmp_path / "m", JOB) as journal:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(QuantError, match=r"\.m\.fewbit-work cannot be written: No space left on device"):
            journal.note({"a": 1})


ARRAYS = [{"a": np.arange(5, dtype=np.uint8)}, {"b.scale": np.ones((2, 3), np.float32), "b": np.zeros((), np.int16)}]


def spooled(place, count=2, moved=False) -> None:
    """A run that adds the first arrays, perhaps moves them, and dies."""
    with Journal(place / "m", JOB) as journal, StagedDirectory(place / "m", overwrite=False, resume=True) as staged:
        spool = Spool(staged, journal, 4)
        spool.restored()
        for index in range(count):
            spool.add({"n": index}, ARRAYS[index])
        if moved:
            spool.move("out", 0, b"head", list(spool.batch.arrays))


def restored(place) -> tuple[list[list[Added]], list[str]]:
    with Journal(place / "m", JOB) as journal, StagedDirectory(place / "m", overwrite=False, resume=True) as staged:
        batches = [list(batch.added) for batch in Spool(staged, journal, 4).restored()]
        return batches, sorted(os.listdir(staged.path))


def test_arrays_are_found_again(tmp_path):
    spooled(tmp_path)
    (batch,), files = restored(tmp_path)
    assert [added.entry for added in batch] == [{"n": 0}, {"n": 1}] and files == ["spool-0"]
    assert [list(added.arrays) for added in batch] == [["a"], ["b.scale", "b"]]
    content = (tmp_path / ".m.fewbit-partial" / "spool-0").read_bytes()
    assert content == bytes(range(5)) + bytes(3) + np.ones(6, np.float32).tobytes() + bytes(2)


@pytest.mark.parametrize(("place", "left"), [(0, 0), (4, 0), (9, 1), (-1, 1)])
def test_arrays_that_are_not_whole_are_not_found(tmp_path, place, left):
    spooled(tmp_path)
    file = tmp_path / ".m.fewbit-partial" / "spool-0"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    (batch,), files = restored(tmp_path)
    assert len(batch) == left and files == (["spool-0"] if left else [])


def test_moved_arrays_are_found_where_they_are_and_all_else_is_removed(tmp_path):
    spooled(tmp_path, moved=True)
    staged = tmp_path / ".m.fewbit-partial"
    with (staged / "out").open("ab") as file:
        file.write(b"cut off")
    (staged / "stale").touch()
    (staged / "folder").mkdir()
    batches, files = restored(tmp_path)
    assert [len(batch) for batch in batches] == [2, 0] and files == ["out"]
    assert (staged / "out").read_bytes()[:12] == b"head" + bytes(range(5)) + bytes(3)
    assert (staged / "out").stat().st_size == 4 + 8 + 24 + 2
    content = bytearray((staged / "out").read_bytes())
    content[0] ^= 1
    (staged / "out").write_bytes(content)
    assert restored(tmp_path) == ([[]], [])
    assert os.listdir(tmp_path) == []


MOVED = b"head" + bytes(range(5)) + bytes(3) + np.ones(6, np.float32).tobytes() + bytes(2)


def test_a_file_is_read_back_once(tmp_path, monkeypatch):
    read, real = [], files.file_chunks

    def counted(path, begin, nbytes):
        for chunk in real(path, begin, nbytes):
            read.append((path.name, begin, chunk))
            yield chunk

    monkeypatch.setattr(files, "file_chunks", counted)  # what hashes are taken of; the spool file is copied by another name
    with StagedDirectory(tmp_path / "m", overwrite=False) as staged:
        spool = Spool(staged, None, 4)
        for index, arrays in enumerate(ARRAYS):
            spool.add({"n": index}, arrays)
        moved = spool.move("out", 0, b"head", ["a", "b.scale", "b"])
    assert b"".join(chunk for _, _, chunk in read) == MOVED and {name for name, _, _ in read} == {"out"}
    assert (moved.end, moved.sha256) == (len(MOVED), hashlib.sha256(MOVED).hexdigest())


@pytest.mark.parametrize(
    ("place", "what"),
    [(0, "the header of out"), (4, "tensor 'a'"), (10, "the padding before tensor 'b.scale'"), (-1, "tensor 'b'")],
    ids=str,
)
def test_each_part_of_a_file_is_compared(tmp_path, monkeypatch, place, what):
    def damaged(staged, name):
        file = staged.path / name
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(StagedDirectory, "flush", damaged)
    with pytest.raises(QuantError, match=f"m: {what} reads back differently from what was written; the disk may be failing"):
        spooled(tmp_path, moved=True)
    monkeypatch.undo()
    assert [len(batch) for batch in restored(tmp_path)[0]] == [2], "the spool file is whole"


def test_a_run_without_a_journal_keeps_nothing(tmp_path):
    with StagedDirectory(tmp_path / "m", overwrite=False) as staged:
        Spool(staged, None).add({}, ARRAYS[0])
        assert os.listdir(staged.path) == ["spool-0"]
    assert os.listdir(tmp_path) == []

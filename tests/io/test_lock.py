"""The lock of an output: one holder, named to all others, and never kept by the dead."""

import errno
import os
import socket
import threading
import time

import pytest

from fewbit import QuantError
from fewbit.io import lock
from fewbit.io.lock import OutputLock


@pytest.mark.finding(2)
def test_the_second_is_refused_with_the_process_and_host_of_the_first(tmp_path):
    first = OutputLock(tmp_path / "m")
    assert (tmp_path / ".m.fewbit-lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    with pytest.raises(
        QuantError, match=rf"m is being written by process {os.getpid()} on {socket.gethostname()}; wait until it has ended"
    ):
        OutputLock(tmp_path / "m")
    OutputLock(tmp_path / "other").release()
    assert first.is_ours()
    first.release()
    first.release()
    assert os.listdir(tmp_path) == []
    OutputLock(tmp_path / "m").release()


@pytest.mark.finding(2)
def test_the_file_of_a_dead_writer_blocks_nobody(tmp_path):
    (tmp_path / ".m.fewbit-lock").write_text("process 1 on elsewhere, with a longer line than ours\n")
    held = OutputLock(tmp_path / "m")
    assert (tmp_path / ".m.fewbit-lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    held.release()
    assert os.listdir(tmp_path) == []


def test_who_waits_for_a_removed_file_takes_the_new_one(tmp_path, monkeypatch):
    """Between opening the file and locking it the holder released it, and another one came."""
    first, real, late = OutputLock(tmp_path / "m"), lock._try_flock, []

    def after_release(descriptor):
        monkeypatch.setattr(lock, "_try_flock", real)
        first.release()
        late.append(OutputLock(tmp_path / "m"))
        return real(descriptor)

    monkeypatch.setattr(lock, "_try_flock", after_release)
    with pytest.raises(QuantError, match="is being written by process"):  # the late one's file, not the removed one
        OutputLock(tmp_path / "m")
    late[0].release()
    assert os.listdir(tmp_path) == []


def test_a_holder_that_has_not_written_its_name_yet_is_waited_for(tmp_path):
    first = OutputLock(tmp_path / "m")
    path = tmp_path / ".m.fewbit-lock"
    path.write_text("")
    thread = threading.Thread(target=lambda: (time.sleep(0.02), path.write_text("process 7 on here\n")))
    thread.start()
    with pytest.raises(QuantError, match="is being written by process 7 on here"):
        OutputLock(tmp_path / "m")
    thread.join()
    path.write_text("")
    with pytest.raises(QuantError, match="is being written by another process"):
        OutputLock(tmp_path / "m")
    first.release()


def test_one_that_somebody_removed_is_known_and_the_successors_file_stays(tmp_path):
    first = OutputLock(tmp_path / "m")
    (tmp_path / ".m.fewbit-lock").unlink()
    second = OutputLock(tmp_path / "m")
    assert not first.is_ours() and second.is_ours()
    first.release()
    assert second.is_ours()
    second.release()


@pytest.mark.parametrize("why", ["no flock", "no such locks here"])
def test_without_flock_the_exclusive_creation_decides(tmp_path, monkeypatch, why):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    if why == "no flock":
        monkeypatch.setattr(lock, "fcntl", None)
    else:
        monkeypatch.setattr(lock.fcntl, "flock", refuse)
    first = OutputLock(tmp_path / "m")
    with pytest.raises(QuantError, match=r"process \d+ on .*, or was when that process died.*remove .*m\.fewbit-lock"):
        OutputLock(tmp_path / "m")
    first.release()
    OutputLock(tmp_path / "m").release()
    assert os.listdir(tmp_path) == []


def test_a_failure_to_write_the_name_leaves_no_file(tmp_path, monkeypatch):
    def full(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            OutputLock(tmp_path / "m")
    assert os.listdir(tmp_path) == []
    OutputLock(tmp_path / "m").release()

"""A directory that appears whole or not at all: staged beside its target, flushed to the disk, and renamed at the end.

Whatever stops the process, what stood at the target before still stands; the next run clears what this one left.
"""

import ctypes
import errno
import os
import pathlib
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from ..errors import QuantError

_LOCK = "lock"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class StagedDirectory:
    """A directory under a temporary name, which `commit` gives its own.

    The temporary name is `.<name>.fewbit-partial`, beside the target so that the rename stays within one file system.
    It is locked while it is written; one that nobody locks was left by a run that died, and is removed.

    Args:
        target: the directory to be.
        overwrite: whether `commit` may replace a directory that stands at the target.

    Raises:
        QuantError: when the parent directory is missing or cannot be written, or another process is writing the same
            target.
    """

    def __init__(self, target: pathlib.Path, *, overwrite: bool):
        self.target, self.overwrite = target, overwrite
        self.path = target.with_name(f".{target.name}.fewbit-partial")
        if not target.parent.is_dir():
            raise QuantError(
                f"{target} cannot be written: its parent directory does not exist; create {target.parent} first"
            )
        self._lock: int | None = None
        try:
            _recover(target)
            self._clear_stale()
            self.path.mkdir()
            self._lock = _locked(self.path / _LOCK)
        except OSError as error:
            raise _write_error(self.target, 0, error) from error

    def write(self, name: str, parts: Iterable[Any], nbytes: int) -> None:
        """Writes one file of the directory and flushes it to the disk.

        Args:
            name: its name.
            parts: its bytes: `bytes`, or one-dimensional uint8 arrays.
            nbytes: how many they are, for the message when there is no space left.

        Raises:
            QuantError: when the file cannot be written.
        """
        try:
            descriptor = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            try:
                for part in parts:
                    _write_all(descriptor, memoryview(part))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _write_error(self.target, nbytes, error) from error

    def rename(self, name: str, new_name: str) -> None:
        """Gives a file of the directory another name."""
        os.rename(self.path / name, self.path / new_name)

    def commit(self) -> None:
        """Puts the directory in its place; from then on it stands, and before that nothing had changed.

        Raises:
            QuantError: when something has come to stand at the target meanwhile, or the rename fails.
        """
        try:
            self._unlock()
            _flush_directory(self.path)
            if self.overwrite and self.target.exists():
                exchange(self.path, self.target)
                _flush_directory(self.target.parent)
                shutil.rmtree(self.path)  # what stood at the target
            else:
                os.rename(self.path, self.target)
                _flush_directory(self.target.parent)
        except OSError as error:
            raise _write_error(self.target, 0, error) from error

    def discard(self) -> None:
        """Removes the temporary directory; the target stays as it is."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clear_stale(self) -> None:
        """Removes what a run that died left behind, unless it is alive after all."""
        if not self.path.exists():
            return
        os.close(_locked(self.path / _LOCK))
        shutil.rmtree(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            (self.path / _LOCK).unlink()
            os.close(self._lock)
            self._lock = None


def exchange(staged: pathlib.Path, target: pathlib.Path) -> None:
    """Swaps two directories, in one step where the system has one (Linux's renameat2).

    Elsewhere in two renames; a process killed between them leaves the old directory under a name that the next run
    recognises and puts back.
    """
    if sys.platform == "linux" and _exchanged_at_once(staged, target):
        return
    aside = _aside(target)
    os.rename(target, aside)
    try:
        os.rename(staged, target)
    finally:
        if not target.exists():
            os.rename(aside, target)
    os.rename(aside, staged)


def _exchanged_at_once(staged: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether renameat2 exchanged the two; not every C library and file system has it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def _aside(target: pathlib.Path) -> pathlib.Path:
    return target.with_name(f".{target.name}.fewbit-old")


def _recover(target: pathlib.Path) -> None:
    """Finishes an exchange in two renames that was killed midway: puts the old directory back, or removes it."""
    aside = _aside(target)
    if not aside.exists():
        return
    if target.exists():
        shutil.rmtree(aside)
    else:
        os.rename(aside, target)


def _locked(path: pathlib.Path) -> int:
    """A descriptor that holds the lock of a file, which is released when the process ends, however it ends."""
    import fcntl

    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise QuantError(f"another process is writing to {path.parent}; wait for it, or choose another output") from error
    return descriptor


def _write_all(descriptor: int, data: memoryview) -> None:
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written : written + (1 << 28)])


def _flush_directory(path: pathlib.Path) -> None:
    """Flushes the names of a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(target: pathlib.Path, nbytes: int, error: OSError) -> QuantError:
    """The one sentence for a failed write."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return QuantError(f"{target} cannot be written: {error.strerror or error}")
    free = shutil.disk_usage(target.parent).free
    return QuantError(
        f"no space left for {target}: the file being written needs {nbytes:,} bytes, {free:,} are free beside what is "
        "written so far; nothing was changed. Free some space, or choose another output"
    )

"""Atomic writing of a directory.

The directory is staged in the target's parent, flushed to disk, and renamed at the end. An interrupted process leaves an existing
target unchanged; the next run removes the temporary files, or goes on from them.
"""

import ctypes
import errno
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from ..errors import QuantError
from .lock import OutputLock

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_ATTEMPTS = 10


class StagedDirectory:
    """A temporary directory that `commit` renames to the target.

    Its name is `.<name>.fewbit-partial`, in the target's parent so that the rename stays within one file system. The target stays
    locked until `close`, so temporary files found at the start were left by a process that died. Missing parent directories
    are created, and removed again without a commit. Leaving the context manager closes it.

    Args:
        target: the directory to create.
        overwrite: whether `commit` may replace a directory at the target.
        check: refuses a target that may not be replaced; called under the lock, and again right before the rename.
        resume: whether the temporary files of an interrupted writer are kept. Those of this one are then kept, too, if
            `is_kept` is set and it does not commit.

    Raises:
        QuantError: when the parent directory cannot be written, or another process is writing the same target.
    """

    def __init__(
        self,
        target: pathlib.Path,
        *,
        overwrite: bool,
        check: Callable[[pathlib.Path], object] = lambda target: None,
        resume: bool = False,
    ):
        self.target, self.overwrite, self._check = target, overwrite, check
        self.path = target.with_name(f".{target.name}.fewbit-partial")
        self._created: list[pathlib.Path] = []
        self._lock: OutputLock | None = None
        self.is_committed = self.is_kept = False
        try:
            self._lock = self._locked()
            _recover(target)
            check(target)
            if self.path.exists() and not resume:
                shutil.rmtree(self.path)
            self.path.mkdir(exist_ok=resume)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise self.write_error(0, error) from error
            raise

    def _locked(self) -> OutputLock:
        """Locks the target; creates missing parents first."""
        for attempt in range(_ATTEMPTS):
            self._created += _made_parents(self.target)
            try:
                return OutputLock(self.target)
            except FileNotFoundError:  # another writer just removed the parents that it had created
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, name: str, parts: Iterable[bytes | memoryview], nbytes: int) -> None:
        """Writes and flushes one file. `nbytes` is its size, for the message when the disk is full."""
        try:
            descriptor = os.open(self.path / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            try:
                for part in parts:
                    write_all(descriptor, memoryview(part))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.write_error(nbytes, error) from error

    def write_at(self, name: str, offset: int, parts: Iterable[bytes | memoryview], nbytes: int) -> None:
        """Writes to a file from a byte on, and cuts off the rest. `flush` puts it on the disk."""
        try:
            descriptor = os.open(self.path / name, os.O_CREAT | os.O_WRONLY, 0o666)
            try:
                os.ftruncate(descriptor, offset)
                os.lseek(descriptor, offset, os.SEEK_SET)
                for part in parts:
                    write_all(descriptor, memoryview(part))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.write_error(nbytes, error) from error

    def flush(self, name: str) -> None:
        """Flushes a file to disk."""
        try:
            descriptor = os.open(self.path / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.write_error(0, error) from error

    def write_verified(self, name: str, content: bytes) -> None:
        """Writes a small file, reads it back, and refuses any difference."""
        self.write(name, [content], len(content))
        try:
            is_same = (self.path / name).read_bytes() == content
        except OSError as error:
            raise self.write_error(len(content), error) from error
        if not is_same:
            raise QuantError(f"{self.target}: {name} reads back differently from what was written; the disk may be failing")

    def link(self, file: pathlib.Path, name: str) -> None:
        """Adds a flushed file that nobody changes, by a hard link. It is copied where the file system has no hard links."""
        try:
            try:
                os.link(file, self.path / name)
            except OSError:
                shutil.copyfile(file, self.path / name)
                _flush(self.path / name)
        except OSError as error:
            raise self.write_error(file.stat().st_size, error) from error

    def rename(self, name: str, new_name: str) -> None:
        """Renames a file of the directory."""
        os.rename(self.path / name, self.path / new_name)

    def commit(self) -> None:
        """Renames the staged directory to the target.

        File names are flushed before the rename and parents after it, so a power failure leaves the old directory or the new.

        Raises:
            QuantError: when a directory appeared at the target, the lock file was removed, or the rename fails.
        """
        is_replaced = self._check_before_rename()
        try:
            _flush(self.path)
            if is_replaced:
                exchange(self.path, self.target)
            else:
                os.rename(self.path, self.target)
            self._flush_parents()
            if is_replaced:
                shutil.rmtree(self.path)  # the replaced directory
        except OSError as error:
            raise self._commit_error(error) from error

    def commit_file(self, name: str) -> None:
        """Renames one file of the staged directory to the target. The target is a file or does not exist.

        Raises:
            QuantError: as `commit`.
        """
        self._check_before_rename()
        try:
            os.replace(self.path / name, self.target)
            self._flush_parents()
        except OSError as error:
            raise self._commit_error(error) from error

    def _check_before_rename(self) -> bool:
        """Raises QuantError where a rename is not allowed.

        The lock must still be ours, and an existing target one that may be replaced. Returns whether there is one.
        """
        if self._lock is None or not self._lock.is_ours():
            raise QuantError(f"the lock file of {self.target} was removed while it was being written; nothing was replaced")
        self._check(self.target)
        is_replaced = os.path.lexists(self.target)
        if is_replaced and not self.overwrite:
            raise QuantError(f"{self.target} has appeared while it was being written; nothing was replaced")
        return is_replaced

    def _flush_parents(self) -> None:
        """Records the rename, and flushes it to disk."""
        self.is_committed = True
        for parent in dict.fromkeys([self.target.parent, *(made.parent for made in self._created)]):
            _flush(parent)

    def _commit_error(self, error: OSError) -> QuantError:
        if self.is_committed:
            return QuantError(f"{self.target} was written completely, but cleaning up failed: {error.strerror or error}")
        return self.write_error(0, error)

    def write_error(self, nbytes: int, error: OSError) -> QuantError:
        """The error for a failed write.

        Args:
            nbytes: the size of the file; 0 if it is not known.
            error: what the system said.
        """
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return QuantError(f"{self.target} cannot be written: {error.strerror or error}")
        existing = next(parent for parent in self.target.absolute().parents if parent.exists())
        advice = "Free some space, or choose another output"
        if self.is_kept:
            advice = f"Free some space and run it again: what is finished is kept in {self.path}"
        needed = f"the file being written needs {nbytes:,} bytes, " if nbytes else ""
        free = shutil.disk_usage(existing).free
        return QuantError(f"no space left for {self.target}: {needed}{free:,} are free now; nothing was changed. {advice}")

    def close(self) -> None:
        """Removes temporary files that are not kept, and releases the lock. A second call does nothing."""
        lock, self._lock = self._lock, None
        try:
            # Without the lock the temporary directory may be another writer's.
            if lock is not None and (self.is_committed or not self.is_kept):
                shutil.rmtree(self.path, ignore_errors=True)
        finally:
            if lock is not None:
                lock.release()
            if not self.is_committed:
                _remove_empty(self._created)
            self._created = []


def exchange(staged: pathlib.Path, target: pathlib.Path) -> None:
    """Swaps two directories, atomically on Linux (renameat2).

    Elsewhere by two renames: a process killed between them leaves no target, and the old one where the next run restores it.
    """
    if sys.platform == "linux" and _exchanged_at_once(staged, target):
        return
    old = old_name(target)
    os.rename(target, old)
    try:
        os.rename(staged, target)
    finally:
        if not target.exists():
            os.rename(old, target)
    os.rename(old, staged)


def old_name(target: pathlib.Path) -> pathlib.Path:
    """The path of the replaced directory between the two renames."""
    return target.with_name(f".{target.name}.fewbit-old")


def _exchanged_at_once(staged: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether renameat2 swapped the two. Not every C library and file system has it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(staged), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(target))


def _recover(target: pathlib.Path) -> None:
    """Restores or removes the old directory of an interrupted exchange."""
    old = old_name(target)
    if not old.exists():
        return
    if target.exists():
        shutil.rmtree(old)
    else:
        os.rename(old, target)


def _made_parents(target: pathlib.Path) -> list[pathlib.Path]:
    """Creates missing parents; returns those it created, outermost first."""
    missing = [parent for parent in target.parents if not parent.exists()][::-1]
    created = []
    try:
        for parent in missing:
            parent.mkdir()
            created.append(parent)
    except FileExistsError as error:
        if not parent.is_dir():  # another writer may have created it
            _remove_empty(created)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from error
        return created + _made_parents(target)
    except OSError:
        _remove_empty(created)
        raise
    return created


def _remove_empty(created: list[pathlib.Path]) -> None:
    """Removes the empty directories that we created, innermost first."""
    try:
        for parent in reversed(created):
            parent.rmdir()
    except OSError:
        pass  # no longer empty


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all bytes, in as many calls as it takes."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written : written + (1 << 28)])


def _flush(path: pathlib.Path) -> None:
    """Flushes a file, or the file names of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

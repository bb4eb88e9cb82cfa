"""A lock file: one writer per directory.

The lock file of an output `m` is `.m.fewbit-lock` in the same directory, with the process and host of the writer as text. The
operating system's `flock` on it decides, so a process that dies releases the lock and the leftover file blocks nobody. The
writer removes the file before it releases the lock; a process that then locks the removed file sees that the path no longer
leads to it, and starts again.

On NFS the server keeps `flock` locks of all hosts (with the mount options `local_lock=flock` or `nolock` each host locks for
itself). Without `flock`, such as on Windows, the exclusive creation of the file decides: a crashed writer's file has to be
removed by hand, and the message says which.
"""

import errno
import os
import pathlib
import socket
import time

from ..errors import QuantError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_NAMING_SECONDS = 0.1  # from locking to writing the holder's name
_NAMING_STEP = 0.005


class OutputLock:
    """Locks one output directory until `release`.

    Args:
        target: the output directory, which need not exist; its parent must.

    Raises:
        QuantError: when another process is writing the same output; the message names process and host.
        OSError: when the file cannot be created.
    """

    def __init__(self, target: pathlib.Path):
        self.path = target.with_name(f".{target.name}.fewbit-lock")
        self._descriptor: int | None = _locked(self.path, target)

    def is_ours(self) -> bool:
        """True while the path still leads to the locked file."""
        return self._descriptor is not None and _is_named(self._descriptor, self.path)

    def release(self) -> None:
        """Removes the file and releases the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            if _is_named(descriptor, self.path):
                os.unlink(self.path)
        finally:
            _unlock(descriptor)
            os.close(descriptor)


def _locked(path: pathlib.Path, target: pathlib.Path) -> int:
    """Locks the file and writes our process and host into it. Returns its descriptor."""
    holder_known_by = time.monotonic() + _NAMING_SECONDS
    while True:
        opened = _opened(path)
        if opened is None:
            continue  # its writer removed it between our two attempts
        descriptor, is_new = opened
        try:
            state = _try_flock(descriptor)
            if state == "free" or (state == "unsupported" and is_new):
                if _is_named(descriptor, path):
                    _name_holder(descriptor, path)
                    return descriptor
            elif (holder := _holder(descriptor)) or time.monotonic() > holder_known_by:
                raise QuantError(_refusal(target, path, holder or "another process", state))
            else:
                time.sleep(_NAMING_STEP)  # the holder is about to write its name
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: pathlib.Path) -> tuple[int, bool] | None:
    """Opens or creates the file. True with a new one, None if it was just removed."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        pass
    try:
        return os.open(path, os.O_RDWR), False
    except FileNotFoundError:
        return None


def _try_flock(descriptor: int) -> str:
    """Tries to lock: `free` (now ours), `busy` or `unsupported` by the file system."""
    if fcntl is None:
        return "unsupported"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return "unsupported"
    return "free"


def _unlock(descriptor: int) -> None:
    """Releases the lock for all copies of the descriptor, including forked children's."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _is_named(descriptor: int, path: pathlib.Path) -> bool:
    """True if the path leads to the file of the descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _name_holder(descriptor: int, path: pathlib.Path) -> None:
    """Writes our process and host into the locked file."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.unlink(path)
        raise


def _holder(descriptor: int) -> str:
    """The text of a newly opened lock file: `process 123 on host`."""
    text = os.read(descriptor, 300).decode("utf-8", "replace").strip()
    return "".join(letter for letter in text if letter.isprintable())


def _refusal(target: pathlib.Path, path: pathlib.Path, holder: str, state: str) -> str:
    if state == "busy":
        return f"{target} is being written by {holder}; wait until it has ended, or choose another output"
    return (
        f"{target} is being written by {holder}, or was when that process died; this file system has no flock to check it. "
        f"If the process is gone, remove {path}"
    )

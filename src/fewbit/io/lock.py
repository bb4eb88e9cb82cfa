"""The lock file of an output directory: one writer at a time.

Of an output `m` it is the file `.m.fewbit-lock` in the same directory, with the process and the host of the writer as text.
The operating system's lock of that file (`flock`) decides, so a process that dies releases it, however it dies, and the
file that it leaves blocks nobody. The writer removes the file before it releases the lock; a process that then gets the lock
of the removed file sees that the name no longer leads to it, and starts again.

On NFS the server keeps `flock` locks of all hosts (unless the mount says `local_lock=flock` or `nolock`: then each host locks
for itself). A file system without `flock`, or a system without it, such as Windows, is left with the exclusive creation of
the file: there a crashed writer's file has to be removed by hand, and the message says which.
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
_NAMING_SECONDS = 0.1  # between the lock and the line that names its holder
_NAMING_STEP = 0.005


class OutputLock:
    """The lock of one output directory, from the constructor to `release`.

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
        """Whether the lock file is still the one that was locked: nobody removed it meanwhile."""
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
    """The descriptor of the locked file, which holds our process and host."""
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
                time.sleep(_NAMING_STEP)  # it has the lock and is about to write its name
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: pathlib.Path) -> tuple[int, bool] | None:
    """A descriptor of the file and whether we created it; None when it was removed meanwhile."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        pass
    try:
        return os.open(path, os.O_RDWR), False
    except FileNotFoundError:
        return None


def _try_flock(descriptor: int) -> str:
    """`free`: it is ours now; `busy`: another one's; `unsupported`: the file system has no such locks."""
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
    """Releases the lock for every copy of the descriptor: a forked child's copy would keep it locked."""
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _is_named(descriptor: int, path: pathlib.Path) -> bool:
    """Whether the path leads to the file of the descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _name_holder(descriptor: int, path: pathlib.Path) -> None:
    """Writes our process and host into the file that we locked."""
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except BaseException:
        os.unlink(path)
        raise


def _holder(descriptor: int) -> str:
    """What the lock file, just opened, says of its holder: `process 123 on host`."""
    text = os.read(descriptor, 300).decode("utf-8", "replace").strip()
    return "".join(letter for letter in text if letter.isprintable())


def _refusal(target: pathlib.Path, path: pathlib.Path, holder: str, state: str) -> str:
    if state == "busy":
        return f"{target} is being written by {holder}; wait until it has ended, or choose another output"
    return (
        f"{target} is being written by {holder}, or was when that process died: this file system has no locks that would tell. "
        f"If the process is gone, remove {path}"
    )

"""Finished parts of a job on the disk, so that it can be resumed."""

import contextlib
import hashlib
import os
import pathlib
import shutil
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from .._json import canonical
from ..errors import QuantError
from .checkpoint import Tensor
from .lock import OutputLock
from .native.reader import read_directory
from .native.writer import write

_JOB = "job"


class FinishedParts:
    """The finished parts of a job that writes `output`, in the directory `.<name>.fewbit-work` next to it.

    Each part is a fewbit directory: it exists whole or not at all, and its hashes are checked when it is loaded. Parts of another
    job, and damaged ones, are removed. A context manager, during which no other process can work on the same output; an
    exception leaves the parts for the next run.

    Args:
        output: the path of the output.
        job: JSON that identifies the job: equal jobs give equal parts.

    Raises:
        QuantError: when another process is working on the output, or the directory cannot be written.
    """

    def __init__(self, output: str | os.PathLike[str], job: Mapping[str, Any]):
        output = pathlib.Path(output)
        self.path = output.with_name(f".{output.name}.fewbit-work")
        self._job = hashlib.sha256(canonical(job)).hexdigest()
        self._lock: OutputLock | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = OutputLock(self.path)
        except OSError as error:
            raise QuantError(f"{self.path} cannot be written: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with contextlib.suppress(OSError):
            self.path.rmdir()  # without parts
        self._lock.release()

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a finished part; None if it is not finished."""
        path = self.path / name
        if not path.is_dir():
            return None
        try:
            found = read_directory(path)
            if found.facts.get(_JOB) == self._job:
                return {tensor: found.tensors[tensor] for tensor in found.tensors}
        except QuantError:
            pass  # damaged: it is computed again
        shutil.rmtree(path)
        return None

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a finished part.

        Raises:
            QuantError: when the disk is full, or the directory cannot be written.
        """
        write(self.path / name, tensors, facts={_JOB: self._job}, overwrite=True)

    def remove(self) -> None:
        """Removes all parts, when the output is complete."""
        shutil.rmtree(self.path, ignore_errors=True)

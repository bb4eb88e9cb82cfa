"""What all writers share: staging, and the rename at the end."""

import abc
import functools
import os
import pathlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from ..errors import QuantError
from .atomic_directory import StagedDirectory
from .journal import Journal
from .shards import Progress


class AbstractWriter(abc.ABC):
    """A context manager that writes one output atomically.

    Leaving the block renames what was staged to `path`; leaving it by an exception (also Ctrl-C) removes it, and an existing
    `path` stays unchanged. With a journal it is not removed, and the next writer of the same job goes on from it. Subclasses add
    tensors to `_staged`, read in `_restore` what an earlier writer added, and commit in `_finish`.

    Args:
        path: the output.
        check: the absolute path of an output that may be written; raises for any other. It is called before any work, under
            the output's lock, and right before the rename.
        overwrite: whether an existing output may be replaced.
        progress: called with ("write" or "verify", name of a tensor, its size in the file).
        journal: the journal of a job that can be resumed.

    Attributes:
        finished: the names of the tensors that an earlier writer of the job added; they are not added again.

    Raises:
        QuantError: as `check`, and when another process is writing the output.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        check: Callable[[str | os.PathLike[str]], pathlib.Path],
        *,
        overwrite: bool,
        progress: Progress | None,
        journal: Journal | None,
    ):
        self.path = check(path)
        self.finished: frozenset[str] = frozenset()
        self._journal = journal
        self._stage = functools.partial(
            StagedDirectory, self.path, overwrite=overwrite, check=check, resume=journal is not None
        )
        self._progress: Progress = progress or (lambda stage, name, nbytes: None)
        self._staging: StagedDirectory | None = None

    def __enter__(self) -> Self:
        self._staging = self._stage()
        try:
            self.finished = frozenset(self._restore())
        except BaseException:
            self._staging.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except KeyboardInterrupt as stop:
            if self._staged.is_committed:
                raise type(stop)(f"interrupted, but {self.path} is already complete") from None
            raise
        finally:
            self._staged.close()

    @property
    def _staged(self) -> StagedDirectory:
        """The directory that is being written."""
        self._check_open()
        assert self._staging is not None
        return self._staging

    def _check_open(self) -> None:
        """Refuses tensors before the block."""
        if self._staging is None:
            name = type(self).__name__
            raise QuantError(f"tensors are added within the block: with {name}(...) as writer: writer.add(...)")

    @abc.abstractmethod
    def _restore(self) -> Iterable[str]:
        """Reads what an earlier writer of the job added. Returns the names of its tensors."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Writes what is left, checks everything, and commits."""

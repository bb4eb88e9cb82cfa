"""Finished parts of a job on the disk, so that it can be resumed."""

import shutil
from collections.abc import Iterable

from ..errors import QuantError
from .checkpoint import Tensor, Tensors
from .journal import Journal
from .native.reader import read_directory
from .native.writer import DirectoryWriter


class FinishedParts:
    """Finished results of a job, for its later steps. They are in the directory of its journal rather than in memory.

    Each part is a fewbit directory: it exists whole or not at all, and the hash of a tensor is checked when it is loaded.

    Args:
        journal: the journal of the job.
        group: a name for the parts of one step, whose names then are its own.
    """

    def __init__(self, journal: Journal, group: str = ""):
        self._path = journal.path / group
        self._path.mkdir(exist_ok=True)

    def load(self, name: str) -> Tensors | None:
        """The tensors of a finished part, each loaded on access. None if the part is not finished, or damaged."""
        try:
            found = read_directory(self._path / name).tensors
            for tensor in found:
                found[tensor]
            return found
        except QuantError:
            self.remove(name)
            return None

    def save(self, name: str, tensors: Iterable[tuple[str, Tensor]]) -> Tensors:
        """Writes a finished part, tensor by tensor, and opens it.

        Raises:
            QuantError: when the disk is full, or the directory cannot be written.
        """
        with DirectoryWriter(self._path / name, overwrite=True) as writer:
            for tensor, value in tensors:
                writer.add(tensor, value)
        return read_directory(writer.path).tensors

    def clear(self) -> None:
        """Removes all parts of the group, when no later step needs them."""
        shutil.rmtree(self._path, ignore_errors=True)

    def remove(self, name: str) -> None:
        """Removes a part that is not needed any more."""
        shutil.rmtree(self._path / name, ignore_errors=True)

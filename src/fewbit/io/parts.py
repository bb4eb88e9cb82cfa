"""Finished parts of a job on the disk, so that it can be resumed."""

import shutil
from collections.abc import Mapping

from ..errors import QuantError
from .checkpoint import Tensor
from .journal import Journal
from .native.reader import read_directory
from .native.writer import write


class FinishedParts:
    """Results that later steps of a job need, in the directory of its journal.

    Each part is a fewbit directory: it exists whole or not at all, and its hashes are checked when it is loaded. Damaged ones are
    removed.

    Args:
        journal: the journal of the job.
    """

    def __init__(self, journal: Journal):
        self._path = journal.path

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a finished part; None if it is not finished."""
        path = self._path / name
        if not path.is_dir():
            return None
        try:
            found = read_directory(path)
            return {tensor: found.tensors[tensor] for tensor in found.tensors}
        except QuantError:
            shutil.rmtree(path)
            return None

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a finished part.

        Raises:
            QuantError: when the disk is full, or the directory cannot be written.
        """
        write(self._path / name, tensors, overwrite=True)

"""Writes arrays into safetensors files of bounded size."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..errors import QuantError
from .atomic_directory import StagedDirectory
from .journal import Added, Batch, Journal, Moved, Spool
from .native.manifest import FileRecord, TensorRecord
from .safetensors.file import DTYPES, dtype_name, file_header, ordered

Progress = Callable[[str, str, int], None]
"""Called with "write" or "verify", the name of a tensor, and its size in the file."""


class ShardWriter:
    """Collects arrays in a spool file, and writes them to files. When the arrays fill a file, it is written and read back.

    Args:
        staged: the directory that is being written.
        stem: what file names begin with: `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors`.
        metadata: the `__metadata__` of each file.
        max_bytes: the maximum size of a file; a larger array gets its own.
        progress: what reports each array.
        journal: the journal of a job that can be resumed.
    """

    def __init__(
        self,
        staged: StagedDirectory,
        stem: str,
        metadata: Mapping[str, str],
        max_bytes: int,
        progress: Progress,
        journal: Journal | None = None,
    ) -> None:
        self._staged, self._stem, self._metadata = staged, stem, dict(metadata)
        self._limit, self._progress = max_bytes, progress
        self._spool = Spool(staged, journal)
        self._files: list[tuple[FileRecord, dict[str, TensorRecord]]] = []

    def restored(self) -> list[Added]:
        """What an earlier writer of the job added."""
        for file in self._staged.path.glob(f"{self._stem}*.safetensors"):  # it may have died while it numbered the files
            index = 0
            if file.name != self._name(0, 1):
                index = int(file.name.removeprefix(f"{self._stem}-")[:5]) - 1
            self._staged.rename(file.name, self._temporary_name(index))
        batches = self._spool.restored()
        for batch in batches:
            if batch.moved is not None:
                self._keep(batch, batch.moved)
        return [added for batch in batches for added in batch.added]

    def add(self, arrays: Mapping[str, np.ndarray], entry: Mapping[str, Any]) -> None:
        """Adds arrays that belong in the same file. `entry` is what the writer needs to know about them when it resumes."""
        nbytes = sum(array.nbytes for array in arrays.values())
        if self._spool.batch.added and self._spool.batch.size + nbytes > self._limit:
            self._flush()
        self._spool.add(entry, arrays)

    def add_file(self, file: pathlib.Path, entry: FileRecord, tensors: Mapping[str, TensorRecord]) -> None:
        """Adds a file of the same kind that was written elsewhere. It was read back there, and is linked, not copied."""
        if self._spool.batch.added:
            self._flush()
        self._staged.link(file, self._temporary_name(len(self._files)))
        self._files.append((entry, dict(tensors)))

    def finish(self) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
        """Writes the last file, and numbers all. Returns the records of files and of tensors."""
        if self._spool.batch.added:
            self._flush()
        files: dict[str, FileRecord] = {}
        tensors: dict[str, TensorRecord] = {}
        for index, (file, entries) in enumerate(self._files):
            name = self._name(index, len(self._files))
            self._staged.rename(self._temporary_name(index), name)
            files[name] = file
            tensors |= {leaf: dataclasses.replace(entry, file=name) for leaf, entry in entries.items()}
        return files, tensors

    def _flush(self) -> None:
        """Writes the arrays of the spool file as one file, and reads it back."""
        batch, stored = self._spool.batch, self._spool.batch.arrays
        # Dtypes and shapes, without memory.
        arrays = {name: np.broadcast_to(np.zeros((), DTYPES[one.dtype]), one.shape) for name, one in stored.items()}
        arrays = ordered(arrays)
        header = file_header(arrays, self._metadata)
        moved = self._spool.move(self._temporary_name(len(self._files)), 0, header, arrays)
        for name, one in stored.items():
            self._progress("verify", name, one.nbytes)
        self._keep(batch, moved)

    def _keep(self, batch: Batch, moved: Moved) -> None:
        """Records a file that is complete."""
        tensors = {name: TensorRecord(moved.file, one.dtype, one.shape, one.sha256) for name, one in batch.arrays.items()}
        self._files.append((FileRecord(moved.end, moved.sha256), tensors))

    def _temporary_name(self, index: int) -> str:
        """The name of a file while their number is unknown."""
        return f"{self._stem}-{index + 1:05d}.safetensors"

    def _name(self, index: int, count: int) -> str:
        if count == 1:
            return f"{self._stem}.safetensors"
        return f"{self._stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def host_array(array: np.ndarray | jax.Array, name: str) -> np.ndarray:
    """A little-endian, contiguous array in host memory.

    Raises:
        QuantError: for anything but an array, or a dtype that safetensors files lack.
    """
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        raise QuantError(
            f"tensor {name!r} is a {type(array).__name__}; expected an array or a QArray. fb.save writes any tree or module"
        )
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    dtype_name(dtype, f"tensor {name!r}")
    return np.asarray(array, dtype, order="C")

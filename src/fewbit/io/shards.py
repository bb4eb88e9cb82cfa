"""Writes arrays into safetensors files of bounded size."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from ..errors import QuantError
from .atomic_directory import StagedDirectory
from .files import mapped
from .native.manifest import FileRecord, TensorRecord, sha256
from .safetensors.file import array_bytes, dtype_name, file_header, ordered, read_file

Progress = Callable[[str, str, int], None]
"""Called with "write" or "verify", the name of a tensor, and its size in the file."""


class ShardWriter:
    """Collects arrays until they fill a file, writes it, and reads it back.

    Args:
        staged: the directory that is being written.
        stem: what file names begin with: `<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors`.
        metadata: the `__metadata__` of each file.
        max_bytes: the maximum size of a file; a larger array gets its own.
        progress: what reports each array.
    """

    def __init__(
        self, staged: StagedDirectory, stem: str, metadata: Mapping[str, str], max_bytes: int, progress: Progress
    ) -> None:
        self._staged, self._stem, self._metadata = staged, stem, dict(metadata)
        self._limit, self._progress = max_bytes, progress
        self._pending: dict[str, np.ndarray] = {}
        self._pending_bytes = 0
        self._files: list[tuple[FileRecord, dict[str, TensorRecord]]] = []

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Adds arrays that belong in the same file; they are copies that nobody changes."""
        nbytes = sum(array.nbytes for array in arrays.values())
        if self._pending and self._pending_bytes + nbytes > self._limit:
            self._flush()
        self._pending |= arrays
        self._pending_bytes += nbytes

    def finish(self) -> tuple[dict[str, FileRecord], dict[str, TensorRecord]]:
        """Writes the last file, and numbers all; returns the records of files and of tensors."""
        if self._pending:
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
        """Writes the pending arrays as one file, and reads it back."""
        arrays = ordered(self._pending)
        header = file_header(arrays, self._metadata)
        name = self._temporary_name(len(self._files))
        parts = [header, *map(array_bytes, arrays.values())]
        size = sum(len(part) for part in parts)
        self._staged.write(name, parts, size)
        data = mapped(self._staged.path / name)
        if data[: len(header)].tobytes() != header:
            raise self._changed(f"the header of {name}")
        stored, _ = read_file(self._staged.path / name, data)
        for leaf, array in arrays.items():
            if not np.array_equal(stored[leaf].data, array_bytes(array)):
                raise self._changed(f"tensor {leaf!r}")
            self._progress("verify", leaf, array.nbytes)
        tensors = {
            leaf: TensorRecord(name, dtype_name(array.dtype, leaf), array.shape, sha256(array_bytes(array)))
            for leaf, array in self._pending.items()
        }
        self._files.append((FileRecord(size, sha256(data.data)), tensors))
        self._pending, self._pending_bytes = {}, 0

    def _changed(self, what: str) -> QuantError:
        return QuantError(
            f"{self._staged.target}: {what} reads back differently from what was written; the disk may be failing"
        )

    def _temporary_name(self, index: int) -> str:
        """The name of a file while their number is unknown."""
        return f"{self._stem}-{index + 1:05d}.safetensors"

    def _name(self, index: int, count: int) -> str:
        if count == 1:
            return f"{self._stem}.safetensors"
        return f"{self._stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def host_copy(array: np.ndarray | jax.Array, name: str) -> np.ndarray:
    """A little-endian, contiguous copy of an array in host memory.

    Raises:
        QuantError: for anything but an array, or a dtype that safetensors files lack.
    """
    if not isinstance(array, np.ndarray | np.generic | jax.Array):
        raise QuantError(
            f"tensor {name!r} is a {type(array).__name__}; expected an array or a QArray. fb.save writes any tree or module"
        )
    dtype = array.dtype.newbyteorder("<") if array.dtype.byteorder == ">" else array.dtype
    dtype_name(dtype, f"tensor {name!r}")
    return np.array(array, dtype, order="C")

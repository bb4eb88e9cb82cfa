"""Checked paths, memory-mapped files, their hashes and layout."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np

from ..errors import QuantError
from .atomic_directory import old_name

_CHUNK = 1 << 24


def checked_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Checks that a path is a file or directory.

    Raises:
        QuantError: for an empty path, and one that does not exist or is neither a file nor a directory.
    """
    if not os.fspath(path):
        raise QuantError("the path is empty; pass a file or a model directory")
    path = pathlib.Path(path)
    try:
        exists, readable = path.exists(), path.is_file() or path.is_dir()
    except (OSError, ValueError) as error:  # a name too long for the file system, or with a zero byte
        raise QuantError(f"{os.fspath(path)!r} is not a usable path: {error}") from error
    if not exists and os.path.isdir(old := old_name(path)):
        raise QuantError(f"{path} was being replaced when its writer died; the old directory is {old}: run the writer again")
    if not exists:
        raise QuantError(f"{path} does not exist; pass a .gguf, .safetensors or .npz file, or a model directory")
    if not readable:
        raise QuantError(f"{path} is neither a file nor a directory")
    return path


def file_size(path: pathlib.Path) -> int:
    """The bytes of a file.

    Raises:
        QuantError: when it is missing, empty, or a directory.
    """
    try:
        if not checked_path(path).is_file():
            raise QuantError(f"{path} is a directory; pass a file")
        size = path.stat().st_size
    except OSError as error:
        raise QuantError(f"{path} cannot be read: {error.strerror or error}") from error
    if size == 0:
        raise QuantError(f"{path} is empty (0 bytes); fetch or write it again")
    return size


def mapped(path: pathlib.Path, begin: int = 0, nbytes: int | None = None) -> np.ndarray:
    """Memory-maps a file, or a part of it, as a read-only uint8 array.

    Raises:
        QuantError: when the file is missing, empty, shorter than the part or not readable.
    """
    size = file_size(path)
    if nbytes is None:
        nbytes = size - begin
    if begin + nbytes > size:
        raise QuantError(f"{path} is cut off: it has {size} bytes, expected {begin + nbytes}; fetch or write it again")
    if nbytes == 0:  # which cannot be mapped
        return np.empty(0, np.uint8)
    try:
        return np.asarray(np.memmap(path, np.uint8, "r", begin, (nbytes,)))
    except OSError as error:
        raise QuantError(f"{path} cannot be read: {error.strerror or error}") from error


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A part of a file. It is mapped when it is read, so neither memory nor address space grows with the file."""

    path: pathlib.Path
    begin: int
    nbytes: int

    def read(self) -> np.ndarray:
        """The bytes, mapped from the file."""
        return mapped(self.path, self.begin, self.nbytes)


def content(path: pathlib.Path) -> bytes:
    """Reads a small file, which may be empty.

    Raises:
        QuantError: when the file is missing or not readable.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise QuantError(f"{path} cannot be read: {error.strerror or error}") from error


def file_sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        QuantError: when the file is missing or not readable.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise QuantError(f"{path} cannot be read: {error.strerror or error}") from error


def file_chunks(path: pathlib.Path, begin: int, nbytes: int) -> Iterator[bytes]:
    """The bytes of a part of a file, a piece at a time. There are fewer if the file is shorter, none if it is missing.

    Raises:
        QuantError: when the file is not readable.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            while nbytes > 0 and (chunk := file.read(min(nbytes, _CHUNK))):
                yield chunk
                nbytes -= len(chunk)
    except FileNotFoundError:
        return
    except OSError as error:
        raise QuantError(f"{path} cannot be read: {error.strerror or error}") from error


def range_sha256(path: pathlib.Path, begin: int, nbytes: int) -> str:
    """The SHA-256 of a part of a file, as far as it exists, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in file_chunks(path, begin, nbytes):
        digest.update(chunk)
    return digest.hexdigest()


def part_hashes(path: pathlib.Path, begin: int, sizes: Iterable[int]) -> tuple[list[str], str]:
    """The SHA-256 of consecutive parts of a file, and of all together. Each byte is read once.

    Args:
        path: the file.
        begin: the first byte of the first part.
        sizes: the bytes of each part.

    Returns:
        The hash of each part and the hash of all, in hexadecimal, of what exists.

    Raises:
        QuantError: when the file is not readable.
    """
    whole, hashes = hashlib.sha256(), []
    for size in sizes:
        part = hashlib.sha256()
        for chunk in file_chunks(path, begin, size):
            part.update(chunk)
            whole.update(chunk)
        hashes.append(part.hexdigest())
        begin += size
    return hashes, whole.hexdigest()


def check_spans(spans: Iterable[tuple[str, int, int]], total: int, where: str, *, alignment: int = 1) -> None:
    """Checks that the tensors of a file fill its data without gap or overlap.

    Args:
        spans: the name, first byte and end of each tensor, in order.
        total: the bytes of the data.
        where: the file's name, for error messages.
        alignment: what each tensor's first byte is a multiple of.

    Raises:
        QuantError: naming the first tensor that overlaps, leaves a gap or is cut off, or bytes after the last.
    """
    expected = 0
    for name, begin, end in spans:
        if begin != expected:
            raise QuantError(
                f"{where}: tensor {name!r} begins at byte {begin} of the data, expected {expected}; the file is damaged"
            )
        if end > total:
            raise QuantError(f"{where}: tensor {name!r} is cut off, {end - total} bytes are missing; fetch the file again")
        expected = -(-end // alignment) * alignment
    if total > expected:
        raise QuantError(f"{where}: {total - expected} bytes follow the last tensor; the file is damaged")

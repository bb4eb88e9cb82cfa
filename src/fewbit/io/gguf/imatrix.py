"""Importance matrices of llama.cpp: the mean squares of each tensor's inputs.

The current layout is a GGUF file without an architecture: for each tensor `<name>.in_sum2` [experts, K], sums of squares, and
`<name>.counts` [experts, 1], the tokens of each sum. The older one, `.dat`, is little-endian: int32 entries; for each an int32 length
and the name, int32 chunks n, int32 values, and float32 mean squares times n, all experts after another; then int32 chunks and the
name of the text with its length, which the oldest files lack.

Reference: llama.cpp, tools/imatrix/imatrix.cpp (commit 050fc7f).
"""

import dataclasses
import functools
import os
import pathlib
import struct
from collections.abc import Iterable, Mapping

import numpy as np

from ...errors import QuantError
from ..atomic_directory import StagedDirectory
from ..files import check_spans, mapped
from ..output import OutputKind, check_output
from .fields import Field, file_header
from .header import TensorEntry, read_header

_KIND, _F32 = "imatrix", 0
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_SUFFIXES = (".gguf", ".dat")


@dataclasses.dataclass(frozen=True)
class Importance:
    """The squared inputs of one tensor.

    Attributes:
        squares: the sums of `x**2`, float32 `[rows, K]`; a row for each expert, or one.
        counts: the tokens of each row, float32 `[rows]`. A `.dat` file has one row `[1, experts K]`, and counts chunks.
    """

    squares: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.squares.ndim != 2 or self.counts.shape != self.squares.shape[:1]:
            raise QuantError(
                f"sums of squares {self.squares.shape} need counts ({len(self.squares)},), not {self.counts.shape}"
            )
        for what, values in (("sums of squares", self.squares), ("counts", self.counts)):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise QuantError(f"the {what} have numbers that are negative, infinite or NaN")


@dataclasses.dataclass(frozen=True)
class ImportanceMatrix:
    """The squared inputs of a model's tensors.

    Attributes:
        entries: by the tensor's name in GGUF files, such as "blk.0.ffn_down.weight".
        datasets: the names of the texts.
        chunk_count: how many chunks of text were read.
        chunk_size: the tokens of a chunk; 0 in a `.dat` file, which has none.
    """

    entries: Mapping[str, Importance]
    datasets: tuple[str, ...] = ()
    chunk_count: int = 0
    chunk_size: int = 0


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Reads an importance matrix of llama.cpp or fewbit, in either layout.

    Args:
        path: the file.

    Returns:
        The matrix.

    Raises:
        QuantError: when the file is missing, damaged, or of another kind.
    """
    path = pathlib.Path(path)
    data = mapped(path)
    matrix = _from_gguf(data, str(path)) if bytes(data[:4]) == b"GGUF" else _from_dat(data, str(path))
    if not matrix.entries:
        raise QuantError(f"{path} is an importance matrix without a tensor")
    return matrix


def write_imatrix(
    path: str | os.PathLike[str],
    matrix: ImportanceMatrix,
    *,
    overwrite: bool = False,
    sources: Iterable[str | os.PathLike[str]] = (),
) -> pathlib.Path:
    """Writes an importance matrix that llama.cpp reads. The file appears whole or not at all.

    Args:
        path: the file: `.gguf`, or `.dat` for the older layout.
        matrix: the matrix.
        overwrite: whether another importance matrix at the path may be replaced.
        sources: the files of the model, which are never replaced.

    Returns:
        The absolute path.

    Raises:
        QuantError: when `check_imatrix_output` refuses the path, or it cannot be written.
    """
    check = functools.partial(check_imatrix_output, overwrite=overwrite, sources=tuple(sources))
    target = check(path)
    content = _as_dat(matrix) if target.suffix == ".dat" else _as_gguf(matrix)
    with StagedDirectory(target, overwrite=overwrite, check=check) as staged:
        staged.write_verified(target.name, content)
        staged.commit_file(target.name)
    return target


def check_imatrix_output(
    path: str | os.PathLike[str], *, overwrite: bool, sources: Iterable[str | os.PathLike[str]] = ()
) -> pathlib.Path:
    """The absolute path of an importance matrix that may be written.

    Args:
        path: the file to create.
        overwrite: whether another importance matrix may be replaced.
        sources: the files of the model.

    Returns:
        The path.

    Raises:
        QuantError: as `check_output`, for another suffix than `.gguf` and `.dat`, and an existing file that is no importance matrix.
    """
    kind = OutputKind(_foreign_files, "imatrix.gguf", refusal="is no importance matrix")
    target = check_output(path, overwrite=overwrite, sources=sources, kind=kind)
    if target.suffix not in _SUFFIXES:
        raise QuantError(f"{target} must end in .gguf, or in .dat for llama.cpp's older layout")
    return target


def _foreign_files(file: pathlib.Path) -> list[str]:
    """Refuses a file that is no importance matrix."""
    read_imatrix(file)
    return []


def _from_gguf(data: np.ndarray, where: str) -> ImportanceMatrix:
    header = read_header(data, where)
    if (kind := header.metadata.get("general.type")) != _KIND:
        raise QuantError(
            f"{where} is a GGUF file, but no importance matrix: general.type is {kind!r:.40}, expected {_KIND!r}"
        )
    for entry in header.entries:
        if entry.type_id != _F32:
            raise QuantError(f"{where}: tensor {entry.name!r} has ggml type {entry.type_id}, expected float32 ({_F32})")
    ends = ((e.name, e.offset, e.offset + 4 * int(np.prod(e.shape))) for e in header.entries)
    check_spans(ends, data.size - header.data_start, where, alignment=header.alignment)
    tensors = {e.name: _floats(data, header.data_start + e.offset, e.shape) for e in header.entries}
    entries = {}
    for name in sorted({name.removesuffix(end) for name in tensors for end in (_SUMS, _COUNTS) if name.endswith(end)}):
        sums, counts = tensors.get(name + _SUMS), tensors.get(name + _COUNTS)
        if sums is None or counts is None:
            raise QuantError(f"{where}: {name} has only one of {name}{_SUMS} and {name}{_COUNTS}; the file is damaged")
        rows = np.atleast_2d(sums)
        if counts.size == 1:  # a dense tensor of several matrices has one count
            counts = np.repeat(counts.reshape(-1), len(rows))
        entries[name] = _checked(rows, counts.reshape(-1), f"{where}: {name}")
    return ImportanceMatrix(
        entries, _texts(header.metadata, where), *(_count(header.metadata, k, where) for k in (_CHUNK_COUNT, _CHUNK_SIZE))
    )


def _floats(data: np.ndarray, start: int, shape: tuple[int, ...]) -> np.ndarray:
    return data[start : start + 4 * int(np.prod(shape))].view("<f4").reshape(shape)


def _checked(squares: np.ndarray, counts: np.ndarray, where: str) -> Importance:
    try:
        return Importance(np.array(squares, np.float32), np.array(counts, np.float32))
    except QuantError as error:
        raise QuantError(f"{where}: {error}; the file is damaged") from error


def _texts(fields: Mapping[str, object], where: str) -> tuple[str, ...]:
    found = fields.get(_DATASETS, [])
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise QuantError(f"{where}: {_DATASETS} is {found!r:.60}, expected a list of texts")
    return tuple(filter(None, found))


def _count(fields: Mapping[str, object], key: str, where: str) -> int:
    found = fields.get(key)
    if not isinstance(found, int) or found < 0:
        raise QuantError(f"{where}: {key} is {found!r:.40}, expected a number of 0 or more")
    return found


def _from_dat(data: np.ndarray, where: str) -> ImportanceMatrix:
    position, entries = 0, {}

    def taken(size: int, what: str) -> np.ndarray:
        nonlocal position
        if not 0 <= size <= data.size - position:
            raise QuantError(
                f"{where} is no importance matrix, or cut off: {what} of {size} bytes at byte {position}, and the file has {data.size}"
            )
        position += size
        return data[position - size : position]

    def number(what: str) -> int:
        return int(struct.unpack("<i", taken(4, what).tobytes())[0])

    def text(what: str) -> str:
        try:
            return taken(number(f"the length of {what}"), what).tobytes().decode()
        except UnicodeDecodeError as error:
            raise QuantError(f"{where}: {what} before byte {position} is not UTF-8; the file is damaged") from error

    for _ in range(number("the number of entries")):
        name = text("a tensor's name")
        chunks, values = number("the number of chunks"), number("the number of values")
        if not name or name in entries or values < 1:
            raise QuantError(f"{where}: the entry {name!r:.60} appears twice, or is empty; the file is damaged")
        row = taken(4 * values, f"the values of {name!r:.60}").view("<f4")[None]
        entries[name] = _checked(row, np.array([max(chunks, 1)]), f"{where}: {name!r:.60}")
    chunks, datasets = 0, ()
    if position < data.size:
        chunks, datasets = number("the number of chunks"), (text("the name of the text"),)
    if position < data.size or chunks < 0:
        raise QuantError(f"{where}: {data.size - position} bytes follow the name of the text; the file is damaged")
    return ImportanceMatrix(entries, tuple(filter(None, datasets)), chunks)


def _as_gguf(matrix: ImportanceMatrix) -> bytes:
    fields: dict[str, Field] = {"general.type": _KIND, _DATASETS: list(matrix.datasets) or [""]}
    fields |= {_CHUNK_COUNT: matrix.chunk_count, _CHUNK_SIZE: matrix.chunk_size}
    entries, parts, offset, alignment = [], [], 0, 32
    for name, one in sorted(matrix.entries.items()):
        rows, length = one.squares.shape
        for suffix, values, width in ((_SUMS, one.squares, length), (_COUNTS, one.counts, 1)):
            entries.append(TensorEntry(name + suffix, (rows, width) if rows > 1 else (width,), _F32, offset))
            part = np.ascontiguousarray(values, "<f4").tobytes()
            parts.append(part + bytes(-len(part) % alignment))
            offset += len(parts[-1])
    return file_header(fields, entries, alignment) + b"".join(parts)


def _as_dat(matrix: ImportanceMatrix) -> bytes:
    """Rows without a token get ones, as in llama.cpp."""
    parts = [struct.pack("<i", len(matrix.entries))]
    for name, one in sorted(matrix.entries.items()):
        chunks = -(-int(one.counts.max()) // max(matrix.chunk_size, 1))  # rounded up, so that it is not 0
        counts = one.counts[:, None]
        means = np.where(counts > 0, one.squares / np.where(counts > 0, counts, 1), 1)
        parts += [_with_length(name), struct.pack("<ii", max(chunks, 1), means.size)]
        parts.append((means * max(chunks, 1)).astype("<f4").tobytes())
    return b"".join([*parts, struct.pack("<i", matrix.chunk_count), _with_length(", ".join(matrix.datasets))])


def _with_length(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<i", len(data)) + data

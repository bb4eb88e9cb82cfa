"""What an interrupted job has finished, and where its arrays are."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from .._json import canonical
from ..errors import QuantError
from .atomic_directory import StagedDirectory, write_all
from .files import file_chunks, mapped, part_hashes, range_sha256
from .lock import OutputLock
from .native.manifest import sha256
from .safetensors.file import DTYPES, array_bytes, dtype_name

_FILE = "journal"


class Journal:
    """The finished steps of a job that writes `output`. They are JSON lines in `.<name>.fewbit-work`, next to the output.

    A context manager, during which no other process can work on the same output; leaving it by an exception keeps the lines for
    the next run. Lines of another job, and everything else that it left in the directory, are removed.

    Args:
        output: the path of the output.
        job: JSON that identifies the job: equal jobs take equal steps.

    Raises:
        QuantError: when another process is working on the output, or the directory cannot be written.
    """

    def __init__(self, output: str | os.PathLike[str], job: Mapping[str, Any]):
        output = pathlib.Path(output)
        self.path = output.with_name(f".{output.name}.fewbit-work")
        self.lines: list[dict[str, Any]] = []
        self._head = {"job": sha256(canonical(job))}
        self._lock: OutputLock | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = OutputLock(self.path)
            head, *lines = self._read() or [{}]
            if head != self._head:
                self.remove()
                self.path.mkdir()
                lines = []
            self.cut(lines)
        except OSError as error:
            raise self._error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with contextlib.suppress(OSError):
            if not self.lines and os.listdir(self.path) == [_FILE]:
                self.remove()
        self._lock.release()

    def note(self, line: Mapping[str, Any]) -> None:
        """Adds a line.

        Raises:
            QuantError: when the disk is full, or the directory cannot be written.
        """
        try:
            descriptor = os.open(self.path / _FILE, os.O_WRONLY | os.O_APPEND)
            try:
                write_all(descriptor, memoryview(_text(line)))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._error(error) from error
        self.lines.append(dict(line))

    def cut(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Keeps the first lines only: what the others say is not so any more."""
        self.lines = [dict(line) for line in lines]
        new = self.path / f"{_FILE}-new"
        new.write_bytes(b"".join(map(_text, (self._head, *self.lines))))
        new.rename(self.path / _FILE)

    def remove(self) -> None:
        """Removes the directory, when the output is complete."""
        with contextlib.suppress(OSError):
            (self.path / _FILE).unlink()  # first: without it nothing else is taken for finished
        shutil.rmtree(self.path, ignore_errors=True)
        self.lines = []

    def _read(self) -> list[dict[str, Any]]:
        """The lines in the file, up to one that a killed process wrote in part."""
        lines = []
        with contextlib.suppress(FileNotFoundError):
            for text in (self.path / _FILE).read_bytes().splitlines(keepends=True):
                with contextlib.suppress(ValueError):
                    line = json.loads(text[_DIGITS:])
                    if _text(line) == text:
                        lines.append(line)
                        continue
                break
        return lines

    def _error(self, error: OSError) -> QuantError:
        return QuantError(f"{self.path} cannot be written: {error.strerror or error}")


_DIGITS = 16


def _text(line: Mapping[str, Any]) -> bytes:
    """A line of the file: a checksum, then JSON.

    The checksum is the first digits of the SHA-256 of the JSON, whose keys are in order.
    """
    text = json.dumps(line, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    return f"{sha256(text)[:_DIGITS]}".encode() + text + b"\n"


@dataclasses.dataclass(frozen=True)
class Spooled:
    """An array in a spool file. It has a dtype, shape and SHA-256, the first byte and the size."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    begin: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Moved:
    """Where the content of a full spool file is. It is in bytes `begin` to `end` of another file, with their SHA-256."""

    file: str
    begin: int
    end: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Added:
    """Arrays that were added together, by name, and the writer's JSON about them."""

    entry: Mapping[str, Any]
    arrays: Mapping[str, Spooled]

    def to_json(self) -> dict[str, Any]:
        """The line of the journal."""
        arrays = {name: dataclasses.asdict(one) for name, one in self.arrays.items()}
        return {"added": dict(self.entry), "arrays": arrays}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Added":
        """Reads a line of the journal."""
        arrays = {name: Spooled(**{**one, "shape": tuple(one["shape"])}) for name, one in line["arrays"].items()}
        return cls(line["added"], arrays)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The content of one spool file in order, and its place. `moved` is None while it is in the spool file."""

    added: tuple[Added, ...] = ()
    moved: Moved | None = None

    @functools.cached_property
    def arrays(self) -> dict[str, Spooled]:
        """The arrays by name."""
        return {name: one for added in self.added for name, one in added.arrays.items()}

    @property
    def size(self) -> int:
        """The bytes of the spool file."""
        if not self.added:
            return 0
        last = list(self.added[-1].arrays.values())[-1]
        return last.begin + last.nbytes


class Spool:
    """Arrays on their way into the files of an output.

    Each array is appended to a spool file in the directory that is being written, so that none is kept in memory. A full spool
    file is copied into a file of the output and removed. With a journal each step is noted with the hash of its bytes: a later
    run knows what is whole, also after a power failure, without a flush for each array.

    Args:
        staged: the directory that is being written.
        journal: the journal of a job that can be resumed.
        alignment: what each array begins at a multiple of.

    Attributes:
        batch: the content of the spool file.
    """

    def __init__(self, staged: StagedDirectory, journal: Journal | None, alignment: int = 1):
        self._staged, self._journal, self._alignment = staged, journal, alignment
        self._count, self.batch = 0, Batch()

    def add(self, entry: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Appends arrays. `entry` is what the writer needs to know about them when it resumes."""
        start = end = self._aligned(self.batch.size)
        records, pieces = {}, []
        for name, array in arrays.items():
            data = array_bytes(array)
            gap = self._aligned(end) - end
            records[name] = Spooled(dtype_name(array.dtype, name), array.shape, sha256(data), end + gap, len(data))
            pieces += [bytes(gap), data]
            end += gap + len(data)
        self._staged.write_at(self._name, start, pieces, end - start)
        added = Added(entry, records)
        self._note(added.to_json())
        self.batch = Batch((*self.batch.added, added))

    def move(self, file: str, begin: int, head: bytes, names: Iterable[str]) -> Moved:
        """Copies the arrays of the spool file into another file.

        They follow a head at byte `begin`, in the order of `names`. Then the spool file is removed.

        Raises:
            QuantError: when the disk is full, or something reads back differently from what was added.
        """
        spool, arrays = self._staged.path / self._name, {name: self.batch.arrays[name] for name in names}
        gaps, size = [], 0
        for one in arrays.values():
            gaps.append(self._aligned(size) - size)
            size += gaps[-1] + one.nbytes
        end = begin + len(head) + size

        def pieces() -> Iterator[bytes]:
            yield head
            for gap, one in zip(gaps, arrays.values(), strict=True):
                yield bytes(gap)
                yield from file_chunks(spool, one.begin, one.nbytes)

        self._staged.write_at(file, begin, pieces(), end - begin)
        self._staged.flush(file)
        parts = {f"the header of {file}": (len(head), sha256(head))}
        for gap, (name, one) in zip(gaps, arrays.items(), strict=True):
            if gap:
                parts[f"the padding before tensor {name!r}"] = gap, sha256(bytes(gap))
            parts[f"tensor {name!r}"] = one.nbytes, one.sha256
        moved = Moved(file, begin, end, self._read_back(file, begin, parts))
        self._note({"moved": dataclasses.asdict(moved)})
        self.remove()
        self._count, self.batch = self._count + 1, Batch()
        return moved

    def _read_back(self, file: str, begin: int, parts: Mapping[str, tuple[int, str]]) -> str:
        """Compares parts of a file with their hashes, in one pass.

        Each part has a size and a hash. Returns the hash of all of them.
        """
        found, whole = part_hashes(self._staged.path / file, begin, [size for size, _ in parts.values()])
        for (name, (_, expected)), one in zip(parts.items(), found, strict=True):
            if one != expected:
                raise self._changed(name)
        return whole

    def restored(self) -> list[Batch]:
        """What an earlier run added that is whole on the disk. The last batch is that in the spool file.

        Everything else in the directory is removed.
        """
        if self._journal is None:
            return [self.batch]
        lines, batches, start = self._journal.lines, [], 0
        for index, line in enumerate(lines):
            if "moved" not in line:
                continue
            moved = Moved(**line["moved"])
            if range_sha256(self._staged.path / moved.file, moved.begin, moved.end - moved.begin) != moved.sha256:
                lines = lines[:start]
                break
            batches.append(Batch(tuple(Added.from_json(one) for one in lines[start:index] if "added" in one), moved))
            self._count, start = self._count + 1, index + 1
        spool = self._staged.path / self._name
        for index, line in enumerate(lines[start:], start):
            if "added" not in line:
                continue
            added = Added.from_json(line)
            if any(range_sha256(spool, one.begin, one.nbytes) != one.sha256 for one in added.arrays.values()):
                lines = lines[:index]
                break
            self.batch = Batch((*self.batch.added, added))
        self._journal.cut(lines)
        self._staged.is_kept = bool(batches or self.batch.added)
        self._remove_others([batch.moved for batch in batches if batch.moved is not None])
        return [*batches, self.batch]

    def array(self, name: str) -> np.ndarray:
        """An array of the spool file, mapped into memory."""
        one = self.batch.arrays[name]
        data = mapped(self._staged.path / self._name, one.begin, one.nbytes)
        return data.view(DTYPES[one.dtype]).reshape(one.shape)

    def remove(self) -> None:
        """Removes the spool file."""
        (self._staged.path / self._name).unlink()

    def _remove_others(self, moved: Iterable[Moved]) -> None:
        """Removes what no line of the journal names."""
        ends = {one.file: one.end for one in moved}
        if self.batch.added:
            ends[self._name] = self.batch.size
        for file in self._staged.path.iterdir():
            if file.is_dir():
                shutil.rmtree(file)
            elif file.name not in ends:
                file.unlink()
            else:
                os.truncate(file, ends[file.name])

    @property
    def _name(self) -> str:
        """The name of the spool file."""
        return f"spool-{self._count}"

    def _aligned(self, offset: int) -> int:
        return -(-offset // self._alignment) * self._alignment

    def _note(self, line: Mapping[str, Any]) -> None:
        if self._journal is not None:
            self._journal.note(line)
            self._staged.is_kept = True

    def _changed(self, what: str) -> QuantError:
        return QuantError(
            f"{self._staged.target}: {what} reads back differently from what was written; the disk may be failing"
        )

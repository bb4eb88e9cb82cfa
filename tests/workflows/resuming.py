"""Runs that die: jobs on small checkpoints for every target, and deaths at a chosen system call."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fewbit import workflows
from fewbit.io import atomic_directory as atomic
from fewbit.io.containers.writer import ContainerWriter
from fewbit.io.native.writer import DirectoryWriter
from fewbit.workflows.convert import targets
from fewbit.workflows.model import Model
from fewbit.workflows.tensors import Outcome

SHARD = 3_000
"""The largest file of tensors in these runs, in bytes."""


@contextlib.contextmanager
def small_shards() -> Iterator[None]:
    """Writers begin a file every `SHARD` bytes."""
    real = targets.DirectoryWriter, targets.ContainerWriter
    targets.DirectoryWriter = functools.partial(DirectoryWriter, max_shard_bytes=SHARD)
    targets.ContainerWriter = functools.partial(ContainerWriter, max_shard_bytes=SHARD)
    try:
        yield
    finally:
        targets.DirectoryWriter, targets.ContainerWriter = real


@dataclasses.dataclass(frozen=True)
class Job:
    """One call of `quantize`."""

    model: Model
    recipe: Any
    to: str

    def run(self, out: Path, **options: Any) -> Outcome:
        """Writes the output with small files."""
        plan = targets.fitted(self.to, self.model, workflows.plan_model(self.model, recipe=self.recipe))
        with small_shards():
            return workflows.quantize(self.model, plan, out, to=self.to, **options)


def content(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of all files of a directory; without what Orbax names by chance."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(files)}


class Died(BaseException):
    """The process is dead: nothing more reaches the disk."""


class Deaths:
    """Counts the system calls that change the disk, and raises `Died` at a chosen one and all after it."""

    NAMES = ("open", "write", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "ftruncate", "truncate")

    def __init__(self) -> None:
        self.count, self.at = 0, -1
        self._opened: set[int] = set()

    @contextlib.contextmanager
    def counted(self, at: int = -1) -> Iterator[None]:
        """Within the block the call numbered `at` and all later ones fail; the locks that a dead process had are released."""
        self.count, self.at, self._opened = 0, at, set()
        real = {name: getattr(os, name) for name in self.NAMES}
        exchange, close = atomic.exchange, os.close
        for name, fn in real.items():
            setattr(os, name, self._counted(fn))
        atomic.exchange = self._counted(exchange)
        os.close = lambda descriptor: (self._opened.discard(descriptor), close(descriptor))[1]
        try:
            yield
        finally:
            os.close, atomic.exchange = close, exchange
            for name, fn in real.items():
                setattr(os, name, fn)
            for descriptor in self._opened:
                close(descriptor)

    def _counted(self, fn: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if 0 <= self.at < self.count:
                raise Died
            found = fn(*args, **kwargs)
            if fn.__name__ == "open":
                self._opened.add(found)
            return found

        return called


def npz_model(path: Path, count: int = 6, rows: int = 16) -> Model:
    """A checkpoint of matrices and vectors."""
    draw = np.random.default_rng(0)
    arrays = {f"w{i}": draw.standard_normal((rows, 64)).astype(np.float32) for i in range(count)}
    np.savez(path, **arrays, norm=np.ones(64, np.float32))
    return workflows.load(path)

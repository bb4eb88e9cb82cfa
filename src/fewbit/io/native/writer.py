"""Writer of fewbit directories.

Tensors are added one at a time, files have a bounded size, and everything is read back before the directory is renamed.
"""

import functools
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ..._json import dumped, parsed_object
from ...array.qarray import QArray
from ...errors import QuantError
from ..checkpoint import Tensor
from ..journal import Journal
from ..output import check_output
from ..shards import Progress, ShardWriter, host_array
from ..staged_writer import AbstractWriter
from .manifest import CONFIG, FORMAT, MANIFEST, VERSION, FileRecord, Manifest, is_plain_name, read_manifest, sha256
from .reader import QUANT_METHOD, SECTION, read_directory, stored_records
from .records import Records, leaves, moved_record

_METADATA = {"format": FORMAT}
# Not "model": transformers would load model.safetensors, find none of its tensors, and return a random model.
STEM = "fewbit"


class DirectoryWriter(AbstractWriter):
    """Writes a model directory atomically, tensor by tensor.

    A context manager: leaving the block renames the directory to `path`; leaving it by an exception (also Ctrl-C) removes it,
    and an existing `path` stays unchanged. No tensor stays in memory. The same calls give the same bytes.

    Args:
        path: the directory to create; missing parents are created.
        config: the model's configuration, which becomes `config.json` with a section `quantization_config` added.
        files: tokenizer and other small files, by name.
        facts: JSON for the manifest: the recipe, the source's hash. Not the time: files should be reproducible.
        max_shard_bytes: the maximum size of one tensor file; a larger tensor gets its own.
        overwrite: whether a directory that fewbit wrote, with only the files of its manifest, may be replaced at the end.
        sources: files and directories that the tensors are read from, which the output must not be, contain or be inside of.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).
        journal: the journal of a job that can be resumed: an exception leaves the finished tensors for the next writer, whose
            `finished` names them.

    Raises:
        QuantError: when `check_output` refuses the path, another process is writing it, or the disk is full; for a config that
            has a section `quantization_config` already, or a file name that is taken or leads elsewhere.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model"
    >>> with DirectoryWriter(path, config={"model_type": "demo"}) as writer:
    ...     writer.add("up.weight", fb.quantize(jnp.ones((4, 64)), "nf4"))
    >>> read_directory(path).tensors["up.weight"]
    QArray(nf4, float32[4, 64], 144 bytes, 4.500 bits/weight)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        facts: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 2**30,
        overwrite: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
        journal: Journal | None = None,
    ):
        check = functools.partial(check_output, overwrite=overwrite, sources=tuple(sources))
        super().__init__(path, check, overwrite=overwrite, progress=progress, journal=journal)
        self._config, self._files, self._facts = dict(config or {}), dict(files or {}), dict(facts or {})
        _check_config(self._config, self._files)
        dumped(self._facts, "facts")
        if max_shard_bytes < 1:
            raise QuantError(f"max_shard_bytes is {max_shard_bytes}, must be at least 1")
        self._limit = max_shard_bytes
        self._records = Records()
        self._names: set[str] = set()

    @functools.cached_property
    def _shards(self) -> ShardWriter:
        """The writer of the tensor files."""
        return ShardWriter(self._staged, STEM, _METADATA, self._limit, self._progress, self._journal)

    def add(self, name: str, value: object) -> None:
        """Adds one tensor.

        Args:
            name: its name, unique.
            value: a QArray or an array, written now. With `fewbit.torch` imported also a tensor.

        Raises:
            QuantError: for a duplicate name, a dtype that safetensors lacks, or an inconsistent QArray.
        """
        self._check_open()
        value = storable(value, name)
        arrays = leaves(name, value) if isinstance(value, QArray) else {name: value}
        for leaf in (name, *arrays):
            if not leaf or leaf == "__metadata__" or leaf in self._names:
                raise QuantError(f"tensor name {leaf!r} is taken already, or reserved; choose another")
        stored = {leaf: host_array(array, leaf) for leaf, array in arrays.items()}
        entry: dict[str, Any] = {"name": name}
        if isinstance(value, QArray):
            entry["quantized"] = self._records.add(name, value)
        self._names |= {name, *stored}
        self._shards.add(stored, entry)
        self._progress("write", name, sum(array.nbytes for array in stored.values()))

    def _restore(self) -> list[str]:
        """Reads what an earlier writer of the job added."""
        found = {added.entry["name"]: added for added in self._shards.restored()}
        for name, added in found.items():
            self._names |= {name, *added.arrays}
            if "quantized" in added.entry:
                self._records.restore(name, added.entry["quantized"])
        return list(found)

    def add_directory(self, directory: pathlib.Path) -> None:
        """Adds the tensors of another fewbit directory. Its tensor files are linked, and must not change.

        Args:
            directory: the directory, whose hashes were checked.

        Raises:
            QuantError: for a duplicate name, or a directory that is damaged.
        """
        self._check_open()
        manifest, (forms, tables) = read_manifest(directory), stored_records(directory)
        for name in (*forms, *manifest.tensors):
            if name in self._names:
                raise QuantError(f"tensor name {name!r} of {directory} is taken already")
        self._names |= {*forms, *manifest.tensors}
        into = self._records.schemes, self._records.policies
        self._records.by_name |= {name: moved_record(form, tables, into) for name, form in forms.items()}
        for file in dict.fromkeys(entry.file for entry in manifest.tensors.values()):
            tensors = {name: entry for name, entry in manifest.tensors.items() if entry.file == file}
            self._shards.add_file(directory / file, manifest.files[file], tensors)

    def _finish(self) -> None:
        """Writes the last tensors, the config and the manifest, checks them all, and commits."""
        if not self._names:
            raise QuantError(f"{self.path} would have no tensors; add some before the end of the block")
        staged = self._staged
        written, tensors = self._shards.finish()
        records = self._records
        section = {"quant_method": QUANT_METHOD, "version": VERSION, **records.tables, "tensors": records.by_name}
        small = {CONFIG: dumped(self._config | {SECTION: section}, CONFIG), **self._files}
        files = written | {name: FileRecord(len(text), sha256(text)) for name, text in small.items()}
        small[MANIFEST] = Manifest(files, tensors, self._facts).text()
        for name, text in small.items():
            staged.write_verified(name, text)
        read_directory(staged.path)
        staged.commit()


@functools.singledispatch
def storable(value: object, name: str) -> Tensor:
    """Converts a value to an array or QArray; `fewbit.torch` registers its tensors."""
    if not isinstance(value, QArray | np.ndarray | np.generic | jax.Array):
        hint = ". fb.save writes any tree or module"
        if type(value).__module__.split(".")[0] == "torch":
            hint = "; import fewbit.torch first"
        raise QuantError(f"tensor {name!r} is a {type(value).__name__}; expected an array or a QArray{hint}")
    found: Any = value
    return found


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    facts: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> pathlib.Path:
    """Writes named tensors as a fewbit directory, atomically; `fb.save` writes trees.

    Args:
        path: the directory to be.
        tensors: arrays and QArrays by name, and with `fewbit.torch` imported tensors; they are read one at a time.
        config: as for `DirectoryWriter`.
        files: as for `DirectoryWriter`.
        facts: as for `DirectoryWriter`.
        max_shard_bytes: as for `DirectoryWriter`.
        overwrite: as for `DirectoryWriter`.
        progress: as for `DirectoryWriter`.

    Returns:
        The directory.

    Raises:
        QuantError: as `DirectoryWriter`, and for tensors that are a tree or a module.
    """
    if not isinstance(tensors, Mapping):
        raise QuantError(
            f"tensors is a {type(tensors).__name__}; io.write takes arrays and QArrays by name. fb.save writes any tree or module"
        )
    with DirectoryWriter(
        path,
        config=config,
        files=files,
        facts=facts,
        max_shard_bytes=max_shard_bytes,
        overwrite=overwrite,
        progress=progress,
    ) as writer:
        for name in tensors:
            writer.add(name, tensors[name])
    return writer.path


def _check_config(config: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
    if SECTION in config:
        raise QuantError(f"config already has a {SECTION!r}, which the writer adds; remove it")
    parsed_object(dumped(config, "config"), "config")
    for name, data in files.items():
        if not isinstance(data, bytes):
            raise QuantError(f"file {name!r} is a {type(data).__name__}; pass its content as bytes")
        if not is_plain_name(name) or name in (CONFIG, MANIFEST) or name.endswith(".safetensors"):
            raise QuantError(f"a file cannot be called {name!r}: a plain name that fewbit does not use itself is expected")

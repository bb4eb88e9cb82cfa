"""Writer of directories that other programs read."""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._json import dumped
from ...array.qarray import QArray
from ...errors import QuantError
from ...kernels.quantize.dispatch import dequantize
from ..checkpoint import Tensor, TensorInfo, Tensors
from ..journal import Journal
from ..native.manifest import CONFIG, MANIFEST, FileRecord, Manifest, is_plain_name, sha256
from ..output import check_output
from ..safetensors.reader import INDEX, SINGLE, read_safetensors_directory
from ..shards import Progress, ShardWriter, host_array
from ..staged_writer import AbstractWriter
from .container import AbstractContainer, Weight
from .encodings.stored import FLOATS, named_dtype
from .reader import with_weights


class ContainerWriter(AbstractWriter):
    """Writes a Hugging Face directory in a container's layout, atomically, tensor by tensor.

    A context manager like `DirectoryWriter`. Each quantized weight is decoded again from the arrays that are written, and
    refused unless it dequantizes to the same numbers. A `manifest.json` has the hash of every file: other programs ignore
    it; `verify` and a later `overwrite` need it.

    Args:
        path: the directory to create; missing parents are created.
        container: the layout.
        weights: every weight that will be added quantized.
        kept: the names of the tensors that will be added as arrays.
        config: the model's `config.json`.
        files: tokenizer and other small files, by name.
        facts: JSON for the manifest.
        max_shard_bytes: the maximum size of one tensor file; a larger weight gets its own.
        overwrite: whether a directory that fewbit wrote, with only the files of its manifest, may be replaced at the end.
        sources: files and directories that the tensors are read from.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).
        journal: the journal of a job that can be resumed, as for `DirectoryWriter`.

    Raises:
        QuantError: when `check_output` refuses the path, another process is writing it, or the disk is full.
        UnsupportedError: when the container cannot store a weight exactly; before anything is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        container: AbstractContainer,
        *,
        weights: Sequence[Weight],
        kept: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        facts: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 2**30,
        overwrite: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
        journal: Journal | None = None,
    ):
        container.check(weights)
        check = functools.partial(check_output, overwrite=overwrite, sources=tuple(sources))
        super().__init__(path, check, overwrite=overwrite, progress=progress, journal=journal)
        self._container, self._facts = container, dict(facts or {})
        self._weights = {weight.name: weight for weight in weights}
        self._added = container.files(weights, kept, config or {})
        self._config = {**_with_dtype(config or {}, weights), **self._added.config}
        self._files = {**(files or {}), **self._added.small}
        _check_files(self._files)
        dumped(self._config, CONFIG)
        self._limit = max_shard_bytes
        self._names: set[str] = set()
        self._missing = set(self._weights)
        self._nbytes = 0

    @functools.cached_property
    def _shards(self) -> ShardWriter:
        """The writer of the tensor files."""
        return ShardWriter(self._staged, "model", self._added.metadata, self._limit, self._progress, self._journal)

    def add(self, name: str, value: Tensor) -> None:
        """Adds one tensor: a QArray for a weight that was announced, else an array.

        Raises:
            QuantError: for a duplicate name, a QArray that was not announced or an array that was, and a QArray whose
                dequantized values the container does not give back.
        """
        self._check_open()
        if isinstance(value, QArray):
            arrays = self._encoded(name, value)
        elif name in self._weights:
            raise QuantError(f"tensor {name!r} is an array, but a weight in {self._weights[name].scheme.name} was announced")
        else:
            arrays = {name: value}
        stored = {leaf: host_array(array, leaf) for leaf, array in arrays.items()}
        if taken := self._names & set(stored):
            raise QuantError(f"tensor name {min(taken)!r} is taken already; choose another")
        nbytes = sum(array.nbytes for array in stored.values())
        self._shards.add(stored, {"name": name})
        self._record(name, stored, nbytes)
        self._progress("write", name, nbytes)

    def _record(self, name: str, leaf_names: Iterable[str], nbytes: int) -> None:
        """Records that a tensor was added."""
        self._names |= set(leaf_names)
        self._missing.discard(name)
        self._nbytes += nbytes

    def _restore(self) -> list[str]:
        """Reads what an earlier writer of the job added."""
        found = {added.entry["name"]: added.arrays for added in self._shards.restored()}
        for name, arrays in found.items():
            self._record(name, arrays, sum(one.nbytes for one in arrays.values()))
        return list(found)

    def _encoded(self, name: str, q: QArray) -> Mapping[str, np.ndarray]:
        """The arrays of a weight, decoded again and compared."""
        weight = self._weights.get(name)
        if weight is None or (weight.scheme, weight.shape) != (q.scheme, q.shape):
            raise QuantError(f"tensor {name!r} is {q!r}, which was not announced")
        arrays = self._container.encoded(weight, q)
        info = {name: TensorInfo(a.shape, a.dtype.name, a.dtype.name, a.nbytes) for name, a in arrays.items()}
        # The metadata of this weight alone: to read that of all again for each would take time quadratic in their number.
        metadata = self._container.files([weight], (), self._config).metadata
        stored = Tensors(info, arrays.__getitem__, metadata)
        again = self._container.decoded(self._config, stored, str(self.path))[weight.name]
        if not np.array_equal(_values(again, q.dtype), _values(q, q.dtype), equal_nan=True):
            raise QuantError(
                f"{self.path}: {weight.name!r} in scheme {weight.scheme.name} would not dequantize to the same numbers in "
                f"{self._container.name}; nothing was written"
            )
        return arrays

    def _finish(self) -> None:
        """Writes the last tensors and the small files, opens the directory once, and commits."""
        if self._missing:
            raise QuantError(f"{self.path}: the weight {min(self._missing)!r} was announced, but not added")
        files, tensors = self._shards.finish()
        small = {CONFIG: dumped(self._config, CONFIG), **self._files}
        if list(files) != [SINGLE]:
            index = {
                "metadata": {"total_size": self._nbytes},
                "weight_map": {name: entry.file for name, entry in tensors.items()},
            }
            small[INDEX] = dumped(index, INDEX)
        records = files | {name: FileRecord(len(text), sha256(text)) for name, text in small.items()}
        small[MANIFEST] = Manifest(records, tensors, self._facts, self._container.name).text()
        for name, text in small.items():
            self._staged.write_verified(name, text)
        with_weights(read_safetensors_directory(self._staged.path))
        self._staged.commit()


def _values(value: Tensor, dtype: np.dtype) -> np.ndarray:
    """The dequantized values in the dtype of the weight."""
    assert isinstance(value, QArray)
    return np.asarray(dequantize(value, dtype)).astype(np.float32)


def _with_dtype(config: Mapping[str, Any], weights: Iterable[Weight]) -> dict[str, Any]:
    """The `config.json` with the dtype of the weights, if it names none: readers would take their own and round to it."""
    dtypes = [weight.dtype for weight in weights if weight.dtype in FLOATS]
    if not dtypes or named_dtype(config) is not None:
        return dict(config)
    return {**config, "torch_dtype": max(dtypes, key=dtypes.count)}


def _check_files(files: Mapping[str, bytes]) -> None:
    for name in files:
        if not is_plain_name(name) or name in (CONFIG, MANIFEST, INDEX) or name.endswith(".safetensors"):
            raise QuantError(f"a file cannot be called {name!r}: a plain name that the directory does not use is expected")

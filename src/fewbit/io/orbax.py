"""Orbax checkpoints: trees of arrays, with quantized weights as their components.

`OrbaxWriter` writes a directory with `params/`, which Orbax restores as nested dicts, `config.json` and other small files, and
`fewbit.json`: the scheme of each weight, the name of each tensor, and the hash of each file.
"""

import errno
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import jax
import msgspec
import numpy as np

from .._json import converted, dumped, file_text, parsed_object
from ..array.qarray import QArray
from ..errors import QuantError, UnsupportedError
from .checkpoint import Checkpoint, Tensor, TensorInfo, Tensors
from .files import content, file_sha256
from .journal import Journal, Spool
from .native.manifest import CONFIG, is_plain_name
from .native.records import Records, checked_record, leaf_names, leaves, qarray, weight_info
from .native.writer import storable
from .output import OutputKind, check_output
from .shards import Progress, host_array
from .staged_writer import AbstractWriter

TREE = "params"
RECORDS = "fewbit.json"
_FORMAT = "fewbit orbax"
_ALIGNMENT = 16
_MARKS = ("_CHECKPOINT_METADATA", "_METADATA")


class _Records(msgspec.Struct):
    """JSON schema of `fewbit.json`."""

    format: str
    facts: dict[str, Any]
    schemes: list[Any]
    policies: list[Any]
    weights: dict[str, Any]
    names: dict[str, str]
    files: dict[str, str]


class OrbaxWriter(AbstractWriter):
    """Writes a directory that Orbax restores, atomically. A context manager like `DirectoryWriter`.

    Orbax writes a whole tree: until the end the tensors are in temporary files, from which it then copies them.

    Args:
        path: the directory to create; missing parents are created.
        config: the model's `config.json`.
        files: tokenizer and other small files, by name.
        facts: JSON for `fewbit.json`.
        overwrite: whether a directory that this class wrote, with only its files, may be replaced at the end.
        sources: files and directories that the tensors are read from.
        progress: called with ("write" or "verify", name of the tensor, its size).
        journal: the journal of a job that can be resumed, as for `DirectoryWriter`; Orbax's own part of the work starts again.

    Raises:
        QuantError: when `check_output` refuses the path, orbax-checkpoint is not installed, or writing fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        facts: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
        journal: Journal | None = None,
    ):
        _package(pathlib.Path(path))
        check = functools.partial(check_output, overwrite=overwrite, sources=tuple(sources), kind=ORBAX)
        super().__init__(path, check, overwrite=overwrite, progress=progress, journal=journal)
        self._small = {CONFIG: dumped(dict(config or {}), CONFIG), **(files or {})}
        for name in self._small:
            if not is_plain_name(name) or name in (TREE, RECORDS):
                raise QuantError(
                    f"a file cannot be called {name!r}: a plain name that the directory does not use is expected"
                )
        self._facts = dict(facts or {})
        self._records = Records()
        self._places: set[str] = set()
        self._parents: set[str] = set()

    @functools.cached_property
    def _spool(self) -> Spool:
        """The tensors, until all are there."""
        return Spool(self._staged, self._journal, _ALIGNMENT)

    def add(self, name: str, value: Tensor) -> None:
        """Adds one tensor.

        Raises:
            QuantError: for an array of no elements, and a name that is empty, taken, or below or above another in the tree.
        """
        self._check_open()
        value = storable(value, name)
        if not value.size or not _parts(name):
            raise QuantError(
                f"tensor {name!r} of shape {value.shape} cannot be stored: Orbax needs a name and one or more elements"
            )
        arrays = leaves(name, value) if isinstance(value, QArray) else {name: value}
        self._check_places(arrays)
        stored = {leaf: host_array(array, leaf) for leaf, array in arrays.items()}
        entry: dict[str, Any] = {"name": name}
        if isinstance(value, QArray):
            entry["quantized"] = self._records.add(name, value)
        self._take_places(stored)
        self._spool.add(entry, stored)
        self._progress("write", name, sum(array.nbytes for array in stored.values()))

    def _check_places(self, leaves: Iterable[str]) -> None:
        """Refuses a tensor that has no place of its own in the tree."""
        for leaf in leaves:
            place = _joined(leaf)
            if place in self._places:
                raise QuantError(
                    f"tensor name {leaf!r} is taken already (dots and slashes are the same in a tree); choose another"
                )
            if place in self._parents:
                raise QuantError(f"tensor {leaf!r} is above another tensor, which a tree of arrays cannot have")
            if not self._places.isdisjoint(_parents(place)):
                raise QuantError(f"tensor {leaf!r} is below another tensor, which a tree of arrays cannot have")

    def _take_places(self, leaves: Iterable[str]) -> None:
        """Records the places of tensors in the tree."""
        for place in map(_joined, leaves):
            self._places.add(place)
            self._parents.update(_parents(place))

    def _restore(self) -> list[str]:
        """Reads what an earlier writer of the job added."""
        found = {added.entry["name"]: added for added in self._spool.restored()[-1].added}
        for name, added in found.items():
            self._take_places(added.arrays)
            if "quantized" in added.entry:
                self._records.restore(name, added.entry["quantized"])
        return list(found)

    def _finish(self) -> None:
        """Writes the tree, reads it back, and commits."""
        staged, spooled = self._staged, self._spool.batch.arrays
        names = {_joined(leaf): leaf for leaf in spooled}
        if not names:
            raise QuantError(f"{self.path} would have no tensors; add some before the end of the block")
        checkpointer = _package(self.path).StandardCheckpointer()
        if shutil.disk_usage(staged.path).free < self._nbytes():  # its threads go on after an error, and print tracebacks
            raise staged.write_error(self._nbytes(), OSError(errno.ENOSPC, ""))
        try:
            with checkpointer:
                checkpointer.save(staged.path / TREE, _nested({leaf: self._spool.array(leaf) for leaf in spooled}))
        except Exception as error:
            # Of any type: a full disk is a ValueError of tensorstore inside a RuntimeError of asyncio.
            raise self._save_error(error) from error
        stored = _leaves_by_path(_restored(staged.path / TREE))
        for key, leaf in names.items():
            if key not in stored or not np.array_equal(_bytes(stored[key]), _bytes(self._spool.array(leaf))):
                raise QuantError(f"{self.path}: tensor {leaf!r} reads back differently from what was written")
            self._progress("verify", leaf, spooled[leaf].nbytes)
        for name, text in self._small.items():
            staged.write_verified(name, text)
        self._spool.remove()
        form = {
            "format": _FORMAT,
            "facts": self._facts,
            **self._records.tables,
            "weights": self._records.by_name,
            "names": names,
            "files": {name: file_sha256(staged.path / name) for name in _all_files(staged.path)},
        }
        staged.write_verified(RECORDS, dumped(form, RECORDS))
        staged.commit()

    def _nbytes(self) -> int:
        """The bytes of the tree; compressed it may be smaller."""
        return sum(array.nbytes for array in self._spool.batch.arrays.values())

    def _save_error(self, error: BaseException) -> QuantError:
        """The error for a tree that Orbax could not write."""
        causes = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        if any(re.search("RESOURCE_EXHAUSTED|No space left|quota exceeded", str(one)) for one in causes):
            return self._staged.write_error(self._nbytes(), OSError(errno.ENOSPC, ""))
        return QuantError(
            f"{self.path}: Orbax cannot write the tree: {next(iter(str(causes[-1]).splitlines()), type(causes[-1]).__name__)}"
        )


def is_orbax_directory(path: pathlib.Path) -> bool:
    """Whether a directory is an Orbax checkpoint, or one that `OrbaxWriter` wrote."""
    return (path / RECORDS).is_file() or any((path / mark).is_file() for mark in _MARKS)


def read_orbax(path: pathlib.Path) -> Checkpoint:
    """Opens an Orbax checkpoint. The tree is restored at once, when the first tensor is loaded.

    A directory of `OrbaxWriter` gives the tensors under their names, with weights as QArrays, after its files are compared
    with their hashes. Any other checkpoint of one tree gives its arrays under their paths, `layers/0/kernel`.

    Raises:
        QuantError: when orbax-checkpoint is not installed, or the checkpoint is damaged or not one tree of arrays.
    """
    if not (path / RECORDS).is_file():
        found = _tree_tensors(path)
        return Checkpoint(path, "orbax", found, {})
    where = str(path / RECORDS)
    records = converted(parsed_object(file_text(path / RECORDS, "records"), where), _Records, where)
    if records.format != _FORMAT:
        raise QuantError(f"{where} has the format {records.format!r}, expected {_FORMAT!r}")
    _check_hashes(path, records.files)
    stored = _tree_tensors(path / TREE)
    keys = {leaf: key for key, leaf in records.names.items()}
    forms = {n: checked_record(f, records.schemes, records.policies, f"{where}, {n!r}") for n, f in records.weights.items()}
    owner = {leaf: name for name, form in forms.items() for leaf in leaf_names(name, form)}
    if absent := [leaf for leaf in (*owner, *keys) if keys.get(leaf) not in stored]:
        raise QuantError(f"{path}: tensor {absent[0]!r} is missing")

    def leaf(name: str) -> np.ndarray:
        return np.asarray(stored[keys[name]])

    def load(name: str) -> np.ndarray | QArray:
        return qarray(name, forms[name], leaf) if name in forms else leaf(name)

    plain = {leaf: stored.info[key] for leaf, key in keys.items()}
    names = dict.fromkeys(owner.get(leaf, leaf) for leaf in keys)
    info = {name: weight_info(name, forms[name], plain) if name in forms else plain[name] for name in names}
    small = {name: content(path / name) for name in records.files if "/" not in name}
    config = parsed_object(small.pop(CONFIG, b"{}"), str(path / CONFIG))
    return Checkpoint(path, "orbax", Tensors(info, load), config, small, dict(records.facts))


def _package(path: pathlib.Path) -> ModuleType:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise QuantError(
            f"{path} is an Orbax checkpoint, which needs orbax-checkpoint: pip install fewbit[orbax]"
        ) from error
    return orbax.checkpoint


def _restored(path: pathlib.Path) -> Any:
    """The whole tree as numpy arrays."""
    import numpy

    package = _package(path)
    handler = package.PyTreeCheckpointHandler()
    try:
        with package.Checkpointer(handler) as checkpointer:
            tree = checkpointer.metadata(path.absolute()).item_metadata.tree
            kinds = jax.tree.map(lambda leaf: package.RestoreArgs(restore_type=numpy.ndarray), tree)
            return checkpointer.restore(path.absolute(), args=package.args.PyTreeRestore(restore_args=kinds))
    except (ValueError, KeyError, OSError, TypeError, AttributeError, RuntimeError) as error:
        raise QuantError(f"{path} cannot be restored by Orbax: {str(error).splitlines()[0]:.300}") from error


def _tree_tensors(path: pathlib.Path) -> Tensors:
    """The arrays of a checkpoint of one tree, by their paths. All are restored when the first is loaded."""
    package = _package(path)
    try:
        with package.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path.absolute()).item_metadata  # Orbax takes no relative paths
            tree = getattr(found, "tree", None)
    except (ValueError, KeyError, OSError, TypeError, AttributeError, RuntimeError) as error:
        raise QuantError(f"{path} is not an Orbax checkpoint of one tree: {str(error).splitlines()[0]:.300}") from error
    if tree is None:
        items = sorted(item.name for item in path.iterdir() if (item / "_METADATA").exists())
        advice = f"; pass one of its items, such as {path / items[0]}" if items else ""
        raise QuantError(f"{path} is not an Orbax checkpoint of one tree{advice}")
    info = {}
    for key, leaf in _leaves_by_path(tree).items():
        if not hasattr(leaf, "dtype"):
            raise UnsupportedError(f"{path}: {key!r} is {type(leaf).__name__}, not an array; save the arrays alone")
        dtype = np.dtype(leaf.dtype)
        nbytes = int(np.prod(leaf.shape, dtype=np.int64)) * dtype.itemsize
        info[key] = TensorInfo(tuple(leaf.shape), dtype.name, dtype.name, nbytes)
    arrays = functools.cache(lambda: _leaves_by_path(_restored(path)))
    return Tensors(info, lambda name: np.asarray(arrays()[name]))


def _leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, with `/` between keys."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in found:
            raise QuantError(f"two leaves of the tree have the path {name!r}")
        found[name] = leaf
    return found


def _joined(name: str) -> str:
    """The path of a tensor in the tree: its name, with `/` between parts."""
    return "/".join(_parts(name))


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[./]", name) if part]


def _parents(place: str) -> list[str]:
    """The paths above a path in the tree."""
    words = place.split("/")
    return ["/".join(words[:i]) for i in range(1, len(words))]


def _nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Nested dicts by the parts of names."""
    root: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = _parts(name)
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = array
    return root


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, and of its shape and dtype."""
    head = np.frombuffer(f"{array.dtype}{array.shape}".encode(), np.uint8)
    return np.concatenate([head, np.ascontiguousarray(array).reshape(-1).view(np.uint8)])


def _all_files(directory: pathlib.Path) -> list[str]:
    """The relative paths of all files of a directory."""
    return sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if not file.is_dir())


def _check_hashes(path: pathlib.Path, files: Mapping[str, str]) -> None:
    """Compares every file with its hash."""
    for name, expected in files.items():
        file = path / name
        if not file.resolve().is_relative_to(path.resolve()) or not file.is_file():
            raise QuantError(f"{file} is missing; copy the whole directory again")
        if file_sha256(file) != expected:
            raise QuantError(f"{file} was changed since it was written (its SHA-256 differs); copy the file again")


def _foreign_files(directory: pathlib.Path) -> list[str]:
    """The names in a directory that `OrbaxWriter` wrote which are not its files."""
    where = str(directory / RECORDS)
    if not (directory / RECORDS).is_file():
        raise QuantError(f"it has no {RECORDS}")
    records = converted(parsed_object(file_text(directory / RECORDS, "records"), where), _Records, where)
    return [name for name in _all_files(directory) if name not in records.files and name != RECORDS]


ORBAX = OutputKind(_foreign_files, refusal="was not written by fewbit as an Orbax checkpoint")
"""A directory that `OrbaxWriter` wrote, whose records list its every file."""

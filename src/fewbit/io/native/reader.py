"""Reader of fewbit directories, with hashes checked."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ..._json import converted, parsed_object
from ...array.qarray import QArray
from ...errors import QuantError
from ..checkpoint import Checkpoint, Tensors
from ..files import content
from ..safetensors.file import StoredTensor, array_bytes, read_file
from ..safetensors.reader import tensors_of
from .manifest import CONFIG, FORMAT, MANIFEST, Manifest, read_manifest, sha256
from .records import checked_record, leaf_names, qarray, weight_info

SECTION = "quantization_config"
QUANT_METHOD = "fewbit"


class _Section(msgspec.Struct):
    """JSON schema of the section of `config.json`."""

    schemes: list[Any]
    policies: list[Any]
    tensors: dict[str, Any]


def is_fewbit_directory(path: str | os.PathLike[str]) -> bool:
    """True for a directory whose manifest, config or tensor header names fewbit.

    One is enough, so that a directory with one damaged file is reported as damaged and not read as another kind.

    Args:
        path: any path; False where there is no directory.

    Returns:
        Whether one of the three says so.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return False
    return (
        _says(path / MANIFEST, lambda form: form.get("format") == FORMAT and not form.get("container"))
        or _says(path / CONFIG, lambda form: _method(form) == QUANT_METHOD)
        or any(_is_ours(file) for file in sorted(path.glob("*.safetensors"))[:1])
    )


def read_directory(path: pathlib.Path) -> Checkpoint:
    """Opens a directory that fewbit wrote.

    The small files and the headers of tensor files are checked here; the bytes of each tensor when it is loaded.

    Raises:
        QuantError: when a file is missing or was changed, or the parts contradict each other.
    """
    manifest = read_manifest(path)
    small = checked_files(path, manifest)
    stored = stored_tensors(path, manifest)
    config = parsed_object(small.pop(CONFIG, b"{}"), str(path / CONFIG))
    records = _records(config.pop(SECTION, None), path)
    owner = {leaf: name for name, form in records.items() for leaf in leaf_names(name, form)}
    if absent := [leaf for leaf in owner if leaf not in stored]:
        raise QuantError(f"{path}: tensor {absent[0]!r} is missing from its files")
    names = dict.fromkeys(owner.get(leaf, leaf) for leaf in stored)

    def leaf(name: str) -> np.ndarray:
        return checked_array(path, manifest, name, stored[name])

    def load(name: str) -> np.ndarray | QArray:
        if name in records:
            return qarray(name, records[name], leaf)
        return leaf(name)

    plain = tensors_of(stored, {}).info
    info = {name: weight_info(name, records[name], plain) if name in records else plain[name] for name in names}
    return Checkpoint(path, "fewbit", Tensors(info, load), config, small, dict(manifest.facts))


def _says(path: pathlib.Path, says: Callable[[dict[str, Any]], bool]) -> bool:
    """`says` of a JSON file; False for a missing or damaged file."""
    try:
        return path.is_file() and says(parsed_object(content(path), str(path)))
    except QuantError:
        return False


def _method(config: dict[str, Any]) -> object:
    """The `quant_method` of a `config.json`."""
    match config.get(SECTION):
        case {"quant_method": method}:
            return method
    return None


def _is_ours(path: pathlib.Path) -> bool:
    """True if the header of a tensor file says that fewbit wrote it."""
    try:
        return read_file(path)[1].get("format") == FORMAT
    except QuantError:
        return False


def checked_array(path: pathlib.Path, manifest: Manifest, name: str, entry: StoredTensor) -> np.ndarray:
    """A stored array, its bytes compared with the hash of the manifest."""
    array = entry.array()
    if sha256(array_bytes(array)) != manifest.tensors[name].sha256:
        file = path / manifest.tensors[name].file
        raise QuantError(f"{file}: the bytes of tensor {name!r} were changed since they were written; copy the file again")
    return array


def checked_files(path: pathlib.Path, manifest: Manifest) -> dict[str, bytes]:
    """The small files, checked by hash; tensor files are checked by size only."""
    shards = {entry.file for entry in manifest.tensors.values()}
    result = {}
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise QuantError(f"{file} is missing; copy the whole directory again")
        if file.stat().st_size != entry.size:
            raise QuantError(f"{file} has {file.stat().st_size} bytes, but {entry.size} were written; copy the file again")
        if name not in shards:
            result[name] = content(file)
            if sha256(result[name]) != entry.sha256:
                raise QuantError(f"{file} was changed since it was written (its SHA-256 differs); copy the file again")
    return result


def stored_tensors(path: pathlib.Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The stored tensors in the order of the manifest, checked against it."""
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(entry.file for entry in manifest.tensors.values()):
        tensors, _ = read_file(path / file)
        for name, tensor in tensors.items():
            entry = manifest.tensors.get(name)
            if entry is None or (entry.file, entry.dtype, entry.shape) != (file, tensor.dtype, tensor.shape):
                raise QuantError(
                    f"{path / file}: tensor {name!r} ({tensor.dtype} {tensor.shape}) does not match the manifest"
                )
        found |= tensors
    if absent := [name for name in manifest.tensors if name not in found]:
        raise QuantError(f"{path}: tensor {absent[0]!r} of the manifest is missing from {manifest.tensors[absent[0]].file}")
    return {name: found[name] for name in manifest.tensors}


def stored_records(path: pathlib.Path) -> tuple[dict[str, Any], tuple[list[Any], list[Any]]]:
    """The records of a directory's quantized tensors, as stored.

    With them come the directory's tables of schemes and of policies.
    """
    config = parsed_object(content(path / CONFIG), str(path / CONFIG))
    found = converted(config.get(SECTION), _Section, f"{path / CONFIG}, section {SECTION!r}")
    return found.tensors, (found.schemes, found.policies)


def _records(section: object, path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The records of the quantized tensors, by name."""
    where = f"{path / CONFIG}, section {SECTION!r}"
    if not isinstance(section, dict) or section.get("quant_method") != QUANT_METHOD:
        raise QuantError(f"{path / CONFIG} has no {SECTION!r} of fewbit, though the manifest is of format {FORMAT!r}")
    found = converted(section, _Section, where)
    return {
        name: checked_record(form, found.schemes, found.policies, f"{where}, tensor {name!r}")
        for name, form in found.tensors.items()
    }

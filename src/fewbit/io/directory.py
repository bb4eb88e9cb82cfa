"""Reads a directory that fewbit wrote; whatever is loaded is checked against the manifest's hashes first."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from .._json import converted, parsed_object
from ..array import QArray
from ..errors import QuantError
from .checkpoint import Checkpoint, TensorInfo, Tensors
from .manifest import FORMAT, MANIFEST, Manifest, read_manifest, sha256
from .mapped import content
from .records import checked_record, leaf_names, qarray
from .safetensors_file import DTYPES, StoredTensor, read_file

CONFIG = "config.json"
SECTION = "quantization_config"
QUANT_METHOD = "fewbit"


class _Section(msgspec.Struct):
    """The JSON schema of our section of `config.json`."""

    schemes: list[Any]
    policies: list[Any]
    tensors: dict[str, Any]


def is_fewbit_directory(path: str | os.PathLike[str]) -> bool:
    """Whether fewbit wrote a directory: its manifest, its config or the header of its tensors says so.

    One of them is enough, so that a directory with one damaged file is reported as damaged, and not read as another
    kind. What may be replaced is decided by `check_output`, which wants the manifest.

    Args:
        path: any path; where there is no directory the answer is no.

    Returns:
        Whether one of the three says so.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        return False
    return (
        _says(path / MANIFEST, lambda form: form.get("format") == FORMAT)
        or _says(path / CONFIG, lambda form: _method(form) == QUANT_METHOD)
        or any(_is_ours(file) for file in sorted(path.glob("*.safetensors"))[:1])
    )


def read_directory(path: pathlib.Path) -> Checkpoint:
    """Opens a directory that fewbit wrote.

    The manifest, `config.json`, the tokenizer files and the headers of the tensor files are checked at once; the bytes
    of each tensor when it is loaded.

    Raises:
        QuantError: when a file is missing or was changed, or the parts contradict each other.
    """
    manifest = read_manifest(path)
    small = _checked_files(path, manifest)
    stored = _stored_tensors(path, manifest)
    config = parsed_object(small.pop(CONFIG, b"{}"), str(path / CONFIG))
    records = _records(config.pop(SECTION, None), path)
    owner = {leaf: name for name, form in records.items() for leaf in leaf_names(name, form)}
    if absent := [leaf for leaf in owner if leaf not in stored]:
        raise QuantError(f"{path}: tensor {absent[0]!r} is missing from its files")
    names = dict.fromkeys(owner.get(leaf, leaf) for leaf in stored)

    def leaf(name: str) -> np.ndarray:
        entry = stored[name]
        if sha256(entry.data) != manifest.tensors[name].sha256:
            file = path / manifest.tensors[name].file
            raise QuantError(
                f"{file}: the bytes of tensor {name!r} were changed since they were written; copy the file again"
            )
        return entry.array()

    def load(name: str) -> np.ndarray | QArray:
        return qarray(name, records[name], leaf) if name in records else leaf(name)

    info = {name: _info(name, records.get(name), stored) for name in names}
    return Checkpoint(path, "fewbit", Tensors(info, load), config, small, dict(manifest.facts))


def _says(path: pathlib.Path, says: Callable[[dict[str, Any]], bool]) -> bool:
    """What a JSON file says of itself; a file that is missing or damaged says nothing."""
    try:
        return path.is_file() and says(parsed_object(content(path), str(path)))
    except QuantError:
        return False


def _method(config: dict[str, Any]) -> Any:
    """The `quant_method` of a `config.json`."""
    section = config.get(SECTION)
    return section.get("quant_method") if isinstance(section, dict) else None


def _is_ours(path: pathlib.Path) -> bool:
    """Whether the header of a file of tensors says that fewbit wrote it."""
    try:
        return read_file(path)[1].get("format") == FORMAT
    except QuantError:
        return False


def _checked_files(path: pathlib.Path, manifest: Manifest) -> dict[str, bytes]:
    """The bytes of the small files, which fit their hashes; of the tensor files only the size is checked."""
    shards = {entry.file for entry in manifest.tensors.values()}
    result = {}
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise QuantError(f"{file} is missing; copy the directory again, whole")
        if file.stat().st_size != entry.size:
            raise QuantError(f"{file} has {file.stat().st_size} bytes, but {entry.size} were written; copy the file again")
        if name not in shards:
            result[name] = content(file)
            if sha256(result[name]) != entry.sha256:
                raise QuantError(f"{file} was changed since it was written (its SHA-256 differs); copy the file again")
    return result


def _stored_tensors(path: pathlib.Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """The stored tensors of all files in the order of the manifest, each as the manifest says."""
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(entry.file for entry in manifest.tensors.values()):
        tensors, _ = read_file(path / file)
        for name, tensor in tensors.items():
            entry = manifest.tensors.get(name)
            if entry is None or (entry.file, entry.dtype, entry.shape) != (file, tensor.dtype, tensor.shape):
                raise QuantError(
                    f"{path / file}: tensor {name!r} ({tensor.dtype} {tensor.shape}) is not as the manifest says"
                )
        found |= tensors
    if absent := [name for name in manifest.tensors if name not in found]:
        raise QuantError(f"{path}: tensor {absent[0]!r} of the manifest is missing from {manifest.tensors[absent[0]].file}")
    return {name: found[name] for name in manifest.tensors}


def _records(section: Any, path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The records of the quantized tensors, by name."""
    where = f"{path / CONFIG}, section {SECTION!r}"
    if not isinstance(section, dict) or section.get("quant_method") != QUANT_METHOD:
        raise QuantError(f"{path / CONFIG} has no {SECTION!r} of fewbit, though the manifest is of format {FORMAT!r}")
    found = converted(section, _Section, where)
    return {
        name: checked_record(form, found.schemes, found.policies, f"{where}, tensor {name!r}")
        for name, form in found.tensors.items()
    }


def _info(name: str, form: dict[str, Any] | None, stored: dict[str, StoredTensor]) -> TensorInfo:
    if form is None:
        tensor = stored[name]
        return TensorInfo(tensor.shape, DTYPES[tensor.dtype].name, tensor.dtype, tensor.data.size)
    names = leaf_names(name, form)
    scheme, shape = form["scheme"], list(stored[f"{name}.codes"].shape)
    if len(shape) < -scheme.pack_axis:
        raise QuantError(f"tensor {name!r} has codes of shape {tuple(shape)}, which its scheme {scheme.name} does not fit")
    shape[scheme.pack_axis] = shape[scheme.pack_axis] * 8 // scheme.format.bits - form["slack"]
    nbytes = sum(stored[leaf].data.size for leaf in names)
    return TensorInfo(tuple(shape), form["dtype"].name, scheme.name, nbytes, scheme)

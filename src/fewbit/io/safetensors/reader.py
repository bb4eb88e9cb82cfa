"""Reader of Hugging Face safetensors files and directories."""

import fnmatch
import pathlib
from collections.abc import Mapping

import msgspec
import numpy as np

from ..._json import converted, file_text, parsed_object
from ...errors import QuantError
from ..checkpoint import Checkpoint, TensorInfo, Tensors
from ..files import content
from ..native.manifest import CONFIG, FORMAT, is_plain_name
from .file import DTYPES, StoredTensor, read_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Tokenizers, chat templates, generation config, image and audio processors, licences: patterns of lower-case names.
_SIDE_FILES = (
    "tokenizer*.json",
    "tokenizer*.model*",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.jinja",
    "chat_template.json",
    "generation_config.json",
    "*processor_config.json",
    "licen[cs]e*",
    "notice*",
    "copying*",
    "use_policy*",
)
_CHAT_TEMPLATES = "additional_chat_templates"


class _Index(msgspec.Struct):
    """JSON schema of an index, from tensor names to file names."""

    weight_map: dict[str, str]


def read_safetensors_file(path: pathlib.Path) -> Checkpoint:
    """Opens one safetensors file; its metadata is the `__metadata__` of its header.

    Raises:
        QuantError: when the file is damaged, or is one file of a fewbit directory.
    """
    tensors, metadata = read_file(path)
    if metadata.get("format") == FORMAT:
        raise QuantError(f"{path} is part of a directory that fewbit wrote; pass the directory {path.parent}")
    return Checkpoint(path, "safetensors", tensors_of(tensors, metadata), dict(metadata))


def tagged(constant: str) -> dict[str, str]:
    """Infinity or NaN of a `config.json` as JSON: transformers 4 writes the constant, transformers 5 this object."""
    return {"__float__": constant}


def read_safetensors_directory(path: pathlib.Path) -> Checkpoint:
    """Opens a directory with one safetensors file, or several and an index.

    As in transformers, `model.safetensors` comes first: an index that does not name it is left over from an earlier save.
    `config.json` becomes the metadata; tokenizer, chat template, generation, processor and licence files are kept as bytes.

    Raises:
        QuantError: when a file is missing or damaged, or a tensor is in two files.
    """
    notes: tuple[str, ...] = ()
    if (path / INDEX).is_file():
        stored, header, notes = _indexed(path)
    else:
        stored, header = read_file(_only_file(path))
    config = path / CONFIG
    metadata = {}
    if config.is_file():
        metadata = parsed_object(file_text(config, "configuration"), str(config), constant=tagged)
    files = {
        file.name: content(file)
        for file in sorted(path.iterdir())
        if file.is_file() and any(fnmatch.fnmatchcase(file.name.lower(), pattern) for pattern in _SIDE_FILES)
    }
    if (path / _CHAT_TEMPLATES).is_dir():
        notes = (*notes, f"the directory {_CHAT_TEMPLATES} is not read; copy it by hand if you need it")
    return Checkpoint(path, "safetensors", tensors_of(stored, header), metadata, files, notes=notes)


def tensors_of(stored: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> Tensors:
    """The stored arrays, read when they are indexed; `metadata` is that of their files."""
    info = {name: TensorInfo(t.shape, DTYPES[t.dtype].name, t.dtype, t.part.nbytes) for name, t in stored.items()}

    def load(name: str) -> np.ndarray:
        return stored[name].array()

    return Tensors(info, load, metadata)


def _only_file(path: pathlib.Path) -> pathlib.Path:
    """The only tensor file of a directory without an index."""
    if (path / SINGLE).is_file():
        return path / SINGLE
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise QuantError(f"{path} has {len(found)} safetensors files ({names}) and no {INDEX}; pass one of the files")
    return found[0]


def _indexed(path: pathlib.Path) -> tuple[dict[str, StoredTensor], dict[str, str], tuple[str, ...]]:
    """The tensors of the index, and the `__metadata__` of its files. Last come notes on what is left out."""
    where = str(path / INDEX)
    weight_map = converted(parsed_object(file_text(path / INDEX, "index"), where), _Index, where).weight_map
    files = dict.fromkeys(weight_map.values())
    if SINGLE not in files and (path / SINGLE).is_file():
        note = f"{INDEX} names other files than {SINGLE}, which is read as transformers does; remove what is not the model's"
        return *read_file(path / SINGLE), (note,)
    for file in files:
        if not is_plain_name(file):
            raise QuantError(f"{where} names the file {file!r}; only files of the directory itself are expected")
        if not (path / file).is_file():
            raise QuantError(f"{path / file} is missing, though {INDEX} names it; download it again")
    by_file: dict[str, dict[str, StoredTensor]] = {}
    header: dict[str, str] = {}
    for file in files:
        by_file[file], metadata = read_file(path / file)
        header |= metadata
    for name, file in weight_map.items():
        if name not in by_file[file]:
            raise QuantError(f"{path / file} lacks tensor {name!r}, which is there according to {INDEX}")
    extra = [name for file, tensors in by_file.items() for name in tensors if weight_map.get(name) != file]
    tensors = {name: by_file[file][name] for name, file in weight_map.items()}
    if not extra:
        return tensors, header, ()
    return (
        tensors,
        header,
        (f"{len(extra)} tensors are in the files but not in the index, and are left out: {', '.join(extra)}",),
    )

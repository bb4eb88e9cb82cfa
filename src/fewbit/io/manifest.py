"""The manifest of a fewbit directory: the size and hash of every file and of every tensor, and a hash of itself.

It holds no time and no machine name, so the same inputs give the same bytes.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from ..errors import QuantError, UnsupportedError
from .mapped import content
from .strict_json import canonical, dumped, field, parsed_object

MANIFEST = "manifest.json"
FORMAT = "fewbit"
VERSION = 2


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The size and the SHA-256 of one file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Where a stored tensor is, what it is, and the SHA-256 of its bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a fewbit directory holds.

    Attributes:
        files: every file but the manifest itself.
        tensors: every stored tensor (`<name>.codes`, `<name>.scale`, ...), in the order in which they were added.
        facts: what the writer was told to remember.
    """

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    facts: Mapping[str, Any]

    def text(self) -> bytes:
        """The bytes of `manifest.json`."""
        form: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "facts": dict(self.facts),
            "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
            "tensors": {
                name: {**dataclasses.asdict(entry), "shape": list(entry.shape)} for name, entry in self.tensors.items()
            },
        }
        form["sha256"] = sha256(canonical(form))
        return dumped(form, MANIFEST)


def sha256(data: Any) -> str:
    """The SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(directory: pathlib.Path) -> Manifest:
    """The manifest of a fewbit directory.

    Raises:
        QuantError: when it is missing or damaged; a single changed character is enough.
        UnsupportedError: when a newer fewbit wrote it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise QuantError(f"{path} is missing, though the directory was written by fewbit; copy the directory again, whole")
    text = content(path)
    form = parsed_object(text, str(path))
    claimed = field(form, "sha256", str, str(path))
    del form["sha256"]
    if sha256(canonical(form)) != claimed:
        raise QuantError(f"{path} is damaged: its content does not fit its own hash; copy the directory again")
    version = field(form, "version", int, str(path))
    if field(form, "format", str, str(path)) != FORMAT or version < 1:
        raise QuantError(f"{path} is no manifest of fewbit: format {form['format']!r}, version {version}")
    if version != VERSION:
        advice = "upgrade fewbit" if version > VERSION else "quantize the checkpoint again"
        raise UnsupportedError(f"{directory} has layout version {version}, this fewbit reads version {VERSION}; {advice}")
    manifest = _manifest(form, str(path))
    if manifest.text() != text:
        raise QuantError(
            f"{path} is damaged: white space or number forms differ from what was written; copy the directory again"
        )
    return manifest


def _manifest(form: Mapping[str, Any], where: str) -> Manifest:
    """The manifest of JSON whose own hash was right: what fails here was written by hand, not damaged."""
    files = {
        _plain_name(name, where): FileRecord(field(entry, "size", int, where), field(entry, "sha256", str, where))
        for name, entry in field(form, "files", dict, where).items()
    }
    tensors = {}
    for name, entry in field(form, "tensors", dict, where).items():
        file, shape = field(entry, "file", str, where), tuple(field(entry, "shape", list, where))
        if file not in files:
            raise QuantError(f"{where}: tensor {name!r} is in {file!r}, which is no file of the manifest")
        tensors[name] = TensorRecord(file, field(entry, "dtype", str, where), shape, field(entry, "sha256", str, where))
    return Manifest(files, tensors, field(form, "facts", dict, where))


def _plain_name(name: str, where: str) -> str:
    """The name of a file in the directory, which must not lead out of it."""
    if not is_plain_name(name):
        raise QuantError(f"{where} names the file {name!r}; only files of the directory itself are expected")
    return name


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the directory at hand: no separators, no `..`."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0", ":"}

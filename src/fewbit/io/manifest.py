"""The manifest of a fewbit directory: the size and hash of every file and of every tensor, and a hash of itself.

It holds no time and no machine name, so the same inputs give the same bytes.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from .._json import Count, canonical, checked, converted, dumped, file_text, form_of, parsed_object
from ..errors import QuantError, UnsupportedError

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


class _Head(msgspec.Struct):
    """What every version of a manifest has."""

    format: str
    version: int
    sha256: str


_MANIFEST = msgspec.defstruct(
    "_MANIFEST",
    [
        ("format", str),
        ("version", int),
        ("files", dict[str, form_of(FileRecord, size=Count)]),
        ("tensors", dict[str, form_of(TensorRecord, shape=list[Count])]),
        ("facts", dict[str, Any]),
    ],
    forbid_unknown_fields=True,
)
"""The JSON schema of a manifest of this version, but for its hash."""


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
    text = file_text(path, "manifest")
    form = parsed_object(text, str(path))
    said = converted(form, _Head, str(path))
    del form["sha256"]
    if sha256(canonical(form)) != said.sha256:
        raise QuantError(f"{path} is damaged: its content does not fit its own hash; copy the directory again")
    if said.format != FORMAT or said.version < 1:
        raise QuantError(f"{path} is no manifest of fewbit: format {said.format!r}, version {said.version}")
    if said.version != VERSION:
        advice = "upgrade fewbit" if said.version > VERSION else "quantize the checkpoint again"
        raise UnsupportedError(
            f"{directory} has layout version {said.version}, this fewbit reads version {VERSION}; {advice}"
        )
    manifest = _manifest(form, str(path))
    if manifest.text() != text:
        raise QuantError(
            f"{path} is damaged: white space or number forms differ from what was written; copy the directory again"
        )
    return manifest


def _manifest(form: Mapping[str, Any], where: str) -> Manifest:
    """The manifest of JSON whose own hash was right: what fails here was written by hand, not damaged."""
    fields = checked(form, _MANIFEST, where)
    files = {_plain_name(name, where): FileRecord(**entry) for name, entry in fields["files"].items()}
    tensors = {}
    for name, entry in fields["tensors"].items():
        tensors[name] = TensorRecord(**{**entry, "shape": tuple(entry["shape"])})
        if tensors[name].file not in files:
            raise QuantError(f"{where}: tensor {name!r} is in {tensors[name].file!r}, which is no file of the manifest")
    return Manifest(files, tensors, fields["facts"])


def _plain_name(name: str, where: str) -> str:
    """The name of a file in the directory, which must not lead out of it."""
    if not is_plain_name(name):
        raise QuantError(f"{where} names the file {name!r}; only files of the directory itself are expected")
    return name


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the directory at hand: no separators, no `..`, not too long."""
    is_short = len(name.encode("utf-8", "replace")) <= 255  # what file systems allow
    return bool(name) and is_short and name not in (".", "..") and not set(name) & {"/", "\\", "\0", ":"}

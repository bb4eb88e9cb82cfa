"""The manifest of a fewbit directory.

It has the size and SHA-256 of every file and tensor, and a hash of itself. It has no time and no machine name, so the same
inputs give the same bytes.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ..._json import Count, canonical, checked, converted, dumped, file_text, form_of, parsed_object
from ...errors import QuantError, UnsupportedError

CONFIG = "config.json"
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
    """The file, dtype, shape and SHA-256 of one stored tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a fewbit directory.

    Attributes:
        files: every file but the manifest itself.
        tensors: every stored tensor (`<name>.codes`, `<name>.scale`, ...), in the order in which they were added.
        facts: the JSON that was passed to the writer.
        container: the layout of another program that the directory has; empty for our own.
    """

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    facts: Mapping[str, Any]
    container: str = ""

    def text(self) -> bytes:
        """The bytes of `manifest.json`."""
        form: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            # As they are read: JSON has no keys but texts.
            "facts": parsed_object(dumped(dict(self.facts), "facts"), "facts"),
            "files": {name: dataclasses.asdict(entry) for name, entry in self.files.items()},
            "tensors": {
                name: {**dataclasses.asdict(entry), "shape": list(entry.shape)} for name, entry in self.tensors.items()
            },
        }
        if self.container:
            form["container"] = self.container
        form["sha256"] = sha256(canonical(form))
        return dumped(form, MANIFEST)


class _Head(msgspec.Struct):
    """JSON schema of the fields of every manifest version."""

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
        ("container", str, ""),
    ],
    forbid_unknown_fields=True,
)
"""JSON schema of a manifest of this version, without its hash."""


def sha256(data: bytes | memoryview) -> str:
    """The SHA-256 of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def read_manifest(directory: pathlib.Path) -> Manifest:
    """Reads and checks the manifest of a fewbit directory.

    Raises:
        QuantError: when it is missing or damaged, even by one character.
        UnsupportedError: when a newer fewbit wrote it.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise QuantError(f"{path} is missing, though fewbit wrote the directory; copy the whole directory again")
    text = file_text(path, "manifest")
    form = parsed_object(text, str(path))
    said = converted(form, _Head, str(path))
    del form["sha256"]
    if sha256(canonical(form)) != said.sha256:
        raise QuantError(f"{path} is damaged: its content does not match its own hash; copy the directory again")
    if said.format != FORMAT or said.version < 1:
        raise QuantError(f"{path} is no manifest of fewbit: format {said.format!r}, version {said.version}")
    if said.version != VERSION:
        advice = "upgrade fewbit" if said.version > VERSION else "quantize the checkpoint again"
        raise UnsupportedError(
            f"{directory} has layout version {said.version}, this fewbit reads version {VERSION}; {advice}"
        )
    manifest = _manifest(form, str(path))
    if manifest.text() != text:
        raise QuantError(f"{path} is damaged: its white space or number format was changed; copy the directory again")
    return manifest


def _manifest(form: Mapping[str, Any], where: str) -> Manifest:
    """Builds the manifest from hash-checked JSON; errors here mean hand-written files."""
    fields = checked(form, _MANIFEST, where)
    files = {_plain_name(name, where): FileRecord(**entry) for name, entry in fields["files"].items()}
    tensors = {}
    for name, entry in fields["tensors"].items():
        tensors[name] = TensorRecord(**{**entry, "shape": tuple(entry["shape"])})
        if tensors[name].file not in files:
            raise QuantError(f"{where}: tensor {name!r} is in {tensors[name].file!r}, which is not a file of the manifest")
    return Manifest(files, tensors, fields["facts"], fields.get("container", ""))


def _plain_name(name: str, where: str) -> str:
    """Checks a file name that must not lead out of the directory."""
    if not is_plain_name(name):
        raise QuantError(f"{where} names the file {name!r}; only files of the directory itself are expected")
    return name


def is_plain_name(name: str) -> bool:
    """True for a file name without separators, not `..`, not too long."""
    is_short = len(name.encode("utf-8", "replace")) <= 255  # what file systems allow
    return bool(name) and is_short and name not in (".", "..") and not set(name) & {"/", "\\", "\0", ":"}

"""Writer of GGUF files.

Tensors are added one at a time; the file is written to a temporary directory, read back, and renamed.
"""

import functools
import importlib.metadata
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...errors import QuantError
from ..files import mapped
from ..journal import Journal, Spool
from ..native.writer import storable
from ..output import OutputKind, check_output
from ..shards import Progress
from ..staged_writer import AbstractWriter
from .fields import Field, encoded, file_header
from .header import TensorEntry, is_alignment, read_header
from .reader import gguf_package, read_gguf, scale_name
from .stored import Stored, stored

VERSION_FIELD = "fewbit.version"
"""The metadata field by which fewbit recognises its own files: the version that wrote it."""

_QUANTIZATION_VERSION = 2
_FILE = "model.gguf"


class GGUFWriter(AbstractWriter):
    """Writes a GGUF file atomically, tensor by tensor.

    A context manager: leaving the block renames the file to `path`; leaving it by an exception (also Ctrl-C) removes it, and
    an existing `path` stays unchanged. No tensor stays in memory; they are in a temporary file until all are known, because
    their names and types come first. The same calls give the same bytes. QArrays are stored without loss in the type of their
    scheme: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, NVFP4, TQ2_0 or TQ1_0; arrays as F32, F16, BF16, F64 or integers.

    The fields `general.quantization_version`, `general.file_type` and `fewbit.version` are set by the writer.

    Args:
        path: the file to create; missing parents are created.
        fields: the metadata; see `Field`. `general.architecture` is required.
        alignment: the power of two that tensor offsets are multiples of; it comes before the field `general.alignment`.
        overwrite: whether a GGUF file that fewbit wrote may be replaced at the end.
        sources: files and directories that the tensors are read from, which the output must not be or be inside of.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).
        journal: the journal of a job that can be resumed, as for `DirectoryWriter`.

    Raises:
        QuantError: for a path that may not be written, when another process is writing it or the disk is full, for a metadata value
            that GGUF has no type for, and another alignment.

    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
    >>> with GGUFWriter(path, {"general.architecture": "llama"}) as writer:
    ...     writer.add("blk.0.ffn_up.weight", fb.quantize(jnp.ones((4, 64)), "q4_0"))
    >>> fb.io.read(path).tensors["blk.0.ffn_up.weight"]
    QArray(q4_0, float32[4, 64], 144 bytes, 4.500 bits/weight)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fields: Mapping[str, Field],
        *,
        alignment: int = 32,
        overwrite: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
        journal: Journal | None = None,
    ):
        check = functools.partial(check_gguf_output, overwrite=overwrite, sources=tuple(sources))
        super().__init__(path, check, overwrite=overwrite, progress=progress, journal=journal)
        self._package = gguf_package(f"writing {self.path}")
        if "general.architecture" not in fields:
            raise QuantError("the metadata lacks 'general.architecture'; name the architecture, such as 'llama'")
        self._fields = {key: encoded(value, key) for key, value in fields.items()}
        if not is_alignment(alignment):
            raise QuantError(f"alignment is {alignment}, must be a power of two up to {1 << 30}")
        if alignment != 32 or "general.alignment" in fields:
            self._fields["general.alignment"] = encoded(alignment, "general.alignment")
        self._alignment = alignment
        self._entries: dict[str, TensorEntry] = {}
        self._nbytes: dict[str, int] = {}
        self._offset = 0
        self._is_moved = False

    @functools.cached_property
    def _spool(self) -> Spool:
        """The tensors, until all are known: the file begins with their names and types."""
        return Spool(self._staged, self._journal, self._alignment)

    def add(self, name: str, value: object, *, ternary: str = "TQ2_0") -> None:
        """Adds one tensor.

        Args:
            name: its name, unique.
            value: a QArray or an array, written now; with `fewbit.torch` imported also a tensor; or a `Stored`. The tensor scale
                of NVFP4 becomes a tensor of its own, `.scale` instead of `.weight`.
            ternary: the type of a ternary QArray: "TQ2_0", two bits, or "TQ1_0", 1.6 bits.

        Raises:
            QuantError: for a duplicate name, or a dtype or scheme that GGUF cannot store without loss; the message names the
                schemes that fit.
        """
        self._check_open()
        if not isinstance(value, Stored):
            value = stored(storable(value, name), f"tensor {name!r}", ternary)
        tensors = {name: value}
        if value.tensor_scale is not None:
            tensors[scale_name(name)] = stored(value.tensor_scale, f"tensor {scale_name(name)!r}")
        for one in tensors:
            if not one or one in self._entries:
                raise QuantError(f"tensor name {one!r} is taken already, or empty; choose another")
        kinds = self._package.GGMLQuantizationType
        forms = {one: {"shape": list(t.shape), "kind": int(kinds[t.type_name])} for one, t in tensors.items()}
        data = {one: np.ascontiguousarray(tensor.data).reshape(-1) for one, tensor in tensors.items()}
        self._spool.add({"name": name, "tensors": forms}, data)
        for one, array in data.items():
            self._record(one, forms[one], array.nbytes)
            self._progress("write", one, array.nbytes)

    def _record(self, name: str, form: Mapping[str, Any], nbytes: int) -> None:
        """Records that a tensor was added."""
        self._entries[name] = TensorEntry(name, tuple(form["shape"]), form["kind"], self._offset)
        self._nbytes[name] = nbytes
        self._offset += nbytes + -nbytes % self._alignment

    def _restore(self) -> list[str]:
        """Reads what an earlier writer of the job added."""
        batch = self._spool.restored()[0]
        self._is_moved = batch.moved is not None
        for added in batch.added:
            for name, one in added.arrays.items():
                self._record(name, added.entry["tensors"][name], one.nbytes)
        return [added.entry["name"] for added in batch.added]

    def _finish(self) -> None:
        """Writes the file, checks it, and commits."""
        if not self._entries:
            raise QuantError(f"{self.path} would have no tensors; add some before the end of the block")
        fields, entries = self._fields | self._own_fields(), list(self._entries.values())
        header = file_header(fields, entries, self._alignment)
        if not self._is_moved:
            self._spool.move(_FILE, 0, header, self._entries)
        self._staged.write_at(_FILE, len(header) + self._offset, [], 0)  # the padding of the last tensor
        self._staged.flush(_FILE)
        file = self._staged.path / _FILE
        found = read_header(mapped(file), str(self.path))
        if found.encoded != fields or found.entries != tuple(entries):
            raise QuantError(
                f"{self.path}: the header reads back differently from what was written; the disk may be failing"
            )
        read_gguf(file)
        for name, nbytes in self._nbytes.items():
            self._progress("verify", name, nbytes)
        self._staged.commit_file(_FILE)

    def _own_fields(self) -> dict[str, Field]:
        """The fields that depend on the tensors, and the mark of our files."""
        sizes: dict[str, int] = {}
        for entry in self._entries.values():
            kind = self._package.GGMLQuantizationType(entry.type_id).name
            sizes[kind] = sizes.get(kind, 0) + int(np.prod(entry.shape))
        most = max(sizes, key=lambda kind: sizes[kind])
        names = {member.name for member in self._package.LlamaFileType}
        found = [name for name in ("ALL_" + most, "MOSTLY_" + most, f"MOSTLY_{most}_MOE") if name in names]
        own: dict[str, Field] = {"general.quantization_version": _QUANTIZATION_VERSION}
        if found:
            own["general.file_type"] = int(self._package.LlamaFileType[found[0]])
        own[VERSION_FIELD] = importlib.metadata.version("fewbit")
        return {key: encoded(value, key) for key, value in own.items()}


def check_gguf_output(
    path: str | os.PathLike[str], *, overwrite: bool, sources: Iterable[str | os.PathLike[str]] = ()
) -> pathlib.Path:
    """The absolute path of a GGUF file that may be written.

    Args:
        path: the file to create; missing parents are allowed.
        overwrite: whether a GGUF file that fewbit wrote may be replaced.
        sources: the files and directories that it is made from.

    Returns:
        The path.

    Raises:
        QuantError: as `check_output`, and for an existing file that is not a GGUF file of fewbit.
    """
    kind = OutputKind(_foreign_files, _FILE)
    return check_output(path, overwrite=overwrite, sources=sources, kind=kind)


def _foreign_files(file: pathlib.Path) -> list[str]:
    """Refuses a file that is not a GGUF file of fewbit."""
    if VERSION_FIELD not in read_header(mapped(file), str(file)).metadata:
        raise QuantError(f"its metadata lacks {VERSION_FIELD}")
    return []

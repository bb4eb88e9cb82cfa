"""Writer of GGUF files.

Tensors are added one at a time; the file is written to a temporary directory, read back, and renamed.
"""

import functools
import hashlib
import importlib.metadata
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from ...errors import QuantError
from ..files import mapped
from ..native.writer import storable
from ..output import checked_target
from ..shards import Progress
from ..staged_writer import AbstractWriter
from .fields import Field, encoded, file_header
from .header import TensorEntry, read_header
from .reader import gguf_package, read_gguf, scale_name
from .stored import Stored, stored

VERSION_FIELD = "fewbit.version"
"""The metadata field by which fewbit recognises its own files: the version that wrote it."""

_QUANTIZATION_VERSION = 2
_FILE = "model.gguf"


class GGUFWriter(AbstractWriter):
    """Writes a GGUF file atomically, tensor by tensor.

    A context manager: leaving the block renames the file to `path`; leaving it by an exception (also Ctrl-C) removes it, and
    an existing `path` stays unchanged. Tensors stay in memory until they fill a temporary file. The same calls give the same
    bytes. QArrays are stored without loss in the type of their scheme: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, NVFP4, TQ2_0
    or TQ1_0; arrays as F32, F16, BF16, F64 or integers.

    The fields `general.quantization_version`, `general.file_type` and `fewbit.version` are set by the writer.

    Args:
        path: the file to create; missing parents are created.
        fields: the metadata; see `Field`. `general.architecture` is required.
        alignment: the power of two that tensor offsets are multiples of.
        max_buffer_bytes: the bytes of tensors that are kept in memory.
        overwrite: whether a GGUF file that fewbit wrote may be replaced at the end.
        sources: files and directories that the tensors are read from, which the output must not be or be inside of.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).

    Raises:
        QuantError: for a path that may not be written, when another process is writing it or the disk is full, and for a metadata
            value that GGUF has no type for.

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
        max_buffer_bytes: int = 2**30,
        overwrite: bool = False,
        sources: Iterable[str | os.PathLike[str]] = (),
        progress: Progress | None = None,
    ):
        check = functools.partial(check_gguf_output, overwrite=overwrite, sources=tuple(sources))
        super().__init__(path, check, overwrite=overwrite, progress=progress)
        self._package = gguf_package(f"writing {self.path}")
        if "general.architecture" not in fields:
            raise QuantError("the metadata lacks 'general.architecture'; name the architecture, such as 'llama'")
        self._fields = {key: encoded(value, key) for key, value in fields.items()}
        if alignment != 32:
            self._fields["general.alignment"] = encoded(alignment, "general.alignment")
        self._alignment, self._limit = alignment, max_buffer_bytes
        self._entries: dict[str, TensorEntry] = {}
        self._hashes: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._pending: list[np.ndarray] = []
        self._pending_bytes = 0
        self._parts: list[str] = []
        self._offset = 0

    def add(self, name: str, value: object, *, ternary: str = "TQ2_0") -> None:
        """Adds one tensor.

        Args:
            name: its name, unique.
            value: a QArray or an array, copied now; with `fewbit.torch` imported also a tensor; or a `Stored`. The tensor scale
                of NVFP4 becomes a tensor of its own, `.scale` instead of `.weight`.
            ternary: the type of a ternary QArray: "TQ2_0", two bits, or "TQ1_0", 1.6 bits.

        Raises:
            QuantError: for a duplicate name, or a dtype or scheme that GGUF cannot store without loss; the message names the
                schemes that fit.
        """
        self._check_open()
        if not isinstance(value, Stored):
            value = stored(storable(value, name), f"tensor {name!r}", ternary)
        if not name or name in self._entries:
            raise QuantError(f"tensor name {name!r} is taken already, or empty; choose another")
        kind = self._package.GGMLQuantizationType[value.type_name]
        self._entries[name] = TensorEntry(name, value.shape, int(kind), self._offset)
        data = np.array(value.data, order="C").reshape(-1)
        self._hashes[name], self._sizes[name] = hashlib.sha256(data.data).hexdigest(), data.size
        padding = -data.size % self._alignment
        if self._pending and self._pending_bytes + data.size > self._limit:
            self._flush()
        self._pending += [data, np.zeros(padding, np.uint8)]
        self._pending_bytes += data.size + padding
        self._offset += data.size + padding
        self._progress("write", name, data.size)
        if value.tensor_scale is not None:
            self.add(scale_name(name), value.tensor_scale)

    def _flush(self) -> None:
        """Writes the pending tensors to a temporary file."""
        name = f"part-{len(self._parts)}"
        self._staged.write(name, [part.data for part in self._pending], self._pending_bytes)
        self._parts.append(name)
        self._pending, self._pending_bytes = [], 0

    def _finish(self) -> None:
        """Writes the file, checks it, and commits."""
        if not self._entries:
            raise QuantError(f"{self.path} would have no tensors; add some before the end of the block")
        fields = self._fields | self._own_fields()
        header = file_header(fields, list(self._entries.values()), self._alignment)
        parts = itertools.chain([memoryview(header)], self._written_parts(), [part.data for part in self._pending])
        self._staged.write(_FILE, parts, len(header) + self._offset)
        self._verify(fields)
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

    def _written_parts(self) -> Iterator[memoryview]:
        """The bytes of the temporary files, each removed once it was copied."""
        for name in self._parts:
            part = self._staged.path / name
            yield mapped(part).data
            part.unlink()

    def _verify(self, fields: Mapping[str, Field]) -> None:
        """Reads the file back and compares every field and tensor."""
        file = self._staged.path / _FILE
        data = mapped(file)
        header = read_header(data, str(self.path))
        if header.encoded != fields or header.entries != tuple(self._entries.values()):
            raise self._changed("the header")
        read_gguf(self.path, data)
        for name, entry in self._entries.items():
            start = header.data_start + entry.offset
            if hashlib.sha256(data[start : start + self._sizes[name]].data).hexdigest() != self._hashes[name]:
                raise self._changed(f"tensor {name!r}")
            self._progress("verify", name, self._sizes[name])

    def _changed(self, what: str) -> QuantError:
        return QuantError(f"{self.path}: {what} reads back differently from what was written; the disk may be failing")


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
    target = checked_target(path, sources)
    if not os.path.lexists(target):
        return target
    advice = "choose another output or remove it yourself"
    if not overwrite:
        raise QuantError(f"{target} exists; choose another output, or allow it to be replaced (overwrite=True, --overwrite)")
    if target.is_symlink() or not target.is_file():
        raise QuantError(f"{target} is not a regular file, so it is not replaced; {advice}")
    try:
        fields = read_header(mapped(target), str(target)).metadata
    except QuantError as error:
        raise QuantError(f"{target} was not written by fewbit, so it is not replaced; {advice} ({error})") from error
    if VERSION_FIELD not in fields:
        raise QuantError(f"{target} is a GGUF file that fewbit did not write, so it is not replaced; {advice}")
    return target

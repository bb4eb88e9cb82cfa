"""Inspects a stored model without loading its tensors."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from ..io.checkpoint import TensorInfo
from .load import load


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a stored model.

    Attributes:
        path: the parameter's path, or its name in the file if the architecture is unknown.
        shape: its shape.
        dtype: the dtype of the (dequantized) array.
        stored: the storage type in the file.
        is_quantized: whether it loads as a QArray.
        nbytes: its bytes in the file.
        bits_per_weight: `8 * nbytes` over its number of elements.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    is_quantized: bool
    nbytes: int
    bits_per_weight: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A stored model.

    Attributes:
        path: its path.
        kind: the container.
        architecture: the architecture's family, or "unknown".
        why_not_run: why it cannot be run; empty if it can.
        tokenizer: the vocabulary size of its tokenizer, or None.
        config: the model's configuration, or the checkpoint's metadata if the architecture is unknown.
        facts: provenance recorded in a fewbit directory.
        tensors: its tensors.
        size: their number of elements.
        tensor_bytes: the bytes of the tensors.
        file_bytes: the bytes of the file, or of all files of the directory.
        notes: sentences for the user.
    """

    path: Path
    kind: str
    architecture: str
    why_not_run: str
    tokenizer: int | None
    config: dict[str, Any]
    facts: dict[str, Any]
    tensors: tuple[TensorEntry, ...]
    size: int
    tensor_bytes: int
    file_bytes: int
    notes: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        """`8 * tensor_bytes / size`."""
        return 8 * self.tensor_bytes / max(self.size, 1)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Lists the tensors and the metadata of a stored model.

    Args:
        path: anything that `load` takes.

    Returns:
        The model's metadata and one entry per tensor.

    Raises:
        QuantError: when the path does not exist or cannot be read.
    """
    model = load(path)
    config: dict[str, Any]
    if model.config is not None:
        config = model.config.to_json()
    else:  # the short entries of the checkpoint's metadata
        config = {k: v for k, v in model.metadata.items() if isinstance(v, str | int | float) and len(str(v)) < 200}
    return Inspection(
        path=model.path,
        kind=model.kind,
        architecture=model.architecture,
        why_not_run=model.why_not_run,
        tokenizer=None if model.tokenizer is None else model.tokenizer.vocab,
        config=config,
        facts=dict(model.facts),
        tensors=tuple(_entry(path, info) for path, info in model.info.items()),
        size=model.size,
        tensor_bytes=model.nbytes,
        file_bytes=file_bytes(model.path),
        notes=model.notes,
    )


def file_bytes(path: Path) -> int:
    """The file size, or the sum of the file sizes of a directory."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _entry(path: str, info: TensorInfo) -> TensorEntry:
    bits = 8 * info.nbytes / max(math.prod(info.shape), 1)
    return TensorEntry(path, info.shape, info.dtype, info.stored, info.scheme is not None, info.nbytes, bits)

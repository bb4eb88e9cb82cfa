"""What a stored model holds, tensor by tensor, without loading the tensors."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from .load import load
from .model import Model


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a stored model.

    Attributes:
        path: the parameter's path, or its name in the file when the network is unknown.
        shape: its shape.
        dtype: the dtype of the array that it stands for.
        stored: how the file holds it.
        is_quantized: whether it loads as a quantized array.
        nbytes: its bytes in the file.
        bits_per_weight: eight times these over its elements.
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
        path: where it is.
        kind: the container.
        architecture: the network's family, or "unknown".
        why_not_run: why it cannot be run; empty when it can.
        tokenizer: the number of tokens of its tokenizer, or None.
        config: the network's numbers, or what the checkpoint says of itself when the network is unknown.
        facts: what the writer of a fewbit directory remembered.
        tensors: its tensors.
        size: how many elements they have.
        tensor_bytes: the bytes of the tensors.
        file_bytes: the bytes of the file, or of all files of the directory.
        notes: sentences that the user should see.
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
        """Eight times the bytes of the tensors over the number of elements."""
        return 8 * self.tensor_bytes / max(self.size, 1)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What the model at a path holds.

    Args:
        path: anything that `load` takes.

    Returns:
        What is known of it and of each tensor.

    Raises:
        QuantError: when there is nothing at the path, or it cannot be read.
    """
    model = load(path)
    entries = tuple(_entry(path, info) for path, info in model.info.items())
    return Inspection(
        path=model.path,
        kind=model.kind,
        architecture=model.architecture,
        why_not_run=model.why_not_run,
        tokenizer=None if model.tokenizer is None else model.tokenizer.vocab,
        config=_said(model),
        facts=dict(model.facts),
        tensors=entries,
        size=model.size,
        tensor_bytes=model.nbytes,
        file_bytes=file_bytes(model.path),
        notes=model.notes,
    )


def file_bytes(path: Path) -> int:
    """The bytes of a file, or of all files of a directory, as the file system counts them."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _entry(path: str, info: Any) -> TensorEntry:
    bits = 8 * info.nbytes / max(math.prod(info.shape), 1)
    return TensorEntry(path, info.shape, info.dtype, info.stored, info.scheme is not None, info.nbytes, bits)


def _said(model: Model) -> dict[str, Any]:
    """The network's numbers, or the short ones of what the checkpoint says."""
    if model.config is not None:
        return model.config.to_json()
    return {k: v for k, v in model.metadata.items() if isinstance(v, str | int | float) and len(str(v)) < 200}

"""A checkpoint: named tensors, metadata and small files."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from .._registry import near_names
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError
from ..ops.policy import Policy

Tensor: TypeAlias = np.ndarray | jax.Array | QArray
Kind: TypeAlias = Literal["gguf", "safetensors", "npz", "fewbit", "orbax"]


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor that is not loaded yet.

    Attributes:
        shape: the shape of the loaded array; a linear weight is `[out, in]` in GGUF and Hugging Face files.
        dtype: the name of its dtype; for a QArray that of its dequantized values.
        stored: the file's own name of its type: "Q4_1", "BF16", "<f2", or the name of a scheme.
        nbytes: its size in the file.
        scheme: the scheme of the loaded QArray, or None for a plain array.
        policy: the policy of the loaded QArray: how its products quantize their other operand; None: they do not.
    """

    shape: tuple[int, ...]
    dtype: str
    stored: str
    nbytes: int
    scheme: Scheme | None = None
    policy: Policy | None = None


class Tensors(Mapping):
    """A mapping of named tensors. Each indexing reads the file again, nothing is cached.

    Args:
        info: the description of each tensor, in the order of the file.
        load: loads the tensor of a name.
        metadata: the `__metadata__` of the safetensors files that they come from, in one mapping.
    """

    def __init__(
        self,
        info: Mapping[str, TensorInfo],
        load: Callable[[str], np.ndarray | QArray],
        metadata: Mapping[str, str] | None = None,
    ):
        self.info = dict(info)
        self.metadata = dict(metadata or {})
        self._load = load

    def __getitem__(self, name: str) -> np.ndarray | QArray:
        if name not in self.info:
            raise KeyError(f"no tensor {name!r}; {near_names(name, tuple(self.info)[:400])}")
        return self._load(name)

    def __contains__(self, name: object) -> bool:
        return name in self.info

    def __iter__(self) -> Iterator[str]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __repr__(self) -> str:
        return f"Tensors({len(self)} tensors, {sum(i.nbytes for i in self.info.values()):,} bytes in the file)"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened model file or directory.

    Attributes:
        path: the file or directory.
        kind: the container.
        tensors: the parameters by their names in the file.
        metadata: GGUF: every metadata field, including the tokenizer. A directory: its `config.json` without the section of
            fewbit. A single safetensors file: the `__metadata__` of its header. `.npz`: its `__config__`.
        files: tokenizer and other small files by name, as bytes.
        facts: the JSON that was passed to the writer of a fewbit directory; empty for the others.
        notes: sentences for the user, such as which tensors were decoded to float.
    """

    path: pathlib.Path
    kind: Kind
    tensors: Tensors
    metadata: dict[str, Any]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.tensors:
            raise QuantError(f"{self.path} holds no tensors")

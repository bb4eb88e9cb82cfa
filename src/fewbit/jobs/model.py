"""A model as the jobs see it: its parameters by path, each loaded when it is asked for, and what is known of the rest."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import models
from ..array import QArray
from ..errors import UnsupportedError
from ..io import TensorInfo
from ..kernels.quantize import dequantize

Value = np.ndarray | jax.Array | QArray


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened model.

    Attributes:
        path: where it was read from.
        kind: the container: "gguf", "safetensors", "npz" or "fewbit".
        config: the network, when it is one that can be run; else None.
        why_not_run: why it cannot be run; empty when it can.
        info: what is known of each parameter before it is loaded, by its path: that of our tree (`layers/3/attn/q`) for a
            network that can be run, else the name in the file.
        load: gives the parameter of a path, in the orientation of `info`.
        tokenizer: the checkpoint's tokenizer, or None.
        why_no_tokenizer: why there is none; empty when there is.
        files: tokenizer and other small files to pass on, by name.
        metadata: what the checkpoint says of itself.
        facts: what the writer of a fewbit directory remembered.
        notes: sentences that the user should see.
        names: the parameters' names in a Hugging Face checkpoint, by path, where they differ; what is written keeps them.
    """

    path: Path
    kind: str
    config: models.LlamaConfig | None
    why_not_run: str
    info: Mapping[str, TensorInfo]
    load: Callable[[str], Value]
    tokenizer: models.Tokenizer | None = None
    why_no_tokenizer: str = ""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.name

    @property
    def architecture(self) -> str:
        """The network's family, or "unknown"."""
        return "unknown" if self.config is None else "llama"

    @property
    def size(self) -> int:
        """How many elements all parameters have."""
        return sum(math.prod(info.shape) for info in self.info.values())

    @property
    def nbytes(self) -> int:
        """The bytes that all parameters take in the file."""
        return sum(info.nbytes for info in self.info.values())

    @property
    def quantized(self) -> dict[str, list[str]]:
        """The paths of the parameters that the file holds quantized, by how it holds them."""
        by_kind: dict[str, list[str]] = {}
        for path, info in self.info.items():
            if info.scheme is not None:
                by_kind.setdefault(info.stored, []).append(path)
        return by_kind

    def runnable_config(self) -> models.LlamaConfig:
        """The network.

        Raises:
            UnsupportedError: when the model cannot be run.
        """
        if self.config is None:
            raise UnsupportedError(
                f"{self.path} cannot be run, only planned, quantized, inspected and verified: {self.why_not_run}"
            )
        return self.config

    def readable_tokenizer(self) -> models.Tokenizer:
        """The tokenizer.

        Raises:
            UnsupportedError: when there is none.
        """
        if self.tokenizer is None:
            raise UnsupportedError(f"{self.path} cannot read text: {self.why_no_tokenizer}")
        return self.tokenizer

    def params(self) -> dict[str, Any]:
        """The tree of parameters as the file holds them, quantized leaves among them."""
        return models.params_from_paths({path: self.load(path) for path in self.info}, self.runnable_config())

    def float_params(self) -> dict[str, Any]:
        """The tree of parameters, all decoded."""
        return models.params_from_paths({path: decoded(self.load(path)) for path in self.info}, self.runnable_config())


def decoded(value: Value) -> np.ndarray | jax.Array:
    """The array that a parameter stands for."""
    return _decode(value) if isinstance(value, QArray) else value


_decode = jax.jit(dequantize)

"""A loaded model: configuration, tokenizer and lazily loaded parameters."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..array.qarray import QArray
from ..array.scheme import Scheme, laid_along
from ..errors import QuantError, UnsupportedError
from ..io.checkpoint import TensorInfo
from ..kernels.quantize.dispatch import dequantize
from ..models.config import DecoderConfig
from ..models.names import params_from_paths, shapes
from ..models.tokenizers.tokenizer import Tokenizer
from ..recipe.rows import PlanRow

Value = np.ndarray | jax.Array | QArray


def transposed_scheme(scheme: Scheme) -> Scheme:
    """The scheme of the transposed matrix.

    >>> transposed_scheme(transposed_scheme(fb.scheme("int4_g32"))) == fb.scheme("int4_g32").with_tiles((1, 32), -1)
    True
    """
    rows, columns = scheme.tiles(2)
    return scheme.with_tiles((columns, rows), -3 - scheme.pack_axis)


@dataclasses.dataclass(frozen=True)
class Model:
    """An opened model.

    Attributes:
        path: the path it was read from.
        kind: the container: "gguf", "safetensors", "npz", "fewbit" or "orbax".
        config: the configuration of an architecture that can be run; else None.
        why_not_run: why it cannot be run; empty if it can.
        info: shape, dtype and bytes by path: `layers/3/attn/q` in a model that can be run, else the name in the file; so have
            the tensors of other parts of a model that can be run (`others`).
        load: loads the parameter of a path, in the orientation of `info`.
        tokenizer: the checkpoint's tokenizer, or None.
        why_no_tokenizer: why there is none; empty if there is one.
        files: tokenizer and other small files to copy, by name.
        metadata: the checkpoint's own metadata.
        facts: provenance recorded in a fewbit directory.
        notes: sentences for the user.
        names: the parameters' names in a Hugging Face checkpoint, by path, where they differ; writing keeps them.
        transposed: the paths of weights that the checkpoint stores `[in, out]`, as GPT-2's; writing keeps that, too.
    """

    path: Path
    kind: str
    config: DecoderConfig | None
    why_not_run: str
    info: Mapping[str, TensorInfo]
    load: Callable[[str], Value]
    tokenizer: Tokenizer | None = None
    why_no_tokenizer: str = ""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    transposed: frozenset[str] = frozenset()

    def stored(self, path: str, value: Value) -> Value:
        """A parameter in the orientation of its checkpoint.

        Args:
            path: its path.
            value: its value, as `load` orients it.
        """
        return value.T if path in self.transposed else value

    def stored_form(self, path: str, shape: tuple[int, ...], scheme: Scheme) -> tuple[tuple[int, ...], Scheme]:
        """The shape and the scheme of `stored` of a quantized weight.

        Args:
            path: its path.
            shape: its shape, as `load` orients it.
            scheme: its scheme, likewise.
        """
        return (shape[::-1], transposed_scheme(scheme)) if path in self.transposed else (shape, scheme)

    @property
    def name(self) -> str:
        """The last component of its path, also for `.`. Bytes that are no UTF-8 become U+FFFD, for files have the name."""
        return os.fsencode(os.path.basename(os.path.abspath(self.path))).decode(errors="replace")

    @property
    def architecture(self) -> str:
        """The `model_type` of config.json, or "decoder" without one. "unknown" if the model cannot be run."""
        if self.config is None:
            return "unknown"
        return str(self.metadata.get("model_type", "decoder"))

    @property
    def size(self) -> int:
        """The number of elements of all parameters."""
        return sum(math.prod(info.shape) for info in self.info.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters in the file."""
        return sum(info.nbytes for info in self.info.values())

    @functools.cached_property
    def others(self) -> tuple[str, ...]:
        """The parameters of other parts than the language model, such as a vision tower. The decoder does not read them."""
        if self.config is None:
            return ()
        own = shapes(self.config)
        return tuple(path for path in self.info if path not in own)

    @property
    def quantized(self) -> dict[str, list[str]]:
        """The paths of the parameters that the file stores quantized, by storage type."""
        by_kind: dict[str, list[str]] = {}
        for path, info in self.info.items():
            if info.scheme is not None:
                by_kind.setdefault(info.stored, []).append(path)
        return by_kind

    def runnable_config(self) -> DecoderConfig:
        """The configuration.

        Raises:
            UnsupportedError: when the model cannot be run.
        """
        if self.config is None:
            raise UnsupportedError(
                f"{self.path} cannot be run by fewbit's decoder: {self.why_not_run}. It can be planned, quantized, inspected and "
                "verified, and, with a config.json of an architecture in transformers, evaluated by `fewbit eval`"
            )
        return self.config

    def readable_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            UnsupportedError: when there is none.
        """
        if self.tokenizer is None:
            raise UnsupportedError(f"{self.path} has no tokenizer: {self.why_no_tokenizer}")
        return self.tokenizer

    def check_tokens(self, tokens: np.ndarray, vocab: int) -> None:
        """Raises QuantError for tokens of the tokenizer without an embedding; some files' vocabularies are too small for it."""
        if tokens.max(initial=0) >= vocab:
            raise QuantError(
                f"the tokenizer of {self.name} gives token {tokens.max()}, but its vocabulary has {vocab} tokens"
            )

    def params(self) -> dict[str, Any]:
        """The pytree of parameters as stored, with quantized leaves as QArrays."""
        config = self.runnable_config()
        return params_from_paths({path: self.load(path) for path in shapes(config)}, config)

    def float_params(self) -> dict[str, Any]:
        """The pytree of parameters, all dequantized."""
        config = self.runnable_config()
        return params_from_paths({path: decoded(self.load(path)) for path in shapes(config)}, config)


def decoded(value: Value) -> np.ndarray | jax.Array:
    """The parameter as a float array, dequantized if it is a QArray."""
    return _decode(value) if isinstance(value, QArray) else value


_decode = jax.jit(dequantize)


def check_alone(model: Model, change: str) -> None:
    """Refuses a model with other parts than the language model, for changes of the decoder itself.

    Args:
        model: the model.
        change: what would change, for the message.
    """
    if model.others:
        raise UnsupportedError(
            f"{model.name} has other parts than its language model, such as {model.others[0]}, and {change} is for a language "
            "model alone"
        )


def check_others_can_run(model: Model) -> None:
    """Refuses a model that only fewbit's decoder runs, for layouts that others read."""
    if model.config is None:
        return
    blocks = ("blocks",) if model.config.rotated_outputs else ()
    for does, products, option in (
        ("rotates the inputs of", model.config.rotated_inputs, "--rotate-inputs"),
        ("scales the inputs of", model.config.scaled_inputs, "--keep-scales"),
        ("rotates the outputs of", blocks, "--rotate"),
    ):
        if products:
            raise UnsupportedError(
                f"{model.name} {does} {' and '.join(products)} when it runs, which only fewbit's decoder does; "
                f"write it --to fewbit or orbax, or quantize its source without {option}"
            )


def is_kept(row: PlanRow, info: TensorInfo) -> bool:
    """Whether the file already stores the parameter in the planned scheme. It is then copied without loss."""
    if row.policy is None or info.scheme is None or row.stacked or row.sparsity is not None:
        return False
    return laid_along(row.policy.weight, row.axis, row.shape) == info.scheme

"""Runs checkpoints through transformers, with weights that fewbit decoded.

The architecture comes from config.json. No code of the checkpoint runs, nothing is downloaded, and no pickle is read. The
weights are handed to `from_pretrained` as a state dict whose entries are read, dequantized to float32 and converted (experts
stacked, names changed) one by one. Buffers that no file has, such as rotary frequencies, are computed by transformers.
"""

import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._json import parsed_object
from ..array.qarray import QArray
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize.dispatch import dequantize
from ..models.roles.modules import architecture, guarded
from .engine import Engine, Value
from .model_inputs import Signature, vocabulary
from .outputs import Outputs

_PROBE = 8  # tokens of the inputs that find out whether a model is causal
_LISTED = 5


@dataclasses.dataclass(frozen=True)
class TransformersEngine(Engine):
    """The architecture of a config.json in transformers.

    Attributes:
        source: the name of the checkpoint, for messages.
        cls: the class of the model.
        settings: its configuration object.
    """

    source: str
    cls: Any
    settings: Any

    @property
    def is_language_model(self) -> bool:
        """Whether the class predicts the next token of a text."""
        from transformers.models.auto import modeling_auto

        name = self.cls.__name__
        if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            return True
        with_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
        return name in with_images and not getattr(self.settings, "is_encoder_decoder", False)

    @property
    def takes(self) -> Signature:
        """What the model's forward function takes."""
        names = tuple(name for name in inspect.signature(self.cls.forward).parameters if name not in ("self", "kwargs"))
        return Signature(self.cls.__name__, names, self.settings, self.context)

    def network(self, paths: Iterable[str], load: Callable[[str], Value]) -> "TransformersNetwork":
        """The model in float32 with these weights.

        Args:
            paths: the names of the weights in the checkpoint.
            load: loads the weight of a name.

        Returns:
            The model.

        Raises:
            QuantError: when weights are missing, unexpected or of another shape; the message names them.
            UnsupportedError: when transformers cannot build the model.
        """
        import torch

        reader = _Reader(load)
        state = {name: _Weight(reader, name) for name in paths}
        try:
            with guarded():
                module, report = self.cls.from_pretrained(
                    None,
                    config=self.settings,
                    state_dict=state,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are reported below
                    local_files_only=True,
                )
        except UnsupportedError:
            if reader.error is not None:
                raise reader.error from None
            raise
        self._check_report(report)
        return TransformersNetwork(module.eval(), self.cls.__name__, self.source, reader.float_activations)

    def _check_report(self, report: Mapping[str, Any]) -> None:
        """Refuses weights that do not fit the architecture."""
        of_other_shape = [key[0] if isinstance(key, tuple) else key for key in report["mismatched_keys"]]
        faults = {
            "lacks": report["missing_keys"],
            "has no place for": report["unexpected_keys"],
            "has another shape for": of_other_shape,
        }
        for what, names in faults.items():
            if not names:
                continue
            listed = ", ".join(sorted(names)[:_LISTED])
            if len(names) > _LISTED:
                listed += f" and {len(names) - _LISTED} more"
            if what == "lacks":
                raise QuantError(
                    f"{self.source} lacks {listed} of transformers' {self.cls.__name__}; check that it is complete"
                )
            raise QuantError(f"transformers' {self.cls.__name__} {what} {listed} of {self.source}; check its config.json")


def transformers_engine(
    config: Mapping[str, Any], names: Collection[str], *, source: str, files: Mapping[str, bytes] | None = None
) -> TransformersEngine:
    """Finds the architecture of a config.json; no weight is read.

    Args:
        config: the checkpoint's `config.json`.
        names: the names of its tensors.
        source: its name, for messages.
        files: its small files by name; a tokenizer's `model_max_length` limits the context.

    Returns:
        The engine.

    Raises:
        UnsupportedError: when transformers is not installed, or does not know the architecture.
    """
    with guarded():
        cls, settings = architecture(config, names)
        import torch
        import transformers

        for of in (settings, settings.get_text_config(decoder=True)):
            of.use_cache = False
        settings.return_dict = True
        settings.output_hidden_states = False
        settings.output_attentions = False
    title = f"{cls.__name__} of transformers {transformers.__version__} in float32 (PyTorch {torch.__version__})"
    context = _context(settings, (files or {}).get("tokenizer_config.json", b"{}"))
    return TransformersEngine(title, vocabulary(settings), context, source, cls, settings)


_PADDED_POSITIONS = frozenset(
    [
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "layoutlmv3",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
"""The model types whose positions begin after the padding token's id."""


def _context(settings: Any, tokenizer_config: bytes) -> int | None:
    """The most tokens of an input, by the configuration and by the tokenizer."""
    positions = getattr(settings.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(positions, int) and settings.model_type in _PADDED_POSITIONS:
        positions -= (settings.pad_token_id or 0) + 1
    longest = parsed_object(tokenizer_config, "tokenizer_config.json").get("model_max_length")
    return min((limit for limit in (positions, longest) if isinstance(limit, int) and 0 < limit < 10**9), default=None)


class TransformersNetwork:
    """A model of transformers with its weights; called with tokens, it gives logits.

    Args:
        module: the torch module.
        title: the name of its class.
        source: the name of the checkpoint.
        float_activations: the number of weights whose policy quantizes activations, which stay float here.
    """

    def __init__(self, module: Any, title: str, source: str, float_activations: int = 0):
        self.module = module
        self.title = title
        self.source = source
        self.float_activations = float_activations

    @property
    def notes(self) -> tuple[str, ...]:
        """What the outputs leave out, in a sentence."""
        if not self.float_activations:
            return ()
        return (
            f"transformers runs the weights alone: the activations of {self.float_activations} weights are quantized by their "
            "policy, but not here",
        )

    def __call__(self, tokens: Any) -> jax.Array:
        """The logits `[B, T, V]` after each of the tokens `[B, T]`."""
        logits = self.outputs({"input_ids": np.asarray(tokens, np.int64)}).get("logits")
        if logits is None or logits.shape[:2] != np.shape(tokens):
            raise UnsupportedError(f"{self.title} gives no logits for each token; compare its outputs with --inputs")
        return jnp.asarray(logits)

    def outputs(self, inputs: Mapping[str, np.ndarray]) -> Outputs:
        """The floating outputs for these arguments, by name, as NumPy arrays.

        Random numbers that the model draws, such as the masks of ViTMAE, are the same in every call.
        """
        import torch

        arguments = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
        try:
            with guarded("run the model"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                found = self.module(**arguments)
        except UnsupportedError as error:
            shapes = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in inputs.items())
            reason = str(error.__cause__ or error).strip().split("\n")[0][:200]
            raise QuantError(f"{self.title} cannot run {self.source} on {shapes}: {reason}") from error
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return {name: value.float().numpy() for name, value in tensors.items() if value.is_floating_point()}

    def blocks(self, inputs: Mapping[str, np.ndarray]) -> Outputs:
        """The hidden state after each block, by the block's module.

        A block is a layer of a transformer. They are in the order of the run. A block that runs several times has an output
        for each.
        """
        import torch

        found: dict[str, np.ndarray] = {}

        def keep(name: str, output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                output = next(iter(output.values() if isinstance(output, Mapping) else output))
            again = sum(key.split(" ")[0] == name for key in found)
            found[f"{name} ({again + 1})" if again else name] = output.detach().float().numpy().copy()

        hooks = [
            block.register_forward_hook(lambda _module, _inputs, output, name=name: keep(name, output))
            for name, block in _blocks(self.module).items()
        ]
        try:
            self.outputs(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def check_causal(self, vocab: int) -> None:
        """Checks that no logits depend on later tokens.

        Args:
            vocab: the vocabulary size.

        Raises:
            UnsupportedError: when they do, so that the model has no perplexity.
        """
        tokens = np.random.default_rng(0).integers(vocab, size=(1, _PROBE))
        changed = tokens.copy()
        changed[:, -1] = (changed[:, -1] + vocab // 2) % vocab
        before, after = (np.asarray(self(ids))[:, :-1] for ids in (tokens, changed))
        if np.abs(before - after).max() > 1e-4 * np.abs(before).max():
            raise UnsupportedError(
                f"{self.source} has no perplexity: the logits of its {self.title} depend on later tokens; compare its outputs "
                "with --inputs"
            )


def _blocks(module: Any) -> dict[str, Any]:
    """The blocks of a model, by name.

    They are its checkpointed layers, or else the entries of its outermost module lists.
    """
    from torch import nn
    from transformers.modeling_layers import GradientCheckpointingLayer

    named = dict(module.named_modules())
    layers = {name: one for name, one in named.items() if isinstance(one, GradientCheckpointingLayer)}
    if layers:
        return layers
    lists = [name for name, one in named.items() if isinstance(one, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {f"{name}.{key}": one for name in outermost for key, one in named[name].named_children()}


class _Reader:
    """Reads one weight at a time, and remembers the first error."""

    def __init__(self, load: Callable[[str], Value]):
        self._load = load
        self.float_activations = 0
        self.error: QuantError | UnsupportedError | None = None
        self._lock = threading.Lock()  # transformers reads in several threads

    def tensor(self, name: str) -> Any:
        """The weight as a torch tensor; floats of every kind as float32."""
        import torch

        with self._lock:
            try:
                value = self._load(name)
            except (QuantError, UnsupportedError) as error:
                self.error = self.error or error
                raise
            if isinstance(value, QArray):
                self.float_activations += getattr(value.policy, "activation", None) is not None
                value = _decode(value)
            array = np.asarray(value)
            if array.dtype.kind not in "biu":
                return torch.from_numpy(np.array(array, np.float32))
            return torch.from_numpy(np.array(array))


_decode = jax.jit(dequantize)


class _Weight:
    """A weight that is read when transformers takes its content. It is indexed like a slice of a safetensors file."""

    def __init__(self, reader: _Reader, name: str):
        self._reader = reader
        self._name = name

    def __getitem__(self, index: Any) -> Any:
        return self._reader.tensor(self._name)[index]

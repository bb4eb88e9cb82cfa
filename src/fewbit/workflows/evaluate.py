"""Evaluates a model on a text, alone or against a reference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..errors import QuantError
from ..evaluate.metrics import sqnr_db
from ..evaluate.perplexity import Comparison, Perplexity, compare_models, perplexity, token_windows
from ..kvcache.policy import KVPolicy
from ..models.config import DecoderConfig
from ..models.decoder import forward, stack_layers
from ..models.installed import default_text_name, find_text
from ..models.joined import fuse_weights, stack_experts
from ..ops.interpret.transparent import transparent
from .model import Model, decoded

TOKENS = 2048
WINDOW = 512
_LOGIT_BYTES = 1 << 28  # of one batch


@dataclasses.dataclass(frozen=True)
class Quality:
    """The result of evaluating a model on a text.

    Attributes:
        text: the name of the text.
        window: the tokens of a window.
        perplexity: the model's perplexity.
        against: the comparison with the reference, if there is one.
        sqnr_db: the SQNR of each parameter of two or more axes against the reference's.
        notes: what was left out, and why.
        kv: how keys and values were quantized; None: not at all.
    """

    text: str
    window: int
    perplexity: Perplexity
    against: Comparison | None = None
    sqnr_db: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kv: str | None = None


def evaluate(
    model: Model,
    *,
    against: Model | None = None,
    text: str | None = None,
    tokens: int | None = None,
    window: int | None = None,
    kv: KVPolicy | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Quality:
    """Measures perplexity, and the divergence from a reference if there is one.

    Quantized leaves stay quantized: the model runs through `fb.transparent`.

    Args:
        model: a model that can be run.
        against: the reference, with the same vocabulary.
        text: as for `models.find_text`; None takes the default text.
        tokens: how many tokens are read; None takes 2,048, or the full windows of a shorter text.
        window: the tokens of a window; None takes 512, or the model's context if that is shorter.
        kv: how keys and values are quantized, as in a KV cache; the reference's stay float32.
        progress: called with the number of windows done and of all windows.

    Returns:
        The quality; without a reference only the perplexity.

    Raises:
        UnsupportedError: when a model cannot be run, or has no tokenizer.
        QuantError: when the text is too short, or the vocabularies differ.
    """
    config = model.runnable_config()
    found = find_text(text or default_text_name())
    windows = evaluation_windows(model, found.content, tokens=tokens, window=window)
    batch = batch_size(config, windows)
    candidate = logits_function(stacked(model.params()), config, kv)
    kv_text = None if kv is None else str(kv)
    if against is None:
        result = perplexity(candidate, windows, batch_size=batch, progress=progress)
        return Quality(found.name, windows.shape[1] - 1, result, kv=kv_text)
    other = against.runnable_config()
    if other.vocab != config.vocab:
        raise QuantError(
            f"{model.name} has a vocabulary of {config.vocab} tokens and {against.name} of {other.vocab}; "
            "compare models of the same vocabulary"
        )
    reference = logits_function(stacked(against.params()), other)
    both = compare_models(reference, candidate, windows, batch_size=batch, progress=progress)
    sqnr, notes = weight_sqnr(model, against)
    return Quality(found.name, windows.shape[1] - 1, both.candidate, both, sqnr, notes, kv_text)


def evaluation_windows(model: Model, text: str, *, tokens: int | None = None, window: int | None = None) -> np.ndarray:
    """Cuts a text into windows of token ids.

    Args:
        model: a model that can be run.
        text: the text itself.
        tokens: as in `evaluate`.
        window: as in `evaluate`.

    Returns:
        Token ids `[windows, window + 1]`: the inputs, and the token after them.

    Raises:
        QuantError: when the text is too short, or a window is longer than the model's context.
    """
    context = model.runnable_config().context
    if window is not None and window > context:
        raise QuantError(f"window is {window} tokens, more than the context of {model.name}, {context}")
    if window is None:
        window = min(WINDOW, context)
    ids = model.readable_tokenizer().encode(text)
    if tokens is not None:
        return token_windows(ids, length=window, limit=tokens)
    return token_windows(ids, length=window)[: max(TOKENS // window, 1)]


def batch_size(config: DecoderConfig, windows: np.ndarray) -> int:
    """The windows of a batch: as many as keep the logits within 256 MiB, at most 16."""
    return min(max(_LOGIT_BYTES // (4 * config.vocab * (windows.shape[1] - 1)), 1), 16)


def stacked(params: PyTree) -> PyTree:
    """The parameters as JAX arrays, with q/k/v and gate/up fused where quantized, experts and identical layers stacked."""
    return stack_layers(stack_experts(fuse_weights(jax.tree.map(jnp.asarray, params))))


def logits_function(params: PyTree, config: DecoderConfig, kv: KVPolicy | None = None) -> Callable[[Any], Any]:
    """The model as a function of tokens, compiled once per structure of the parameters."""
    return functools.partial(_logits, params, config=config, kv=kv)


@functools.partial(jax.jit, static_argnames=("config", "kv"))
def _logits(params: PyTree, tokens: jax.Array, *, config: DecoderConfig, kv: KVPolicy | None) -> jax.Array:
    return transparent(functools.partial(forward, kv=kv))(params, tokens, config)


def weight_sqnr(model: Model, against: Model) -> tuple[dict[str, float], tuple[str, ...]]:
    """The SQNR of each parameter of two or more axes.

    Args:
        model: the model.
        against: the reference that its parameters are compared with.

    Returns:
        Decibels by path, infinite where the two are equal; and a note if the models cannot be compared.
    """
    if model.facts.get("rotation_seed") != against.facts.get("rotation_seed"):
        return {}, ("no SQNR of the weights: one model's residual stream is rotated and the other's is not",)
    if {p: i.shape for p, i in model.info.items()} != {p: i.shape for p, i in against.info.items()}:
        return {}, ("no SQNR of the weights: the models have different parameters",)
    if model.config != against.config:
        return {}, ("no SQNR of the weights: the models order their rows differently",)
    matrices = [path for path, info in model.info.items() if len(info.shape) >= 2]
    return {path: sqnr_db(decoded(against.load(path)), decoded(model.load(path))) for path in matrices}, ()

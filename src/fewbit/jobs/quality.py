"""How good a model is on a text: perplexity, and its distance from another model, in outputs and in weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import models
from ..errors import QuantError
from ..evaluate import Comparison, Perplexity, compare_models, perplexity, sqnr_db, token_windows
from ..kvcache import KVPolicy
from ..ops import transparent
from .model import Model, decoded

TOKENS = 2048
WINDOW = 512
_LOGIT_BYTES = 1 << 28  # of one batch


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a model does on a text.

    Attributes:
        text: the name of the text.
        window: how many tokens a window reads.
        perplexity: the model's perplexity.
        against: it beside the reference, when there is one.
        sqnr_db: for each parameter whose values differ from the reference's, the signal-to-noise ratio.
        notes: what was left out, and why.
        kv: how the model's keys and values were quantized; None: not at all.
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
    """The quality of a model on a text, alone or against a reference.

    The network runs with the leaves as they are, quantized ones through `fb.transparent`.

    Args:
        model: a model that can be run.
        against: the reference, with the same tokens.
        text: as for `models.find_text`; None takes the default text.
        tokens: how many tokens are read; None takes 2,048, or as many whole windows as a shorter text has.
        window: how many tokens a window reads; None takes 512, or the model's context when it is shorter.
        kv: how keys and values are quantized, as a cache would keep them; the reference keeps its own in float32.
        progress: called with the windows that are done and all windows.

    Returns:
        The quality; without a reference only the perplexity.

    Raises:
        UnsupportedError: when a model cannot be run, or has no tokenizer.
        QuantError: when the text is too short, or the models do not have the same vocabulary.
    """
    config = model.runnable_config()
    found = models.find_text(text or models.default_text_name())
    windows = evaluation_windows(model, found.content, tokens=tokens, window=window)
    batch = batch_size(config, windows)
    candidate = logits_function(runnable_params(model), config, kv)
    kept = None if kv is None else str(kv)
    if against is None:
        result = perplexity(candidate, windows, batch_size=batch, progress=progress)
        return Quality(found.name, windows.shape[1] - 1, result, kv=kept)
    other = against.runnable_config()
    if other.vocab != config.vocab:
        raise QuantError(
            f"{model.name} has {config.vocab} tokens and {against.name} {other.vocab}; only alike models can be compared"
        )
    reference = logits_function(runnable_params(against), other)
    both = compare_models(reference, candidate, windows, batch_size=batch, progress=progress)
    sqnr, notes = weight_sqnr(model, against)
    return Quality(found.name, windows.shape[1] - 1, both.candidate, both, sqnr, notes, kept)


def evaluation_windows(model: Model, text: str, *, tokens: int | None = None, window: int | None = None) -> np.ndarray:
    """The windows of a text that a model is evaluated on.

    Args:
        model: a model that can be run.
        text: the text itself.
        tokens: as in `evaluate`.
        window: as in `evaluate`.

    Returns:
        Token ids `[windows, window + 1]`: what is read, and the token after it.

    Raises:
        QuantError: when the text is too short, or a window is longer than the model's context.
    """
    context = model.runnable_config().context
    if window is not None and window > context:
        raise QuantError(f"window is {window} tokens, more than the context of {model.name}, {context}")
    length = min(WINDOW, context) if window is None else window
    ids = model.readable_tokenizer().encode(text)
    if tokens is not None:
        return token_windows(ids, length=length, limit=tokens)
    return token_windows(ids, length=length)[: max(TOKENS // length, 1)]


def batch_size(config: models.LlamaConfig, windows: np.ndarray) -> int:
    """How many windows go through the model at once: as many as keep their logits within 256 MiB."""
    return min(max(_LOGIT_BYTES // (4 * config.vocab * (windows.shape[1] - 1)), 1), 16)


def runnable_params(model: Model) -> Any:
    """The parameters as jax arrays, alike layers stacked so that one of them is compiled."""
    return stacked(model.params())


def stacked(params: Any) -> Any:
    """A tree of parameters as jax arrays, products with the same input joined where they are quantized, alike layers stacked."""
    return models.stack_layers(models.join_products(jax.tree.map(jnp.asarray, params)))


def logits_function(params: Any, config: models.LlamaConfig, kv: KVPolicy | None = None) -> Callable[[Any], Any]:
    """The model as a function of tokens, compiled once for all parameters of one structure."""
    return functools.partial(_logits, params, config=config, kv=kv)


@functools.partial(jax.jit, static_argnames=("config", "kv"))
def _logits(params: Any, tokens: Any, *, config: models.LlamaConfig, kv: KVPolicy | None) -> Any:
    return transparent(functools.partial(models.forward, kv=kv))(params, tokens, config)


def weight_sqnr(model: Model, against: Model) -> tuple[dict[str, float], tuple[str, ...]]:
    """The signal-to-noise ratio of each parameter of two or more axes, and why it was left out if it was.

    Args:
        model: the model.
        against: the model that its parameters are compared with.

    Returns:
        Decibels by path, infinite where the two are equal, and the notes.
    """
    if model.facts.get("rotation_seed") != against.facts.get("rotation_seed"):
        return {}, (
            "no signal-to-noise ratio of the weights: one model's residual stream is rotated and the other's is not",
        )
    if {p: i.shape for p, i in model.info.items()} != {p: i.shape for p, i in against.info.items()}:
        return {}, ("no signal-to-noise ratio of the weights: the models have different parameters",)
    if model.config != against.config:
        return {}, ("no signal-to-noise ratio of the weights: the models order their rows differently",)
    matrices = [path for path, info in model.info.items() if len(info.shape) >= 2]
    return {path: sqnr_db(decoded(against.load(path)), decoded(model.load(path))) for path in matrices}, ()

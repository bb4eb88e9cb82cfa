"""Evaluates a language model on a text, alone or against a reference."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from ..errors import QuantError, UnsupportedError
from ..evaluate.engine import Engine
from ..evaluate.metrics import sqnr_db
from ..evaluate.outputs import Outputs, relative_errors
from ..evaluate.perplexity import Comparison, LogitsFn, Perplexity, compare_models, perplexity, token_windows
from ..evaluate.transformers_engine import TransformersEngine, TransformersNetwork
from ..kvcache.policy import KVPolicy
from ..models.config import DecoderConfig
from ..models.decoder import forward, stack_layers
from ..models.installed import default_text_name, find_text
from ..models.joined import fuse_weights, stack_experts
from ..models.names import params_from_paths, shapes
from ..ops.interpret.transparent import transparent
from .activations import Activations, with_int8_activations
from .engine import as_stored, choose_engine, transformers_of
from .model import Model, Value, decoded

TOKENS = 2048
WINDOW = 512
_LOGIT_BYTES = 1 << 28  # of one batch
_RECORDED_BYTES = 1 << 30

Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""


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
        activations: which activations were quantized to int8; None: none but those of the model's own policies.
        engine: the program that ran the models.
        blocks: the relative error of each block's output on the first window, by module, if transformers ran the models.
    """

    text: str
    window: int
    perplexity: Perplexity
    against: Comparison | None = None
    sqnr_db: dict[str, float] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kv: str | None = None
    activations: Activations | None = None
    engine: str = "fewbit"
    blocks: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DecoderEngine(Engine):
    """fewbit's own decoder.

    Attributes:
        config: the model's configuration.
        kv: how keys and values are quantized; None: not at all.
        int8_activations: whether the activations of quantized weights are quantized, too.
    """

    config: DecoderConfig
    kv: KVPolicy | None = None
    int8_activations: bool = False

    def network(self, paths: Iterable[str], load: Callable[[str], Value]) -> LogitsFn:
        """The model with these weights; quantized ones run as they are, through `fb.transparent`."""
        own = shapes(self.config)
        params = params_from_paths({path: load(path) for path in paths if path in own}, self.config)
        activations = None
        if self.int8_activations:
            params, activations = with_int8_activations(params)
        return DecoderNetwork(stacked(params), self.config, self.kv, activations)


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderNetwork:
    """fewbit's own decoder with its weights, compiled once per structure of the parameters.

    Attributes:
        params: the parameters, as `stacked` gives them.
        config: the model's configuration.
        kv: how keys and values are quantized; None: not at all.
        activations: which activations are quantized to int8; None: those of the weights' own policies.
    """

    params: PyTree
    config: DecoderConfig
    kv: KVPolicy | None = None
    activations: Activations | None = None

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return _logits(self.params, tokens, config=self.config, kv=self.kv)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The float model, evaluated on a text.

    Attributes:
        model: the model.
        engine: the program that runs it.
        windows: the windows of the text.
        perplexity: its perplexity.
        logits: its logits for a batch of tokens.
        blocks: the output of each block for the first window, if transformers runs it.
    """

    model: Model
    engine: Engine
    windows: np.ndarray
    perplexity: Perplexity
    logits: LogitsFn
    blocks: Outputs


def baseline(
    model: Model,
    windows: np.ndarray,
    *,
    engine: str = "fewbit",
    int8_activations: bool = False,
    progress: Progress | None = None,
) -> Baseline:
    """Evaluates the model on the windows that others are compared with.

    Its logits are kept if they take less than 1 GiB, and then its parameters are not; else they are recomputed for each
    candidate.

    Args:
        model: a model that the engine can run; for transformers as `as_stored` gives it.
        windows: the windows of a text, from `evaluation_windows`.
        engine: the result of `choose_engine`.
        int8_activations: whether candidates quantize the activations of their quantized weights; the model itself does not.
        progress: called with the number of windows done and of all windows.

    Returns:
        The reference that `compare` takes.

    Raises:
        UnsupportedError: when the engine cannot run the model, or it is no causal language model.
    """
    runs = engine_of(model, engine, int8_activations=int8_activations)
    check_language_model(runs)
    network = checked_network(engine_of(model, engine), model.info, model.load)
    blocks = block_outputs(network, windows)
    logits, result = recorded(network, windows, vocab=runs.vocab, progress=progress)
    return Baseline(model, runs, windows, result, logits, blocks)


def engine_of(model: Model, name: str, kv: KVPolicy | None = None, *, int8_activations: bool = False) -> Engine:
    """The engine of that name for a model.

    Args:
        model: the model; for transformers as `as_stored` gives it.
        name: the result of `choose_engine`.
        kv: how keys and values are quantized.
        int8_activations: as in `DecoderEngine`.

    Returns:
        The engine; no weight is read.

    Raises:
        UnsupportedError: when the engine cannot run the model, or cannot quantize keys and values or activations.
    """
    if name == "fewbit":
        config = model.runnable_config()
        return DecoderEngine("fewbit", config.vocab, config.context, config, kv, int8_activations)
    if kv is not None:
        raise UnsupportedError(
            "only fewbit's own decoder quantizes keys and values: leave out --kv, or take --engine fewbit"
        )
    if int8_activations:
        raise UnsupportedError(
            "only fewbit's own decoder quantizes activations: leave out --activations, or take --engine fewbit"
        )
    return transformers_of(model)


def evaluate(
    model: Model,
    *,
    against: Model | None = None,
    text: str | None = None,
    tokens: int | None = None,
    window: int | None = None,
    kv: KVPolicy | None = None,
    int8_activations: bool = False,
    engine: str = "auto",
    progress: Progress | None = None,
) -> Quality:
    """Measures perplexity, and the divergence from a reference if there is one.

    In fewbit's decoder quantized leaves stay quantized: the model runs through `fb.transparent`. transformers runs the
    decoded weights in float32. The reference is in memory first and then the model, unless the reference's logits take more
    than 1 GiB; then both are.

    Args:
        model: a causal language model that the engine can run.
        against: the reference, with the same vocabulary.
        text: as for `models.find_text`; None takes the default text.
        tokens: how many tokens are read; None takes 2,048, or the full windows of a shorter text.
        window: the tokens of a window; None takes 512, or the model's context if that is shorter.
        kv: how keys and values are quantized, as in a KV cache; the reference's stay float32.
        int8_activations: whether the activations of the model's quantized weights are quantized, too; not the reference's.
        engine: as for `choose_engine`.
        progress: called with the number of windows done and of all windows.

    Returns:
        The quality; without a reference only the perplexity.

    Raises:
        UnsupportedError: when a model cannot be run, has no tokenizer, or is no causal language model.
        QuantError: when the text is too short, or the vocabularies differ.
    """
    name = choose_engine(engine, model, against)
    if name == "transformers":
        model, against = as_stored(model), against and as_stored(against)
    runs = engine_of(model, name, kv, int8_activations=int8_activations)
    check_language_model(runs)
    found = find_text(text or default_text_name())
    windows = evaluation_windows(model, found.content, tokens=tokens, window=window, engine=runs)
    if against is None:
        network = checked_network(runs, model.info, model.load)
        batch = batch_size(runs.vocab, windows)
        result = perplexity(network, windows, batch_size=batch, progress=progress)
        own = quantized_activations(network)
        return Quality(found.name, windows.shape[1] - 1, result, kv=_kv_text(kv), activations=own, engine=runs.title)
    _check_same_vocabulary(model, runs, against, engine_of(against, name))
    base = baseline(against, windows, engine=name, progress=part_of(progress, 0))
    return compared(model, base, text=found.name, kv=kv, int8_activations=int8_activations, progress=part_of(progress, 1))


def compared(
    model: Model,
    base: Baseline,
    *,
    text: str,
    kv: KVPolicy | None = None,
    int8_activations: bool = False,
    progress: Progress | None = None,
) -> Quality:
    """Measures a stored model against a reference that was evaluated already.

    Args:
        model: a model that the reference's engine can run; for transformers as `as_stored` gives it.
        base: the reference, with the same vocabulary.
        text: the name of the text of its windows.
        kv: as in `evaluate`.
        int8_activations: as in `evaluate`.
        progress: called with the number of windows done and of all windows.

    Returns:
        The quality.

    Raises:
        UnsupportedError: when the engine cannot run the model, or it is no causal language model.
        QuantError: when the vocabularies differ.
    """
    name = "fewbit" if isinstance(base.engine, DecoderEngine) else "transformers"
    runs = engine_of(model, name, kv, int8_activations=int8_activations)
    _check_same_vocabulary(model, runs, base.model, base.engine)
    network = checked_network(runs, model.info, model.load)
    batch = batch_size(runs.vocab, base.windows)
    both = compare_models(base.logits, network, base.windows, batch_size=batch, progress=progress)
    sqnr, notes = weight_sqnr(model, base.model)
    return Quality(
        text=text,
        window=base.windows.shape[1] - 1,
        perplexity=both.candidate,
        against=both,
        sqnr_db=sqnr,
        notes=(*notes, *(network.notes if isinstance(network, TransformersNetwork) else ())),
        kv=_kv_text(kv),
        activations=quantized_activations(network),
        engine=runs.title,
        blocks=relative_errors(base.blocks, block_outputs(network, base.windows)),
    )


def _check_same_vocabulary(model: Model, runs: Engine, against: Model, other: Engine) -> None:
    if other.vocab != runs.vocab:
        raise QuantError(
            f"{model.name} has a vocabulary of {runs.vocab} tokens and {against.name} of {other.vocab}; "
            "compare models of the same vocabulary"
        )


def _kv_text(kv: KVPolicy | None) -> str | None:
    return None if kv is None else str(kv)


def part_of(progress: Progress | None, part: int) -> Progress | None:
    """The progress of one of two parts of equal length, as progress of both."""
    if progress is None:
        return None
    return lambda done, total: progress(part * total + done, 2 * total)


def check_language_model(engine: Engine) -> None:
    """Checks that an engine's architecture predicts the next token.

    Raises:
        UnsupportedError: when it does not.
    """
    if isinstance(engine, TransformersEngine) and not engine.is_language_model:
        raise UnsupportedError(
            f"{engine.source} is a {engine.cls.__name__}, no causal language model, so it has no perplexity; compare its "
            "outputs with those of the float model: `fewbit eval MODEL --against SOURCE`"
        )


def checked_network(engine: Engine, paths: Iterable[str], load: Callable[[str], Value]) -> LogitsFn:
    """The network of a language model. One that transformers runs is checked to be causal.

    Raises:
        QuantError: when the weights do not fit the architecture.
        UnsupportedError: when logits depend on later tokens.
    """
    network = engine.network(paths, load)
    if isinstance(network, TransformersNetwork) and engine.vocab is not None:
        network.check_causal(engine.vocab)
    return network


def block_outputs(network: LogitsFn, windows: np.ndarray) -> Outputs:
    """The output of each block for the first window. It is empty unless transformers runs the network."""
    if not isinstance(network, TransformersNetwork):
        return {}
    return network.blocks({"input_ids": np.asarray(windows[:1, :-1], np.int64)})


def quantized_activations(network: LogitsFn) -> Activations | None:
    """Which activations a network quantizes to int8 beyond the weights' own policies; None: none."""
    if not isinstance(network, DecoderNetwork):
        return None
    return network.activations


def recorded(
    network: LogitsFn, windows: np.ndarray, *, vocab: int | None, progress: Progress | None = None
) -> tuple[LogitsFn, Perplexity]:
    """The logits of all windows, as a function of the tokens.

    It does not run the network again if the logits take less than 1 GiB.

    Args:
        network: the network.
        windows: the windows of the text.
        vocab: the vocabulary size.
        progress: called with the number of windows done and of all windows.

    Returns:
        The function, for batches of `batch_size` windows, and the perplexity.
    """
    cache: dict[bytes, jax.Array] = {}
    fits = 4 * (vocab or 1) * windows.shape[0] * (windows.shape[1] - 1) < _RECORDED_BYTES

    def kept(tokens: jax.Array) -> jax.Array:
        logits = network(tokens)
        if fits:
            cache[np.asarray(tokens).tobytes()] = logits
        return logits

    result = perplexity(kept, windows, batch_size=batch_size(vocab, windows), progress=progress)
    if fits:
        return lambda tokens: cache[np.asarray(tokens).tobytes()], result
    return network, result


def evaluation_windows(
    model: Model, text: str, *, tokens: int | None = None, window: int | None = None, engine: Engine | None = None
) -> np.ndarray:
    """Cuts a text into windows of token ids.

    If the tokenizer has start tokens, such as a beginning-of-text token, they replace the first tokens of each window, as in
    llama.cpp's perplexity.

    Args:
        model: a model that can be run.
        text: the text itself.
        tokens: as in `evaluate`.
        window: as in `evaluate`.
        engine: the engine that runs the model; None: fewbit's decoder.

    Returns:
        Token ids `[windows, window + 1]`: the inputs, and the token after them.

    Raises:
        QuantError: when the text is too short, `tokens` is not a positive multiple of the window, a window is longer than the
            model's context or has no room for a token of the text, or a token has no logit.
    """
    runs = engine or engine_of(model, "fewbit")
    if window is not None and runs.context is not None and window > runs.context:
        raise QuantError(f"window is {window} tokens, more than the context of {model.name}, {runs.context}")
    if window is None:
        window = min(WINDOW, runs.context or WINDOW)
    if window < 1:
        raise QuantError(f"window is {window} tokens, must be at least 1")
    if tokens is not None and (tokens < window or tokens % window):
        raise QuantError(f"tokens is {tokens}, must be one or more whole windows of {window} tokens")
    tokenizer = model.readable_tokenizer()
    ids, start_ids = tokenizer.encode(text), tokenizer.start_ids
    if runs.vocab is not None:
        model.check_tokens(np.append(ids, start_ids), runs.vocab)
    if len(start_ids) > window:
        raise QuantError(
            f"window is {window} tokens, but the tokenizer of {model.name} begins every text with {len(start_ids)}"
        )
    windows = token_windows(ids, length=window, limit=tokens)
    if tokens is None:
        windows = windows[: max(TOKENS // window, 1)]
    windows[:, : len(start_ids)] = start_ids
    return windows


def batch_size(vocab: int | None, windows: np.ndarray) -> int:
    """The number of windows in a batch. It is as many as keep the logits within 256 MiB, at most 16."""
    return min(max(_LOGIT_BYTES // (4 * (vocab or 1) * (windows.shape[1] - 1)), 1), 16)


def stacked(params: PyTree) -> PyTree:
    """The parameters as JAX arrays, fused and stacked.

    q/k/v and gate/up are fused where quantized; experts and identical layers are stacked.
    """
    return stack_layers(stack_experts(fuse_weights(jax.tree.map(jnp.asarray, params))))


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
    if model.facts.get("scaling") != against.facts.get("scaling"):
        return {}, ("no SQNR of the weights: scales of inputs are folded into one model and not into the other",)
    if {p: i.shape for p, i in model.info.items()} != {p: i.shape for p, i in against.info.items()}:
        return {}, ("no SQNR of the weights: the models have different parameters",)
    if model.config != against.config:
        return {}, ("no SQNR of the weights: the models order their rows differently, or rotate or scale other inputs",)
    matrices = [path for path, info in model.info.items() if len(info.shape) >= 2]
    return {path: sqnr_db(decoded(against.load(path)), decoded(model.load(path))) for path in matrices}, ()

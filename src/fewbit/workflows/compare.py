"""Compares several recipes on one model, in memory."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..evaluate.engine import Engine
from ..evaluate.outputs import Outputs, relative_errors
from ..evaluate.perplexity import Comparison, LogitsFn, Perplexity, compare_models
from ..models.names import params_from_paths
from ..recipe.plan import Plan
from .activations import Activations
from .evaluate import (
    DecoderEngine,
    Progress,
    batch_size,
    block_outputs,
    check_language_model,
    checked_network,
    engine_of,
    quantized_activations,
    recorded,
)
from .model import Model, Value, decoded
from .tensors import TensorResult, quantized_tensors, worst


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A quantized model and its quality.

    Attributes:
        recipe: the name of the recipe.
        plan: its plan.
        params: the pytree with quantized leaves, or for transformers the parameters by name; None once released.
        tensors: the result of each tensor.
        nbytes: the bytes of its arrays.
        bits_per_weight: `8 * nbytes` over the number of elements.
        quality: its perplexity and divergence from the float model.
        seconds_to_quantize: how long quantizing took, compilation included.
        seconds_to_evaluate: how long evaluating took, the float model's part and compilation included.
        blocks: the relative error of each block's output on the first window, by module, if transformers ran the model.
        activations: which activations were quantized to int8; None: none but those of the recipe.
    """

    recipe: str
    plan: Plan
    params: Any
    tensors: tuple[TensorResult, ...]
    nbytes: int
    bits_per_weight: float
    quality: Comparison
    seconds_to_quantize: float
    seconds_to_evaluate: float
    blocks: dict[str, float] = dataclasses.field(default_factory=dict)
    activations: Activations | None = None

    @property
    def worst(self) -> list[TensorResult]:
        """The five tensors of lowest SQNR."""
        return worst(self.tensors)


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
    """Evaluates the float model on the windows.

    Its logits are kept if they take less than 1 GiB, and then its parameters are not; else they are recomputed for each
    candidate.

    Args:
        model: a model that the engine can run; for transformers as `as_stored` gives it.
        windows: the windows of a text, from `evaluation_windows`.
        engine: the result of `choose_engine`.
        int8_activations: whether candidates quantize the activations of their quantized weights.
        progress: called with the number of windows done and of all windows.

    Returns:
        The reference that `compare` takes.

    Raises:
        UnsupportedError: when the engine cannot run the model, or it is no causal language model.
    """
    runs = engine_of(model, engine, int8_activations=int8_activations)
    check_language_model(runs)
    network = checked_network(runs, model.info, lambda path: decoded(model.load(path)))
    blocks = block_outputs(network, windows)
    logits, result = recorded(network, windows, vocab=runs.vocab, progress=progress)
    return Baseline(model, runs, windows, result, logits, blocks)


def compare(base: Baseline, plan: Plan, *, on_tensor: Callable[[TensorResult], None] | None = None) -> Candidate:
    """Quantizes the model in memory and compares it with the float model.

    Args:
        base: the float model on its windows.
        plan: a plan for the model.
        on_tensor: called after each tensor.

    Returns:
        The candidate, with its parameters.

    Raises:
        QuantError: when a parameter is not finite.
    """
    start = time.perf_counter()
    values, results = {}, []
    for value, result in quantized_tensors(base.model, plan):
        values[result.path] = value
        results.append(result)
        if on_tensor is not None:
            on_tensor(result)
    return measured(base, plan, values, tuple(results), time.perf_counter() - start)


def measured(
    base: Baseline, plan: Plan, values: Mapping[str, Value], results: tuple[TensorResult, ...], seconds: float
) -> Candidate:
    """Compares parameters that `plan` quantized, in `seconds`, with the float model."""
    start = time.perf_counter()
    params: Any = values
    if isinstance(base.engine, DecoderEngine):
        params = params_from_paths(values, base.engine.config)
    network = base.engine.network(values, values.__getitem__)
    batch = batch_size(base.engine.vocab, base.windows)
    quality = compare_models(base.logits, network, base.windows, batch_size=batch)
    blocks = relative_errors(base.blocks, block_outputs(network, base.windows))
    evaluated = time.perf_counter() - start
    nbytes = sum(result.bytes_after for result in results)
    bits = 8 * nbytes / base.model.size
    activations = quantized_activations(network)
    return Candidate(plan.recipe, plan, params, results, nbytes, bits, quality, seconds, evaluated, blocks, activations)


def released(candidate: Candidate) -> Candidate:
    """Drops the candidate's parameters, to free their memory.

    Args:
        candidate: the result of `compare`.

    Returns:
        The candidate with `params=None`.
    """
    return dataclasses.replace(candidate, params=None)

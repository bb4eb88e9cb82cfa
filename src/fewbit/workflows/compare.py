"""Compares several recipes on one model, in memory."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..evaluate.perplexity import Comparison, Perplexity, compare_models, perplexity
from ..models.names import params_from_paths
from ..recipe.plan import Plan
from .evaluate import batch_size, logits_function, stacked
from .model import Model
from .tensors import TensorResult, quantized_tensors, worst


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A quantized model and its quality.

    Attributes:
        recipe: the name of the recipe.
        plan: its plan.
        params: the pytree with quantized leaves; None once released.
        tensors: the result of each tensor.
        nbytes: the bytes of its arrays.
        bits_per_weight: `8 * nbytes` over the number of elements.
        quality: its perplexity and divergence from the float model.
        seconds_to_quantize: how long quantizing took, compilation included.
        seconds_to_evaluate: how long evaluating took, the float model's part and compilation included.
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

    @property
    def worst(self) -> list[TensorResult]:
        """The five tensors of lowest SQNR."""
        return worst(self.tensors)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The float model, evaluated on a text.

    Attributes:
        model: the model.
        params: its dequantized parameters, with identical layers stacked.
        windows: the windows of the text.
        perplexity: its perplexity.
        logits: its logits for a batch of tokens.
    """

    model: Model
    params: Any
    windows: np.ndarray
    perplexity: Perplexity
    logits: Callable[[Any], Any]


_CACHED_BYTES = 1 << 30


def baseline(model: Model, windows: np.ndarray, *, progress: Callable[[int, int], None] | None = None) -> Baseline:
    """Evaluates the float model on the windows.

    Its logits are cached if they take less than 1 GiB, else recomputed for each candidate.

    Args:
        model: a model that can be run.
        windows: the windows of a text, from `evaluation_windows`.
        progress: called with the number of windows done and of all windows.

    Returns:
        The reference that `compare` takes.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    config = model.runnable_config()
    params = stacked(model.float_params())
    logits = logits_function(params, config)
    if 4 * config.vocab * windows.shape[0] * (windows.shape[1] - 1) < _CACHED_BYTES:
        logits = _cached(logits)
    result = perplexity(logits, windows, batch_size=batch_size(config, windows), progress=progress)
    return Baseline(model, params, windows, result, logits)


def _cached(logits: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Caches the logits of each batch of tokens."""
    cache: dict[bytes, jax.Array] = {}

    def cached(tokens: jax.Array) -> jax.Array:
        key = np.asarray(tokens).tobytes()
        if key not in cache:
            cache[key] = logits(tokens)
        return cache[key]

    return cached


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
    params = params_from_paths(values, base.model.runnable_config())
    return measured(base, plan, params, tuple(results), time.perf_counter() - start)


def measured(base: Baseline, plan: Plan, params: PyTree, results: tuple[TensorResult, ...], seconds: float) -> Candidate:
    """Compares parameters that `plan` quantized, in `seconds`, with the float model."""
    start = time.perf_counter()
    config = base.model.runnable_config()
    logits = logits_function(stacked(params), config)
    quality = compare_models(base.logits, logits, base.windows, batch_size=batch_size(config, base.windows))
    evaluated = time.perf_counter() - start
    nbytes = sum(result.bytes_after for result in results)
    bits = 8 * nbytes / base.model.size
    return Candidate(plan.recipe, plan, params, results, nbytes, bits, quality, seconds, evaluated)


def released(candidate: Candidate) -> Candidate:
    """Drops the candidate's parameters, to free their memory.

    Args:
        candidate: the result of `compare`.

    Returns:
        The candidate with `params=None`.
    """
    return dataclasses.replace(candidate, params=None)

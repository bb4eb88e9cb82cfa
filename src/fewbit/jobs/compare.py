"""Several recipes on one model, in memory, side by side: bytes, bits per weight, quality."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .. import models
from ..evaluate import Comparison, Perplexity, compare_models, perplexity
from ..recipe import Plan
from .model import Model
from .quality import batch_size, logits_function, stacked
from .quantize import worst
from .tensors import TensorResult, quantized_tensors


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One recipe's model.

    Attributes:
        recipe: its name.
        plan: its plan.
        params: the tree with quantized leaves; None when it was released.
        tensors: what happened to each tensor.
        nbytes: the bytes of its arrays.
        bits_per_weight: eight times these over the number of elements.
        quality: it beside the float model.
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
        """The five tensors that lost most."""
        return worst(self.tensors)


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The float model, and what its logits on the windows of a text are.

    Attributes:
        model: the model.
        params: its parameters, decoded, with alike layers stacked.
        windows: the windows of the text.
        perplexity: its perplexity.
        logits: its logits for a batch of tokens.
    """

    model: Model
    params: Any
    windows: np.ndarray
    perplexity: Perplexity
    logits: Callable[[Any], Any]


_REMEMBERED_BYTES = 1 << 30


def baseline(model: Model, windows: np.ndarray, *, progress: Callable[[int, int], None] | None = None) -> Baseline:
    """The float model on the windows. Its logits are kept when they take less than 1 GiB, else computed anew each time.

    Args:
        model: a model that can be run.
        windows: the windows of a text, from `evaluation_windows`.
        progress: called with the windows that are done and all windows.

    Returns:
        The float model, measured: what `compare` sets candidates beside.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    config = model.runnable_config()
    params = stacked(model.float_params())
    logits = logits_function(params, config)
    if 4 * config.vocab * windows.shape[0] * (windows.shape[1] - 1) < _REMEMBERED_BYTES:
        logits = _remembering(logits)
    result = perplexity(logits, windows, batch_size=batch_size(config, windows), progress=progress)
    return Baseline(model, params, windows, result, logits)


def _remembering(logits: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, which computes each batch of tokens once."""
    known: dict[bytes, jax.Array] = {}

    def remembered(tokens: Any) -> jax.Array:
        key = np.asarray(tokens).tobytes()
        if key not in known:
            known[key] = logits(tokens)
        return known[key]

    return remembered


def compare(base: Baseline, plan: Plan, *, on_tensor: Callable[[TensorResult], None] | None = None) -> Candidate:
    """A plan's model beside the float model, quantized in memory.

    Args:
        base: the float model on its windows.
        plan: a plan for it.
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
    params = models.params_from_paths(values, base.model.runnable_config())
    return measured(base, plan, params, tuple(results), time.perf_counter() - start)


def measured(base: Baseline, plan: Plan, params: Any, results: tuple[TensorResult, ...], seconds: float) -> Candidate:
    """The candidate of parameters that are quantized already.

    Args:
        base: the float model on its windows.
        plan: the plan that they were quantized by.
        params: the tree of parameters.
        results: what happened to each tensor.
        seconds: how long quantizing took.
    """
    start = time.perf_counter()
    config = base.model.runnable_config()
    logits = logits_function(stacked(params), config)
    quality = compare_models(base.logits, logits, base.windows, batch_size=batch_size(config, base.windows))
    evaluated = time.perf_counter() - start
    nbytes = sum(result.bytes_after for result in results)
    bits = 8 * nbytes / base.model.size
    return Candidate(plan.recipe, plan, params, results, nbytes, bits, quality, seconds, evaluated)


def released(candidate: Candidate) -> Candidate:
    """The candidate without its parameters, so that their memory can be used for the next.

    Args:
        candidate: what `compare` gave.

    Returns:
        The same, with None for its parameters.
    """
    return dataclasses.replace(candidate, params=None)

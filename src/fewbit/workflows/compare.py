"""Compares several recipes on one model, in memory."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..evaluate.outputs import relative_errors
from ..evaluate.perplexity import Comparison, compare_models
from ..models.names import params_from_paths
from ..recipe.plan import Plan
from .activations import Activations
from .evaluate import Baseline, DecoderEngine, batch_size, block_outputs, quantized_activations
from .model import Value
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

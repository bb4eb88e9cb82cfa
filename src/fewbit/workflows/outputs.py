"""Compares the outputs of models that transformers runs: encoders, speech, vision, encoder-decoders."""

import dataclasses
import os
import time
from pathlib import Path

from ..errors import QuantError
from ..evaluate.model_inputs import ModelInputs, Signature, array_inputs, default_inputs, text_inputs
from ..evaluate.outputs import OutputQuality, Outputs, output_errors, relative_errors
from ..evaluate.transformers_engine import TransformersEngine, TransformersNetwork
from ..models.installed import default_text_name, find_text
from ..recipe.plan import Plan
from .engine import as_stored, choose_engine, transformers_of
from .evaluate import TOKENS, WINDOW, Progress, part_of, weight_sqnr
from .model import Model
from .tensors import TensorResult, quantized_tensors, worst


def evaluate_outputs(
    model: Model,
    against: Model,
    *,
    inputs: str | os.PathLike[str] | None = None,
    text: str | None = None,
    tokens: int | None = None,
    window: int | None = None,
    progress: Progress | None = None,
) -> OutputQuality:
    """Compares the outputs of a model that transformers runs with those of a reference.

    Args:
        model: the model.
        against: the reference, of the same architecture.
        inputs: as for `model_inputs`.
        text: as for `model_inputs`.
        tokens: as for `model_inputs`.
        window: as for `model_inputs`.
        progress: called with the number of examples done and of all examples, of both models.

    Returns:
        The error of each output and block.

    Raises:
        UnsupportedError: when transformers cannot run a model.
        QuantError: when the inputs cannot be read or do not fit, or the models' outputs differ in shape.
    """
    choose_engine("transformers", model, against)
    model, against = as_stored(model), as_stored(against)
    runs = transformers_of(model)
    given = model_inputs(model, runs.takes, inputs=inputs, text=text, tokens=tokens, window=window)
    reference = transformers_of(against).network(against.info, against.load)
    expected, expected_blocks = run_outputs(reference, given, part_of(progress, 0))
    del reference  # one model is in memory
    network = runs.network(model.info, model.load)
    found, blocks = run_outputs(network, given, part_of(progress, 1))
    sqnr, notes = weight_sqnr(model, against)
    notes = (*notes, *network.notes)
    errors = output_errors(expected, found)
    return OutputQuality(
        given.title, len(given.examples), errors, relative_errors(expected_blocks, blocks), sqnr, notes, runs.title
    )


def run_outputs(
    network: TransformersNetwork, given: ModelInputs, progress: Progress | None = None
) -> tuple[list[Outputs], Outputs]:
    """The outputs for each example, and the output of each block for the first."""
    outputs = []
    for example in given.examples:
        outputs.append(network.outputs(example))
        if progress is not None:
            progress(len(outputs), len(given.examples))
    return outputs, network.blocks(given.examples[0])


def model_inputs(
    model: Model,
    takes: Signature,
    *,
    inputs: str | os.PathLike[str] | None = None,
    text: str | None = None,
    tokens: int | None = None,
    window: int | None = None,
) -> ModelInputs:
    """The inputs that a model's outputs are compared on.

    Args:
        model: the model, as `as_stored` gives it.
        takes: what it takes.
        inputs: a `.npz` of arguments by name, a `.npy` of the main input, or a text with one input per line. None: `text`; for
            a model of tokens with a tokenizer the default text; else random inputs of a fixed seed.
        text: as for `models.find_text`, instead of `inputs`.
        tokens: the most tokens of all lines of a text together; default 2,048. Only for a text.
        window: the most tokens of a line; default 512. Only for a text.

    Returns:
        The inputs.

    Raises:
        UnsupportedError: when a text is given and the model has no tokenizer.
        QuantError: when both are given, or they cannot be read or do not fit.
    """
    if inputs is not None and text is not None:
        raise QuantError("give either --inputs or --text: exactly one of the two")
    name = text if inputs is None else os.fspath(inputs)
    has_arrays = inputs is not None and Path(inputs).suffix in (".npy", ".npz")
    is_random = name is None and (model.tokenizer is None or not takes.has_text)
    if (has_arrays or is_random) and (tokens, window) != (None, None):
        raise QuantError(f"tokens and window cut a text, and the inputs are {name or 'random numbers'}; leave them out")
    if inputs is not None and has_arrays:
        return array_inputs(Path(inputs), takes)
    if is_random:
        return default_inputs(takes)
    if not takes.has_text:
        raise QuantError(f"{takes.title} takes {takes.names[0]}, not a text; pass --inputs FILE.npz or FILE.npy")
    found, backend = find_text(name or default_text_name()), model.readable_tokenizer().backend

    def encode(line: str) -> list[int]:
        return backend.encode(line, add_special_tokens=True).ids

    # str.splitlines would also split at form feeds and U+2028; "\r\n" is read as "\n".
    lines = found.content.split("\n")
    tokens = TOKENS if tokens is None else tokens
    window = WINDOW if window is None else window
    return text_inputs(found.name, lines, encode, takes, tokens=tokens, window=window)


@dataclasses.dataclass(frozen=True)
class OutputBaseline:
    """The outputs of the float model.

    Attributes:
        model: the model.
        engine: its architecture in transformers.
        inputs: the inputs.
        outputs: its outputs for each example.
        blocks: the output of each block for the first example.
    """

    model: Model
    engine: TransformersEngine
    inputs: ModelInputs
    outputs: list[Outputs]
    blocks: Outputs


@dataclasses.dataclass(frozen=True)
class OutputCandidate:
    """A quantized model, and the errors of its outputs.

    Attributes:
        recipe: the name of the recipe.
        plan: its plan.
        tensors: the result of each tensor.
        nbytes: the bytes of its arrays.
        bits_per_weight: `8 * nbytes` over the number of elements.
        quality: the errors against the float model.
        seconds_to_quantize: how long quantizing took, compilation included.
        seconds_to_evaluate: how long running the model took.
    """

    recipe: str
    plan: Plan
    tensors: tuple[TensorResult, ...]
    nbytes: int
    bits_per_weight: float
    quality: OutputQuality
    seconds_to_quantize: float
    seconds_to_evaluate: float

    @property
    def worst(self) -> list[TensorResult]:
        """The five tensors of lowest SQNR."""
        return worst(self.tensors)


def output_baseline(model: Model, inputs: ModelInputs) -> OutputBaseline:
    """Runs the float model.

    Args:
        model: the model, as `as_stored` gives it.
        inputs: the result of `model_inputs`.

    Returns:
        The reference that `compare_outputs` takes.

    Raises:
        UnsupportedError: when transformers cannot run the model.
    """
    engine = transformers_of(model)
    outputs, blocks = run_outputs(engine.network(model.info, model.load), inputs)
    return OutputBaseline(model, engine, inputs, outputs, blocks)


def compare_outputs(base: OutputBaseline, plan: Plan) -> OutputCandidate:
    """Quantizes the model in memory and compares its outputs with the float model's.

    Args:
        base: the float model's outputs.
        plan: a plan for the model.

    Returns:
        The candidate, without its parameters.

    Raises:
        QuantError: when a parameter is not finite.
    """
    start = time.perf_counter()
    values, results = {}, []
    for value, result in quantized_tensors(base.model, plan):
        values[result.path] = value
        results.append(result)
    quantized = time.perf_counter()
    network = base.engine.network(values, values.__getitem__)
    outputs, blocks = run_outputs(network, base.inputs)
    quality = OutputQuality(
        base.inputs.title,
        len(base.inputs.examples),
        output_errors(base.outputs, outputs),
        relative_errors(base.blocks, blocks),
        {result.path: result.sqnr_db for result in results if result.sqnr_db is not None},
        network.notes,
        base.engine.title,
    )
    nbytes = sum(result.bytes_after for result in results)
    bits = 8 * nbytes / base.model.size
    evaluated = time.perf_counter() - quantized
    return OutputCandidate(plan.recipe, plan, tuple(results), nbytes, bits, quality, quantized - start, evaluated)

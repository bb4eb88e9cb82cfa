"""The demo: one model, five recipes, what each costs and writes; one of them really written, read back and measured."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import io, models
from ..errors import QuantError
from .compare import Baseline, Candidate, baseline, compare, measured, released
from .load import load
from .planning import plan_model
from .quality import evaluation_windows
from .quantize import Outcome, quantize
from .rotation import rotated
from .writing import Sample, write_on

RECIPES = ("int8", "nf4", "mxfp4", "nvfp4", "mixed")
WRITTEN = "nf4"
"""The recipe whose model is written, and read back before it is measured."""
CHAT_PROMPT = "Write two sentences about the ocean."
PLAIN_PROMPT = "The Queen said"
SAMPLE_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Demo:
    """The float model that the demo measures against.

    Attributes:
        base: the float model on the windows of the text.
        text: the name of the text.
        source: where the model was read from, as it was given.
        sample: what the float model writes.
        directory: where results are written.
    """

    base: Baseline
    text: str
    source: Path
    sample: Sample
    directory: Path


@dataclasses.dataclass(frozen=True)
class DemoStep:
    """One recipe's result.

    Attributes:
        candidate: the quantized model beside the float one.
        sample: what it writes.
        outcome: the directory that it was written to, for the one recipe that is.
    """

    candidate: Candidate
    sample: Sample
    outcome: Outcome | None


def demo(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    text: str | None = None,
    tokens: int | None = None,
    rotation_seed: int | None = None,
) -> Demo:
    """Opens the model of the demo and measures it as it is.

    Args:
        path: anything that `load` takes and that can be run.
        directory: where results are to be written; it is created.
        text: as for `models.find_text`.
        tokens: as in `evaluate`.
        rotation_seed: when given, the residual stream is rotated first, and the rotated float model is the reference.

    Returns:
        The float model, measured: what `steps` continues from.

    Raises:
        UnsupportedError: when the model cannot be run or has no tokenizer.
        QuantError: when it cannot be read, or the text is too short.
    """
    model = load(path)
    model.runnable_config()
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise QuantError(f"{directory} is a file; choose another --output")
    io.check_output(directory / f"model-{WRITTEN}", overwrite=True, sources=[model.path])
    found = models.find_text(text or models.default_text_name())
    windows = evaluation_windows(model, found.content, tokens=tokens)
    directory.mkdir(parents=True, exist_ok=True)
    source = model if rotation_seed is None else rotated(model, seed=rotation_seed)
    base = baseline(source, windows)
    return Demo(base, found.name, Path(path), _sample(base, None), directory)


def steps(started: Demo) -> Iterator[DemoStep]:
    """The recipes one after another; the parameters of a step are released when it is given.

    Args:
        started: what `demo` gave.
    """
    for recipe in RECIPES:
        plan = plan_model(started.base.model, recipe=recipe)
        outcome = None
        if recipe == WRITTEN:
            outcome = quantize(started.base.model, plan, started.directory / f"model-{recipe}", overwrite=True)
            params = load(outcome.path).params()
            candidate = measured(started.base, plan, params, outcome.tensors, outcome.seconds)
        else:
            candidate = compare(started.base, plan)
        sample = _sample(started.base, candidate.params)
        yield DemoStep(released(candidate), sample, outcome)


def _sample(base: Baseline, params: Any) -> Sample:
    """What a tree of parameters writes; None: the float model's own."""
    tokenizer = base.model.readable_tokenizer()
    prompt = CHAT_PROMPT if tokenizer.chat_template is not None else PLAIN_PROMPT
    return write_on(base.model, prompt, params=params, max_tokens=SAMPLE_TOKENS)

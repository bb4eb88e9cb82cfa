"""Chooses the engine that evaluates a model: fewbit's own decoder, or transformers."""

import dataclasses

from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from ..evaluate.transformers_engine import TransformersEngine, transformers_engine
from ..evaluate.transformers_tokenizer import transformers_tokenizer
from ..io.read import read
from ..models.installed import is_installed
from ..models.tokenizers.hugging_face import tokenizer_from_files
from ..models.tokenizers.tokenizer import Tokenizer
from .model import Model

ENGINES = ("auto", "fewbit", "transformers")
"""The names that `choose_engine` takes."""


def choose_engine(asked: str, *models: Model | None) -> str:
    """Chooses the engine that runs all of these models.

    Args:
        asked: "fewbit", "transformers", or "auto": fewbit's decoder if it runs all of them, else transformers.
        models: the models; None is left out.

    Returns:
        "fewbit" or "transformers".

    Raises:
        QuantError: for an unknown name.
        UnsupportedError: when no such engine runs a model; the message says why, and what to install.
    """
    if asked not in ENGINES:
        raise QuantError(f"unknown engine {asked!r}; {near_names(asked, ENGINES)}")
    given = [model for model in models if model is not None]
    foreign = [model for model in given if model.config is None]
    if asked == "fewbit" or (asked == "auto" and not foreign):
        for model in given:
            model.runnable_config()
        return "fewbit"
    for model in given:
        why_not = _why_not_transformers(model)
        if not why_not:
            continue
        if asked == "transformers":
            raise UnsupportedError(f"{model.path} cannot be run by transformers: {why_not}")
        raise UnsupportedError(
            f"{foreign[0].path} cannot be run, only planned, quantized, inspected or verified. By fewbit's decoder: "
            f"{foreign[0].why_not_run}. By transformers: {why_not}"
        )
    return "transformers"


def _why_not_transformers(model: Model) -> str:
    """Why transformers cannot run a model; empty if it may."""
    if model.kind in ("gguf", "npz") or not isinstance(model.metadata.get("model_type"), str):
        return f"{model.name} has no config.json with a model_type"
    if missing := [package for package in ("transformers", "torch") if not is_installed(package)]:
        return f"it needs {' and '.join(missing)}: pip install fewbit[transformers]"
    return ""


def transformers_of(model: Model) -> TransformersEngine:
    """The architecture of a model in transformers.

    Raises:
        UnsupportedError: when transformers does not know it.
    """
    return transformers_engine(model.metadata, model.info, source=model.name, files=model.files)


def as_stored(model: Model) -> Model:
    """The model with its parameters as in the checkpoint's files.

    transformers knows these parameters. The model also gets its tokenizer.

    Args:
        model: a model as `load` gives it.

    Returns:
        The model, without the configuration of fewbit's decoder.

    Raises:
        QuantError: when its parameters are not those of the files, because it was rotated in memory.
    """
    if model.config is not None:
        checkpoint = read(model.path)
        if model.facts.get("rotation_seed") != checkpoint.facts.get("rotation_seed"):
            raise QuantError(f"{model.name} is rotated in memory, which only fewbit's decoder runs; take --engine fewbit")
        model = dataclasses.replace(
            model,
            config=None,
            why_not_run="its parameters have the names of its files, for transformers",
            info=checkpoint.tensors.info,
            load=checkpoint.tensors.__getitem__,
            names={},
        )
    if model.tokenizer is not None:
        return model
    try:
        return dataclasses.replace(model, tokenizer=_tokenizer(model), why_no_tokenizer="")
    except (QuantError, UnsupportedError) as error:
        return dataclasses.replace(model, why_no_tokenizer=str(error))


def _tokenizer(model: Model) -> Tokenizer:
    """The tokenizer of a model's small files.

    fewbit reads a `tokenizer.json`, transformers the files of others. Where there is neither, fewbit's reader says so.
    """
    others = ("tokenizer.model", "vocab", "spiece", "sentencepiece")
    if "tokenizer.json" in model.files or not any(name.startswith(others) for name in model.files):
        return tokenizer_from_files(model.files)
    return transformers_tokenizer(model.files, model.metadata)

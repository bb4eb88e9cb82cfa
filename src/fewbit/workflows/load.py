"""Loads a model from a checkpoint path."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .._json import file_text, parsed
from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from ..io.checkpoint import Checkpoint, Tensors
from ..io.read import read
from ..models.config import DecoderConfig
from ..models.families.gguf.config import config_from_gguf, gguf_table_of
from ..models.families.glassllm import GLASSLLM, config_from_glassllm
from ..models.families.multimodal import decoder_of
from ..models.installed import glassllm_npz, minilm_directory, smollm2_gguf
from ..models.names import NameTable, check_layers, is_extra, names_by_path, shapes
from ..models.tokenizers.gguf import tokenizer_from_gguf
from ..models.tokenizers.glassllm import tokenizer_from_glassllm
from ..models.tokenizers.hugging_face import tokenizer_from_files
from ..models.tokenizers.tokenizer import Tokenizer
from .model import Model, Value, transposed_scheme


def load(path: str | os.PathLike[str]) -> Model:
    """Opens a model; its parameters are loaded lazily, one by one.

    A Hugging Face or fewbit directory of a family of `models.FAMILIES` can be run, a GGUF file of their architectures, and a
    glassllm `.npz`. Any other architecture loads as flat tensors, which can be planned, quantized, inspected and verified,
    and with a config.json evaluated by transformers.

    Args:
        path: the file or directory; or, if no such file exists, the name of a model from an installed package: "smollm2",
            "glassllm" or "minilm".

    Returns:
        The model.

    Raises:
        QuantError: when the path does not exist or cannot be read.
    """
    checkpoint = read(_resolved(path))
    model = Model(
        path=checkpoint.path,
        kind=checkpoint.kind,
        config=None,
        why_not_run="",
        info=checkpoint.tensors.info,
        load=checkpoint.tensors.__getitem__,
        why_no_tokenizer="the architecture is unknown",
        files=checkpoint.files,
        metadata=checkpoint.metadata,
        facts=checkpoint.facts,
        notes=checkpoint.notes,
    )
    try:
        return _runnable(model, checkpoint)
    except (QuantError, UnsupportedError) as error:
        return dataclasses.replace(model, why_not_run=str(error))


INSTALLED = {"smollm2": smollm2_gguf, "glassllm": glassllm_npz, "minilm": minilm_directory}
"""The models of installed packages, by the names that `load` takes."""


def is_installed_name(path: str | os.PathLike[str]) -> bool:
    """Whether `load` takes a path for the name of a model from an installed package.

    Args:
        path: what `load` is given.
    """
    return os.fspath(path) in INSTALLED and not Path(path).exists()


def _resolved(path: str | os.PathLike[str]) -> str:
    """The path itself, or the path of the installed model of that name."""
    name = os.fspath(path)
    if is_installed_name(name):
        return str(INSTALLED[name]())
    is_word = name and "." not in name and "/" not in name
    if is_word and not Path(name).exists():
        raise QuantError(
            f"{name} does not exist, and no installed package provides a model of that name; "
            f"{near_names(name, tuple(INSTALLED))}"
        )
    return name


def _runnable(model: Model, checkpoint: Checkpoint) -> Model:
    """The model with its configuration, paths and tokenizer.

    Raises:
        QuantError: when its tensors do not match the configuration.
        UnsupportedError: when it has another architecture.
    """
    config, table = _config(checkpoint)
    names, tensors = _names(checkpoint, table, config), checkpoint.tensors
    transposed = frozenset(path for path in names if table is not None and table.is_transposed(path))

    others = dict.fromkeys(name for name in tensors.info if table is not None and table.is_other(name))

    def load_path(path: str) -> Value:
        value = tensors[names.get(path, path)]
        if path in transposed:
            return value.T
        return value

    info = {path: dataclasses.replace(tensors.info[names[path]], shape=shape) for path, shape in shapes(config).items()}
    for path in transposed:
        if (scheme := info[path].scheme) is not None:
            info[path] = dataclasses.replace(info[path], scheme=transposed_scheme(scheme))
    info |= {name: tensors.info[name] for name in others}
    model = dataclasses.replace(model, config=config, info=info, load=load_path)
    if "model_type" in checkpoint.metadata:
        model = dataclasses.replace(model, names=names, transposed=transposed)
    if extra := sum(is_extra(name, config) for name in tensors.info if name not in others):
        note = f"{extra} tensors of layers for multi-token prediction are not run, and left out of what is written"
        model = dataclasses.replace(model, notes=(*model.notes, note))
    if others:
        note = f"{len(others)} tensors belong to other parts than the language model, such as {next(iter(others))}; they are kept as they are"
        model = dataclasses.replace(model, notes=(*model.notes, note))
    try:
        tokenizer = _tokenizer(checkpoint)
    except (QuantError, UnsupportedError) as error:
        return dataclasses.replace(model, why_no_tokenizer=str(error))
    if "tokenizer.json" not in model.files:
        model = dataclasses.replace(model, files={**model.files, **tokenizer.files()})
    return dataclasses.replace(model, tokenizer=tokenizer, why_no_tokenizer="")


def _config(checkpoint: Checkpoint) -> tuple[DecoderConfig, NameTable | None]:
    """The configuration in the checkpoint's metadata, and its naming scheme. A scheme of None means our own paths."""
    metadata = checkpoint.metadata
    if checkpoint.kind == "gguf":
        config = config_from_gguf(metadata, checkpoint.tensors)
        return config, gguf_table_of(metadata, config)
    architecture = metadata.get("architecture")
    if (
        checkpoint.kind in ("fewbit", "orbax")
        and architecture in ("decoder", "llama")
        and isinstance(metadata.get(architecture), Mapping)
    ):
        return DecoderConfig.from_json(metadata[architecture]), None
    if checkpoint.kind == "npz" and "d_model" in metadata:
        return config_from_glassllm(metadata), GLASSLLM
    if checkpoint.kind != "npz" and "model_type" in metadata:
        return decoder_of(metadata, checkpoint.tensors.info)
    raise UnsupportedError("the architecture is unknown: no GGUF metadata, no config.json with a model_type, no __config__")


def _names(checkpoint: Checkpoint, table: NameTable | None, config: DecoderConfig) -> dict[str, str]:
    """The tensor name of each parameter path, in the order of the architecture. It also checks shapes."""
    stored = {name: info.shape for name, info in checkpoint.tensors.info.items()}
    if table is not None:
        zeros = _zero_biases(checkpoint.tensors, table, config)
        return names_by_path({name: shape for name, shape in stored.items() if name not in zeros}, table, config)
    check_layers(config, len(stored))
    expected = shapes(config)
    if odd := [path for path in {**expected, **stored} if stored.get(path) != expected.get(path)]:
        raise QuantError(f"tensors are missing, unexpected or of another shape than config says: {', '.join(odd[:5])}")
    return {path: path for path in expected}


def _zero_biases(tensors: Tensors, table: NameTable, config: DecoderConfig) -> set[str]:
    """The names of biases that the architecture does not have and that are zero, as some GPTQ writers add to every module."""
    expected = dict(shapes(config))
    biases = [name for name in tensors.info if name.endswith(".bias") and not is_extra(name, config)]
    biases = [name for name in biases if not (table.is_other(name) or table.is_derived(name))]
    return {name for name in biases if table.path(name) not in expected and not np.asarray(tensors[name]).any()}


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.kind == "gguf":
        return tokenizer_from_gguf(checkpoint.metadata)
    if checkpoint.kind != "npz":
        return tokenizer_from_files(checkpoint.files)
    file = checkpoint.path.with_name(f"{checkpoint.path.stem}.tokenizer.json")
    if not file.is_file():
        raise QuantError(f"no tokenizer: {file.name} is missing next to {checkpoint.path.name}")
    return tokenizer_from_glassllm(parsed(file_text(file, "tokenizer"), str(file)))

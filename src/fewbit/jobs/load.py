"""From a path to a model: opens the container, recognises the network, and finds its tokenizer."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import io, models
from .._json import file_text, parsed
from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from .model import Model, Value


def load(path: str | os.PathLike[str]) -> Model:
    """Opens a model; parameters are loaded later, one by one.

    A GGUF file, a Hugging Face directory, a glassllm `.npz` or a fewbit directory of the Llama family can be run. Any
    other network still loads as its flat tensors, which can be planned, quantized, inspected and verified.

    Args:
        path: the file or directory; or, where nothing of that name exists, the name of a model that an installed package
            carries: "smollm2", "glassllm" or "minilm".

    Returns:
        The model.

    Raises:
        QuantError: when there is nothing at the path, or it cannot be read.
    """
    checkpoint = io.read(_found(path))
    try:
        model = _llama(checkpoint)
    except (QuantError, UnsupportedError) as error:
        model = _flat(checkpoint, str(error))
    return _with_tokenizer(model, checkpoint)


INSTALLED = {"smollm2": models.smollm2_gguf, "glassllm": models.glassllm_npz, "minilm": models.minilm_directory}
"""The models that packages carry, by the names that `load` takes."""


def _found(path: str | os.PathLike[str]) -> str:
    """The path, or that of the installed model of this name."""
    name = os.fspath(path)
    if name in INSTALLED and not Path(name).exists():
        return str(INSTALLED[name]())
    is_word = name and "." not in name and "/" not in name
    if is_word and not Path(name).exists():
        raise QuantError(
            f"{name} does not exist, and is no model of an installed package; {near_names(name, tuple(INSTALLED))}"
        )
    return name


@dataclasses.dataclass(frozen=True)
class _Slot:
    """Where a parameter lies in the file; it stands in for the array while names and shapes are checked."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def T(self) -> "_Slot":
        return _Slot(self.name, self.shape[::-1], not self.is_transposed)


def _llama(checkpoint: io.Checkpoint) -> Model:
    """The model of a checkpoint of the Llama family.

    Raises:
        QuantError: when it is none, or an incomplete one.
        UnsupportedError: when it is another network.
    """
    config, table = _config(checkpoint)
    slots = {name: _Slot(name, info.shape) for name, info in checkpoint.tensors.info.items()}
    if table is None:
        by_path = _checked_paths(slots, config)
    else:
        by_path = models.paths_of_params(models.params_from_named(slots, table, config), config)

    def load_path(path: str) -> Value:
        slot = by_path[path]
        value = checkpoint.tensors[slot.name]
        return value.T if slot.is_transposed else value

    info = {path: dataclasses.replace(checkpoint.tensors.info[s.name], shape=s.shape) for path, s in by_path.items()}
    names = {path: slot.name for path, slot in by_path.items()} if table is models.HUGGING_FACE else {}
    return dataclasses.replace(_model(checkpoint, config, "", info, load_path), names=names)


def _config(checkpoint: io.Checkpoint) -> tuple[models.LlamaConfig, models.NameTable | None]:
    """The network that a checkpoint says it is, and how its parameters are named; None: by our own paths."""
    said = checkpoint.metadata
    if checkpoint.kind == "gguf":
        return models.config_from_gguf(said, list(checkpoint.tensors)), models.GGUF
    if checkpoint.kind == "fewbit" and said.get("architecture") == "llama" and isinstance(said.get("llama"), Mapping):
        return models.LlamaConfig.from_json(said["llama"]), None
    if checkpoint.kind == "npz" and "d_model" in said:
        return models.config_from_glassllm(said), models.GLASSLLM
    if checkpoint.kind != "npz" and "model_type" in said:
        return models.config_from_hf(said), models.HUGGING_FACE
    raise UnsupportedError(
        "it does not say what network it is (no GGUF metadata, no config.json with a model_type, no __config__)"
    )


def _checked_paths(slots: dict[str, _Slot], config: models.LlamaConfig) -> dict[str, _Slot]:
    """The slots in the order of the network, when they are its parameters exactly."""
    models.check_layers(config, len(slots))
    expected = models.shapes(config)
    if odd := [p for p in {**expected, **slots} if p not in slots or slots[p].shape != expected.get(p)]:
        raise QuantError(f"its tensors are not those of its configuration: {', '.join(odd[:5])}")
    return {path: slots[path] for path in expected}


def _flat(checkpoint: io.Checkpoint, why: str) -> Model:
    """The model of a checkpoint that is no network we know."""
    return _model(checkpoint, None, why, checkpoint.tensors.info, checkpoint.tensors.__getitem__)


def _model(checkpoint: io.Checkpoint, config: models.LlamaConfig | None, why: str, info: Any, load_path: Any) -> Model:
    return Model(
        path=checkpoint.path,
        kind=checkpoint.kind,
        config=config,
        why_not_run=why,
        info=info,
        load=load_path,
        files=checkpoint.files,
        metadata=checkpoint.metadata,
        facts=checkpoint.facts,
        notes=checkpoint.notes,
    )


def _with_tokenizer(model: Model, checkpoint: io.Checkpoint) -> Model:
    """The model with its tokenizer, or with the reason why it has none."""
    if model.config is None:
        return dataclasses.replace(model, why_no_tokenizer="the network is unknown")
    try:
        tokenizer = _tokenizer(checkpoint)
    except (QuantError, UnsupportedError) as error:
        return dataclasses.replace(model, why_no_tokenizer=str(error))
    files = model.files if "tokenizer.json" in model.files else {**model.files, **tokenizer.files()}
    return dataclasses.replace(model, tokenizer=tokenizer, files=files)


def _tokenizer(checkpoint: io.Checkpoint) -> models.Tokenizer:
    if checkpoint.kind == "gguf":
        return models.tokenizer_from_gguf(checkpoint.metadata)
    if checkpoint.kind != "npz":
        return models.tokenizer_from_files(checkpoint.files)
    beside = _beside(checkpoint.path)
    if not beside.is_file():
        raise QuantError(f"no tokenizer: {beside.name} is missing beside {checkpoint.path.name}")
    return models.tokenizer_from_glassllm(parsed(file_text(beside, "tokenizer"), str(beside)))


def _beside(npz: Path) -> Path:
    """Where glassllm keeps the tokenizer of an `.npz`."""
    return npz.with_name(f"{npz.stem}.tokenizer.json")

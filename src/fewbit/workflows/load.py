"""Loads a model from a checkpoint path."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from .. import io, models
from .._json import file_text, parsed
from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from .model import Model, Value


def load(path: str | os.PathLike[str]) -> Model:
    """Opens a model; its parameters are loaded lazily, one by one.

    A GGUF file, a Hugging Face directory, a glassllm `.npz` or a fewbit directory of the Llama family can be run. Any
    other architecture loads as flat tensors, which can be planned, quantized, inspected and verified.

    Args:
        path: the file or directory; or, if no such file exists, the name of a model from an installed package: "smollm2",
            "glassllm" or "minilm".

    Returns:
        The model.

    Raises:
        QuantError: when the path does not exist or cannot be read.
    """
    checkpoint = io.read(_resolved(path))
    try:
        model = _llama(checkpoint)
    except (QuantError, UnsupportedError) as error:
        model = _model(checkpoint, None, str(error), checkpoint.tensors.info, checkpoint.tensors.__getitem__)
    return _with_tokenizer(model, checkpoint)


INSTALLED = {"smollm2": models.smollm2_gguf, "glassllm": models.glassllm_npz, "minilm": models.minilm_directory}
"""The models of installed packages, by the names that `load` takes."""


def _resolved(path: str | os.PathLike[str]) -> str:
    """The path itself, or the path of the installed model of that name."""
    name = os.fspath(path)
    if name in INSTALLED and not Path(name).exists():
        return str(INSTALLED[name]())
    is_word = name and "." not in name and "/" not in name
    if is_word and not Path(name).exists():
        raise QuantError(
            f"{name} does not exist, and no installed package provides a model of that name; "
            f"{near_names(name, tuple(INSTALLED))}"
        )
    return name


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A parameter's name in the file, its shape and orientation; a placeholder while names and shapes are checked."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def T(self) -> "_Slot":
        return _Slot(self.name, self.shape[::-1], not self.is_transposed)


def _llama(checkpoint: io.Checkpoint) -> Model:
    """Loads a checkpoint of the Llama family.

    Raises:
        QuantError: when its tensors do not match the configuration.
        UnsupportedError: when it has another architecture.
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
    model = _model(checkpoint, config, "", info, load_path)
    if table is not models.HUGGING_FACE:
        return model
    return dataclasses.replace(model, names={path: slot.name for path, slot in by_path.items()})


def _config(checkpoint: io.Checkpoint) -> tuple[models.LlamaConfig, models.NameTable | None]:
    """The configuration in the checkpoint's metadata, and its naming scheme; None: our own paths."""
    metadata = checkpoint.metadata
    if checkpoint.kind == "gguf":
        return models.config_from_gguf(metadata, list(checkpoint.tensors)), models.GGUF
    if (
        checkpoint.kind == "fewbit"
        and metadata.get("architecture") == "llama"
        and isinstance(metadata.get("llama"), Mapping)
    ):
        return models.LlamaConfig.from_json(metadata["llama"]), None
    if checkpoint.kind == "npz" and "d_model" in metadata:
        return models.config_from_glassllm(metadata), models.GLASSLLM
    if checkpoint.kind != "npz" and "model_type" in metadata:
        return models.config_from_hf(metadata), models.HUGGING_FACE
    raise UnsupportedError("the architecture is unknown: no GGUF metadata, no config.json with a model_type, no __config__")


def _checked_paths(slots: dict[str, _Slot], config: models.LlamaConfig) -> dict[str, _Slot]:
    """The slots in the order of the architecture; refuses missing, extra or misshapen ones."""
    models.check_layers(config, len(slots))
    expected = models.shapes(config)
    if odd := [p for p in {**expected, **slots} if p not in slots or slots[p].shape != expected.get(p)]:
        raise QuantError(f"tensors are missing, unexpected or of another shape than config says: {', '.join(odd[:5])}")
    return {path: slots[path] for path in expected}


def _model(
    checkpoint: io.Checkpoint,
    config: models.LlamaConfig | None,
    why: str,
    info: Mapping[str, io.TensorInfo],
    load_path: Callable[[str], Value],
) -> Model:
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
    """Adds the tokenizer, or the reason why there is none."""
    if model.config is None:
        return dataclasses.replace(model, why_no_tokenizer="the architecture is unknown")
    try:
        tokenizer = _tokenizer(checkpoint)
    except (QuantError, UnsupportedError) as error:
        return dataclasses.replace(model, why_no_tokenizer=str(error))
    if "tokenizer.json" not in model.files:
        model = dataclasses.replace(model, files={**model.files, **tokenizer.files()})
    return dataclasses.replace(model, tokenizer=tokenizer)


def _tokenizer(checkpoint: io.Checkpoint) -> models.Tokenizer:
    if checkpoint.kind == "gguf":
        return models.tokenizer_from_gguf(checkpoint.metadata)
    if checkpoint.kind != "npz":
        return models.tokenizer_from_files(checkpoint.files)
    file = checkpoint.path.with_name(f"{checkpoint.path.stem}.tokenizer.json")
    if not file.is_file():
        raise QuantError(f"no tokenizer: {file.name} is missing next to {checkpoint.path.name}")
    return models.tokenizer_from_glassllm(parsed(file_text(file, "tokenizer"), str(file)))

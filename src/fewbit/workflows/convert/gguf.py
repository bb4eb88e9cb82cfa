"""Writes a model as a GGUF file, as llama.cpp reads it."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import QuantError, UnsupportedError
from ...io.containers.container import Weight
from ...io.files import mapped
from ...io.gguf.architectures import ARCHITECTURES
from ...io.gguf.blocks import why_not as why_not
from ...io.gguf.conversion import Conversion, applies_scale, ignored_scale, is_contracted_first, with_applied_scale
from ...io.gguf.fields import Field
from ...io.gguf.header import read_header
from ...io.gguf.layers.gemma4 import target_of_factors, with_expert_factors
from ...io.gguf.layers.linear_attention import LinearHeads
from ...io.gguf.metadata import architecture_fields, architecture_of, extra_tensors
from ...io.gguf.reader import gguf_package, read_gguf, scale_name
from ...io.gguf.stored import Stored, stored
from ...io.gguf.vocabulary import tokenizer_fields
from ...io.gguf.writer import GGUFWriter
from ...io.journal import Journal
from ...models.families.family import HUGGING_FACE
from ...models.families.gguf.config import gguf_table_of
from ...models.families.multimodal import language_config
from ...models.families.table import family_of
from ...recipe.role import Role
from ..model import Model, Value, check_others_can_run
from .hugging_face import llama_json

_EMBEDDING = "token_embd.weight"


def write_gguf(
    model: Model,
    tensors: Iterable[tuple[str, Value]],
    out: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    ternary: str = "TQ2_0",
    progress: Callable[[str, str, int], None] | None = None,
) -> Path:
    """Writes a model as a GGUF file; it appears complete or not at all.

    A model of a GGUF file keeps its names, metadata and tokenizer. One of a Hugging Face checkpoint gets llama.cpp's names, row
    orders and metadata, its tokenizer and its chat template. Nothing is quantized again, and no tensor is taken from `tensors`
    before architecture, names and tokenizer were found to fit.

    Args:
        model: the model.
        tensors: the paths of `model.info` in any order, and their arrays or QArrays.
        out: the file to create.
        overwrite: whether a GGUF file that fewbit wrote may be replaced.
        ternary: the type of ternary tensors: "TQ2_0", two bits, or "TQ1_0", 1.6 bits and slower.
        progress: called with ("write" or "verify", name of the tensor, its size in the file).

    Returns:
        The file.

    Raises:
        QuantError: for a scheme that GGUF cannot store without loss, and as `GGUFWriter`.
        UnsupportedError: for an architecture or tokenizer that llama.cpp lacks.
    """
    return write_unfinished(
        model, lambda finished: tensors, out, overwrite=overwrite, ternary=ternary, progress=progress, journal=None
    )


def write_unfinished(
    model: Model,
    tensors: Callable[[frozenset[str]], Iterable[tuple[str, Value]]],
    out: str | os.PathLike[str],
    *,
    overwrite: bool,
    progress: Callable[[str, str, int], None] | None,
    journal: Journal | None,
    ternary: str = "TQ2_0",
) -> Path:
    """Writes what an earlier run of the job did not finish; see `write_gguf`.

    Args:
        model: the model.
        tensors: gives the tensors, without those whose paths it gets.
        out: as for `write_gguf`.
        overwrite: as for `write_gguf`.
        progress: as for `write_gguf`.
        journal: the job's journal.
        ternary: as for `write_gguf`.

    Returns:
        The file.
    """
    source = _source(model, ternary)
    writer = GGUFWriter(
        out,
        source.fields,
        alignment=source.alignment,
        overwrite=overwrite,
        sources=[model.path],
        progress=progress,
        journal=journal,
    )
    with writer:
        targets = {path: source.targets(path) for path in model.info}
        finished = frozenset(path for path, names in targets.items() if names and writer.finished.issuperset(names))
        for name, tensor in source.converted(tensors(finished)):
            if name not in writer.finished:
                writer.add(name, tensor)
    return writer.path


def why_not_model(model: Model) -> str | None:
    """Why a model cannot be written as a GGUF file. The reason holds for any scheme. None if it can.

    Args:
        model: the model.

    Returns:
        The reason.
    """
    try:
        _source(model, "TQ2_0")
    except (QuantError, UnsupportedError) as error:
        return str(error)
    return None


def why_not_weight(model: Model, weight: Weight) -> str | None:
    """Why a GGUF file cannot store a weight of a model exactly, as `why_not`. None if it can.

    Args:
        model: the model.
        weight: its weight, with its name in a Hugging Face checkpoint.
    """
    if weight.activations is not None:
        return "llama.cpp chooses how activations are quantized; leave them out of the recipe"
    if weight.role is Role.ROUTER:
        return "llama.cpp needs routers in float32; leave it float"
    scheme, shape = weight.scheme, weight.shape
    architecture = ARCHITECTURES.get(str(language_config(model.metadata).get("model_type")))
    is_first = architecture is not None and is_contracted_first(architecture, weight.name)
    if is_first and len(shape) == 3 and scheme.pack_axis == -2:
        experts, inputs, outputs = scheme.tiles(3)
        scheme, shape = scheme.with_tiles((experts, outputs, inputs), pack_axis=-1), (shape[0], shape[2], shape[1])
    if architecture is not None and architecture.has_tiled_values and weight.name.endswith(".linear_attn.out_proj.weight"):
        settings = architecture.settings(language_config(model.metadata))
        if reason := LinearHeads.of(settings, is_tiled=True).why_not_stored(weight.name, scheme):
            return reason
    return why_not(scheme, shape)


def why_not_scaled(model: Model, paths: Iterable[str]) -> dict[str, str]:
    """Why tensors cannot be stored with a tensor scale.

    Args:
        model: a model that can be written as a GGUF file.
        paths: those of the tensors.

    Returns:
        The reasons, by the paths of the tensors that cannot.
    """
    source = _source(model, "TQ2_0")
    names = {path: next((name for name in source.targets(path) if not source.applies_scale(name)), None) for path in paths}
    return {path: ignored_scale(name, source.architecture) for path, name in names.items() if name is not None}


@dataclasses.dataclass(frozen=True)
class _Source:
    """What a GGUF file takes from a model.

    Attributes:
        architecture: its name in GGUF.
        applies_scale: whether llama.cpp applies the tensor scale of a tensor of a name in the file.
        fields: the metadata.
        targets: gives the names in the file of the tensors that have a part of the tensor of a path.
        converted: gives the tensors of the file from those of the model.
        alignment: of the tensors in the file.
    """

    architecture: str
    applies_scale: Callable[[str], bool]
    fields: Mapping[str, Field]
    targets: Callable[[str], tuple[str, ...]]
    converted: Callable[[Iterable[tuple[str, Value]]], Iterator[tuple[str, Stored]]]
    alignment: int = 32


def _source(model: Model, ternary: str) -> _Source:
    check_others_can_run(model)
    if model.kind == "gguf":
        return _from_gguf(model, ternary)
    if "model_type" in model.metadata:
        names = model.names
        if model.config is not None:  # those of the language model alone, with the prefix that a base model lacks
            table = family_of(language_config(model.metadata)).table_of(model.runnable_config())
            names = {path: table.name(path) for path in model.names}
        return _from_hugging_face(model, language_config(model.metadata), names, ternary, is_permuted=True)
    config = model.config
    if config is None or model.kind == "npz":
        raise UnsupportedError(
            f"{model.path} cannot become a GGUF file: it has neither GGUF metadata nor a config.json with a model_type"
        )
    metadata = llama_json(config)  # refuses others, whose parameters may have no name there
    names = {path: HUGGING_FACE.name(path) for path in model.info}
    return _from_hugging_face(model, metadata, names, ternary, is_permuted=config.rope == "half")


def _from_gguf(model: Model, ternary: str) -> _Source:
    """Everything but the model's tensors as in its file, such as the metadata and the factors of the rotary embedding."""
    header = read_header(mapped(model.path), str(model.path))
    names, architecture = {entry.name for entry in header.entries}, str(header.metadata.get("general.architecture"))
    table, derived, fields = None, dict[str, Stored](), dict[str, Field](header.encoded)
    if model.config is not None and model.config.extra_layers:  # whose tensors are left out
        fields |= {f"{architecture}.block_count": model.config.layers, f"{architecture}.nextn_predict_layers": 0}
    if model.config is not None:
        table = gguf_table_of(model.metadata, model.config)
        if derived_names := [entry.name for entry in header.entries if table.is_derived(entry.name)]:
            read = read_gguf(model.path).tensors
            derived = {name: stored(read[name], f"tensor {name!r}", ternary) for name in derived_names}

    def name(path: str) -> str:
        return path if path in names or table is None else table.name(path)

    has_factors = any(target_of_factors(name(path)) != name(path) for path in model.info)

    def is_applied(target: str) -> bool:
        return scale_name(target) in names or applies_scale(architecture, target)

    def each(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Stored]]:
        yield from derived.items()
        for path, value in tensors:
            target = name(path)
            tensor = stored(value, f"tensor {target!r}", ternary)
            yield target, with_applied_scale(target, tensor, architecture, is_applied=is_applied(target))

    def converted(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Stored]]:
        return with_expert_factors(each(tensors)) if has_factors else each(tensors)

    def targets(path: str) -> tuple[str, ...]:
        return (target_of_factors(name(path)),)

    return _Source(architecture, is_applied, fields, targets, converted, header.alignment)


def _from_hugging_face(
    model: Model, config: Mapping[str, Any], names: Mapping[str, str], ternary: str, *, is_permuted: bool
) -> _Source:
    """The metadata and conversions of a Hugging Face checkpoint. `names` are its names by path, where they differ."""
    package, others = gguf_package(f"writing {model.path} as GGUF"), frozenset(model.others)
    architecture = architecture_of(config)
    if architecture.is_transposed and model.config is None:
        raise UnsupportedError(
            f"{model.path} stores weights [in, out], which are not transposed: the decoder does not run it ({model.why_not_run})"
        )
    by_name = {names.get(path, path): info for path, info in model.info.items() if path not in others}
    conversion = Conversion(architecture, config, package, is_permuted and architecture.is_permuted, ternary)
    conversion.check_names(by_name)
    vocab = next((info.shape[0] for name, info in by_name.items() if conversion.targets(name) == (_EMBEDDING,)), None)
    if vocab is None:
        raise QuantError(f"{model.path} has no embedding of tokens; a GGUF file of a language model needs it")
    fields = architecture_fields(architecture, {**config, "vocab_size": vocab})
    fields |= {"general.type": "model", "general.name": model.name}
    fields |= tokenizer_fields(model.files, config, vocab)

    def converted(tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Stored]]:
        yield from extra_tensors(architecture, config).items()
        own = ((path, value) for path, value in tensors if path not in others)
        yield from conversion.tensors((names.get(path, path), value) for path, value in own)

    def targets(path: str) -> tuple[str, ...]:
        return () if path in others else conversion.targets(names.get(path, path))

    applies = functools.partial(applies_scale, architecture.name)
    return _Source(architecture.name, applies, fields, targets, converted)

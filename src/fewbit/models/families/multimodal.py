"""The language models of multimodal checkpoints.

Its configuration is the `text_config` of config.json, and its tensors have names with a longer prefix. The decoder runs it on text
alone, where positions in images (`mrope`) are those of the text.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from ...errors import QuantError
from ..config import DecoderConfig
from ..names import NameTable
from .rope import without_images
from .table import FAMILIES, family_of

_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.", "model.")
"""What the names of the language model's layers begin with; that of the model alone comes last."""
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_ALONE = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""The `model_type` of the same language model without other parts."""
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""The `model_type` of checkpoints whose config.json may be that of the language model itself, with a `vision_config` in it."""
_SILENT: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131072,
    },
}
"""What transformers assumes where a `text_config` is silent, by its `model_type`."""


def language_config(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model, as if it were alone.

    Args:
        obj: the JSON object of the checkpoint; that of a language model alone comes back unchanged.
    """
    inner, kind = obj.get("text_config"), obj.get("model_type")
    if inner is None and kind in _FLAT:
        inner = {**obj, "model_type": f"{kind}_text", "vision_config": None}
    if not isinstance(inner, Mapping) or kind in FAMILIES:
        return obj
    kind = str(inner.get("model_type"))
    found = {**_SILENT.get(kind, {}), **inner, "model_type": _ALONE.get(kind, inner.get("model_type"))}
    if isinstance(obj.get("tie_word_embeddings"), bool):
        found["tie_word_embeddings"] = obj["tie_word_embeddings"]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping):
            found[key] = without_images(found[key])
    return found


def decoder_of(obj: Mapping[str, Any], names: Collection[str]) -> tuple[DecoderConfig, NameTable]:
    """The configuration of the decoder in a Hugging Face checkpoint, and the names of its parameters there.

    Args:
        obj: the JSON object of config.json.
        names: the names of the checkpoint's tensors.

    Raises:
        UnsupportedError: for a `model_type` that the decoder cannot run, or a feature that it lacks, by its key.
        QuantError: for a missing key, a value of another type, or tensors without a language model.
    """
    inner = language_config(obj)
    family = family_of(inner)
    config = family.config(inner, names)
    if inner is obj:
        return config, _of_base_model(family.table_of(config), names)
    prefix = next((one for one in _PREFIXES if f"{one}embed_tokens.weight" in names), None)
    if prefix is None:
        raise QuantError(
            f"config.json has a text_config, and no tensor is named embed_tokens.weight after one of {', '.join(_PREFIXES)}"
        )
    head = next((one for one in _HEADS if one in names), _HEADS[0])
    return config, _within(family.table_of(config), prefix, head)


def _of_base_model(table: NameTable, names: Collection[str]) -> NameTable:
    """The table without the first part of its names where the tensors lack it, as `AutoModel` of transformers saves them."""
    first, rest = table.name("embed").split(".", 1)
    if rest not in names:
        return table
    without = {path: name.removeprefix(f"{first}.") for path, name in table.names.items()}
    return dataclasses.replace(table, names=without, derived=table.derived.replace(rf"{first}\.", ""))


def _within(table: NameTable, prefix: str, head: str) -> NameTable:
    """The table with a longer prefix. Tensors that begin with another one are not the decoder's."""
    names = {path: name.replace("model.", prefix, 1) for path, name in table.names.items()} | {"head": head}
    return dataclasses.replace(
        table,
        names=names,
        derived=table.derived.replace(r"model\.", re.escape(prefix)),
        others=rf"(?!{re.escape(prefix)}|{re.escape(head)}$).*",
    )

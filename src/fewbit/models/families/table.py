"""All families that the decoder can run, by their `model_type`."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import converted
from ..._registry import near_names
from ...errors import UnsupportedError
from ..config import DecoderConfig
from .dense import apertus, bitnet, ernie, exaone, gemma, hyperclovax, llama, olmo, phi, seed, smollm
from .family import Family
from .hybrids import bamba, granite, lfm2, nemotron_h, qwen
from .layer_norm import cohere, gpt, jais, nemotron, stablelm, starcoder
from .mixtures import afmoe, deepseek, glm, gpt_oss, hunyuan, llama4

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for module in (
        *(llama, qwen, gemma, phi, olmo, smollm, granite, bamba, gpt_oss, deepseek, glm, seed, exaone, ernie, bitnet, lfm2),
        *(apertus, nemotron_h, hunyuan, llama4, hyperclovax, afmoe, starcoder, stablelm, nemotron, jais, cohere, gpt),
    )
    for family in module.FAMILIES
}
"""The families that the decoder can run."""


def family_of(obj: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face `config.json`.

    Args:
        obj: the JSON object.

    Returns:
        The family of its `model_type`.

    Raises:
        UnsupportedError: for a `model_type` that the decoder cannot run.
        QuantError: when there is none.
    """
    model_type = converted(obj, _ModelType, "config.json").model_type
    if model_type not in FAMILIES:
        raise UnsupportedError(
            f"config.json's model_type is {model_type!r}, which the decoder cannot run; "
            f"{near_names(model_type, tuple(FAMILIES))}"
        )
    return FAMILIES[model_type]


def config_from_hf(obj: Mapping[str, Any], names: Collection[str] = ()) -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    Args:
        obj: the JSON object.
        names: the names of the checkpoint's tensors, which show how experts are stored.

    Returns:
        A configuration with the "half" layout of rotary embedding.

    Raises:
        UnsupportedError: for a `model_type` that the decoder cannot run, or a feature that it lacks, by its key.
        QuantError: for a missing key, or a value of another type.
    """
    return family_of(obj).config(obj, names)


class _ModelType(msgspec.Struct):
    model_type: str

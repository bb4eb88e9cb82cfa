"""A Llama of another container as a Hugging Face checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import UnsupportedError
from ...models.config import DecoderConfig
from ...models.families.family import HUGGING_FACE
from ...models.tokenizers.tokenizer import Tokenizer
from ..model import Model, Value, check_others_can_run, decoded


def as_hugging_face(model: Model) -> Model:
    """The model with the names and the config.json of a Hugging Face checkpoint.

    A checkpoint with a `model_type` comes back unchanged. The rows of q and k of a Llama with the "interleaved" rotary
    embedding are put in the order of the "half" layout, codes and scales alike, so nothing is quantized again.

    Args:
        model: the model.

    Raises:
        UnsupportedError: for a model that is not a Llama, or rotates inputs of its products.
    """
    check_others_can_run(model)
    if "model_type" in model.metadata:
        return model
    if model.config is None:
        raise UnsupportedError(
            f"{model.path} has no config.json with a model_type, and its tensors have the names of {model.kind}, so it cannot "
            f"become a Hugging Face checkpoint: {model.why_not_run}"
        )
    config = model.config
    metadata = {**llama_json(config), **_tokenizer_ids(model.tokenizer), **_special_ids(model.metadata)}

    def is_reordered(path: str) -> bool:
        return config.rope == "interleaved" and path.endswith(("attn/q", "attn/k"))

    info = {
        path: dataclasses.replace(one, scheme=None)
        if is_reordered(path) and one.scheme is not None and not _is_by_row(one.scheme)
        else one
        for path, one in model.info.items()
    }

    def load(path: str) -> Value:
        value = model.load(path)
        if is_reordered(path):
            heads = config.heads if path.endswith("q") else config.kv_heads
            return _with_rows(value, _half_order(heads, config.head_dim))
        return value

    return dataclasses.replace(
        model,
        config=dataclasses.replace(config, rope="half"),
        info=info,
        load=load,
        names={path: HUGGING_FACE.name(path) for path in model.info},
        metadata=metadata,
        files={**model.files, **_tokenizer_config(model)},
    )


def llama_json(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a `LlamaForCausalLM`.

    Raises:
        UnsupportedError: for a decoder that is not a Llama.
    """
    fields = {ours: getattr(config, ours) for ours in _LLAMA_KEYS}
    plain = DecoderConfig(**fields)
    if dataclasses.replace(config, rope="half") != plain:
        others = [
            f"{field.name}={getattr(config, field.name)}"
            for field in dataclasses.fields(config)
            if field.name != "rope" and getattr(config, field.name) != getattr(plain, field.name)
        ]
        raise UnsupportedError(
            "the model is not a Llama, so no config.json can be made for it, or one with settings that are not written: "
            f"{', '.join(others)}; start from the checkpoint"
        )
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    return {**names, **{theirs: fields[ours] for ours, theirs in _LLAMA_KEYS.items()}}


_LLAMA_KEYS = {
    "vocab": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
    "context": "max_position_embeddings",
}
"""The keys of a Llama's config.json by our fields."""


def _half_order(heads: int, head_dim: int) -> np.ndarray:
    """The rows of the "interleaved" layout in the order of the "half" layout."""
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _with_rows(value: Value, order: np.ndarray) -> Value:
    """The matrix with its rows in another order. A QArray's scales go with them, or it is dequantized."""
    if not isinstance(value, QArray):
        return value[order]
    if not _is_by_row(value.scheme):
        return decoded(value)[order]
    return jax.tree.map(lambda leaf: leaf if leaf.shape[0] == 1 else jnp.take(leaf, order, axis=0), value)


def _is_by_row(scheme: Scheme) -> bool:
    """Whether each row of a matrix has codes and scales of its own, or one tensor scale."""
    return scheme.tiles(2)[0] == 1 and scheme.pack_axis == -1 and not isinstance(scheme.scale, Scheme)


def _tokenizer_ids(tokenizer: Tokenizer | None) -> dict[str, int]:
    """The ids of the tokens that begin and end a text, from a tokenizer: a fewbit directory of a GGUF model has no metadata."""
    if tokenizer is None:
        return {}
    found = {
        "bos_token_id": tokenizer.backend.token_to_id(tokenizer.bos),
        "eos_token_id": next(iter(tokenizer.stop_ids), None),
    }
    return {name: index for name, index in found.items() if index is not None}


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens that begin and end a text, from GGUF metadata."""
    keys = {"bos_token_id": "tokenizer.ggml.bos_token_id", "eos_token_id": "tokenizer.ggml.eos_token_id"}
    return {ours: metadata[theirs] for ours, theirs in keys.items() if theirs in metadata}


def _tokenizer_config(model: Model) -> dict[str, bytes]:
    """A `tokenizer_config.json` with the chat template of GGUF metadata."""
    if "tokenizer_config.json" in model.files or "tokenizer.json" not in model.files:
        return {}
    form: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens = model.metadata.get("tokenizer.ggml.tokens", [])
    for name, index in _special_ids(model.metadata).items():
        form[name.removesuffix("_id")] = tokens[index]
    if "tokenizer.chat_template" in model.metadata:
        form["chat_template"] = model.metadata["tokenizer.chat_template"]
    return {"tokenizer_config.json": (json.dumps(form, ensure_ascii=False, indent=1) + "\n").encode()}

"""Llama configurations from GGUF, Hugging Face or glassllm."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from .._json import Positive, converted
from ..errors import QuantError, UnsupportedError
from .config import LlamaConfig


def config_from_gguf(fields: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    """Reads the configuration of a GGUF file of architecture `llama`.

    Args:
        fields: the metadata by key, as plain Python values.
        names: the names of its tensors; the head is tied if none is `output.weight`.

    Returns:
        A configuration with the "interleaved" layout: llama.cpp's converter orders the rows of q and k for it.

    Raises:
        UnsupportedError: for another architecture, scaled rotary embedding, or rotary embedding of a part of the head.
        QuantError: for a missing key.
    """
    where = "the GGUF metadata"
    architecture = converted(fields, _Architecture, where).name
    if architecture != "llama":
        raise UnsupportedError(f"the GGUF file's architecture is {architecture!r}; supported architectures: llama")
    _only(fields, "llama.rope.scaling.type", ("none",), where)
    if "rope_freqs.weight" in names:
        raise UnsupportedError("the GGUF file has rope_freqs.weight: scaled rotary embedding is not supported")
    found = converted(fields, _Gguf, where)
    head_dim = found.head_dim or found.width // found.heads
    _only(fields, "llama.attention.value_length", (head_dim,), where)
    _only(fields, "llama.rope.dimension_count", (head_dim,), where)
    _only(fields, "llama.expert_count", (0,), where)
    vocab = len(found.tokens) or found.vocab
    if vocab is None:
        raise QuantError(f"{where} has neither 'tokenizer.ggml.tokens' nor 'llama.vocab_size'")
    return _llama(found, vocab=vocab, head_dim=head_dim, rope="interleaved", tied="output.weight" not in names)


def config_from_hf(obj: Mapping[str, Any]) -> LlamaConfig:
    """Reads a Hugging Face `config.json` of a Llama.

    A Mistral without a sliding window is one too.

    Args:
        obj: the JSON object.

    Returns:
        A configuration with the "half" layout.

    Raises:
        UnsupportedError: for another model type, biases, another activation, a sliding window, or scaled rotary embedding.
        QuantError: for a missing key.
    """
    where = "config.json"
    model_type = converted(obj, _ModelType, where).model_type
    if model_type not in ("llama", "mistral"):
        raise UnsupportedError(f"config.json's model_type is {model_type!r}; supported architectures: llama, mistral")
    _only(obj, "hidden_act", ("silu", "swish"), where)
    for key, unset in (("attention_bias", False), ("mlp_bias", False), ("sliding_window", None), ("rope_scaling", None)):
        _only(obj, key, (unset,), where)
    found = converted(obj, _HuggingFace, where)
    rope = found.rope_parameters or _RopeParameters()
    if rope.rope_type != "default":
        _only(obj["rope_parameters"], "rope_type", ("default",), "config.json's rope_parameters")
    return _llama(found, rope_theta=rope.rope_theta or found.rope_theta, rope="half")


def config_from_glassllm(obj: Mapping[str, Any]) -> LlamaConfig:
    """Reads the `__config__` object of a glassllm `.npz`.

    Args:
        obj: the JSON object.

    Returns:
        The configuration.

    Raises:
        QuantError: for a missing key.
    """
    found = converted(obj, _Glassllm, "__config__")
    return _llama(found, hidden=8 * found.width // 3, rope="interleaved", tied=True)


def _llama(found: msgspec.Struct, **settings: object) -> LlamaConfig:
    """The configuration of metadata, whose fields have its names; `settings` come first."""
    form: dict[str, Any] = {
        field.name: settings.get(field.name, getattr(found, field.name, None)) for field in dataclasses.fields(LlamaConfig)
    }
    form["kv_heads"] = form["kv_heads"] or form["heads"]
    form["head_dim"] = form["head_dim"] or form["width"] // form["heads"]
    return LlamaConfig(**form)


def _only(metadata: Mapping[str, Any], key: str, allowed: tuple[object, ...], where: str) -> None:
    """Refuses a key whose value selects an architecture that is not implemented."""
    if key in metadata and metadata[key] not in allowed:
        wanted = " or ".join(repr(a) for a in allowed)
        raise UnsupportedError(f"{where} has {key} = {metadata[key]!r:.80}; supported is {wanted}")


# The JSON schemas of checkpoints' metadata: others' files, so further fields are ignored.

_Number = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]


class _Architecture(msgspec.Struct):
    name: str = msgspec.field(name="general.architecture")


class _Gguf(msgspec.Struct):
    width: Positive = msgspec.field(name="llama.embedding_length")
    heads: Positive = msgspec.field(name="llama.attention.head_count")
    layers: Positive = msgspec.field(name="llama.block_count")
    hidden: Positive = msgspec.field(name="llama.feed_forward_length")
    context: Positive = msgspec.field(name="llama.context_length")
    norm_eps: _Number = msgspec.field(name="llama.attention.layer_norm_rms_epsilon")
    kv_heads: Positive | None = msgspec.field(name="llama.attention.head_count_kv", default=None)
    head_dim: Positive | None = msgspec.field(name="llama.attention.key_length", default=None)
    rope_theta: _Number = msgspec.field(name="llama.rope.freq_base", default=10_000.0)
    vocab: Positive | None = msgspec.field(name="llama.vocab_size", default=None)
    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens", default=[])


class _ModelType(msgspec.Struct):
    model_type: str


class _RopeParameters(msgspec.Struct):
    rope_type: str = "default"
    rope_theta: _Number | None = None


class _HuggingFace(msgspec.Struct):
    vocab: Positive = msgspec.field(name="vocab_size")
    layers: Positive = msgspec.field(name="num_hidden_layers")
    width: Positive = msgspec.field(name="hidden_size")
    heads: Positive = msgspec.field(name="num_attention_heads")
    hidden: Positive = msgspec.field(name="intermediate_size")
    context: Positive = msgspec.field(name="max_position_embeddings")
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=None)
    head_dim: Positive | None = None
    norm_eps: _Number = msgspec.field(name="rms_norm_eps", default=1e-6)
    rope_theta: _Number = 10_000.0
    rope_parameters: _RopeParameters | None = None
    tied: bool = msgspec.field(name="tie_word_embeddings", default=False)


class _Glassllm(msgspec.Struct):
    vocab: Positive = msgspec.field(name="vocab_size")
    layers: Positive = msgspec.field(name="n_layers")
    width: Positive = msgspec.field(name="d_model")
    heads: Positive = msgspec.field(name="n_heads")
    kv_heads: Positive = msgspec.field(name="n_kv_heads")
    context: Positive = msgspec.field(name="max_len")
    norm_eps: _Number = msgspec.field(name="eps")
    rope_theta: _Number = msgspec.field(name="rope_base")

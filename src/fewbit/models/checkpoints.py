"""The configuration of a Llama from what its checkpoint says of itself: GGUF fields, config.json, or glassllm's."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from .._json import Positive, converted
from ..errors import QuantError, UnsupportedError
from .config import LlamaConfig


def config_from_gguf(fields: Mapping[str, Any], names: Collection[str]) -> LlamaConfig:
    """The configuration of a GGUF file of architecture `llama`.

    Args:
        fields: the metadata, by key, as plain Python values.
        names: the names of its tensors; the head is tied when none is `output.weight`.

    Returns:
        A configuration with the "interleaved" layout: llama.cpp's converter orders the rows of q and k for it.

    Raises:
        UnsupportedError: for another architecture, scaled rotary positions, or a rotary turn of a part of the head.
        QuantError: for a key that is missing.
    """
    where = "the GGUF metadata"
    architecture = converted(fields, _Architecture, where).name
    if architecture != "llama":
        raise UnsupportedError(f"the GGUF file's architecture is {architecture!r}; the networks that can be run are: llama")
    _only(fields, "llama.rope.scaling.type", ("none",), where)
    if "rope_freqs.weight" in names:
        raise UnsupportedError("the GGUF file has rope_freqs.weight: scaled rotary positions are not built")
    said = converted(fields, _Gguf, where)
    head_dim = said.head_dim or said.width // said.heads
    _only(fields, "llama.attention.value_length", (head_dim,), where)
    _only(fields, "llama.rope.dimension_count", (head_dim,), where)
    _only(fields, "llama.expert_count", (0,), where)
    vocab = len(said.tokens) or said.vocab
    if vocab is None:
        raise QuantError(f"{where} has neither 'tokenizer.ggml.tokens' nor 'llama.vocab_size'")
    return LlamaConfig(
        vocab=vocab,
        layers=said.layers,
        width=said.width,
        heads=said.heads,
        kv_heads=said.kv_heads or said.heads,
        head_dim=head_dim,
        hidden=said.hidden,
        norm_eps=said.norm_eps,
        rope_theta=said.rope_theta,
        rope="interleaved",
        tied="output.weight" not in names,
        context=said.context,
    )


def config_from_hf(obj: Mapping[str, Any]) -> LlamaConfig:
    """The configuration of a Hugging Face `config.json` of a Llama (or of a Mistral without a sliding window).

    Args:
        obj: the JSON object.

    Returns:
        A configuration with the "half" layout.

    Raises:
        UnsupportedError: for another model type, biases, another activation, a sliding window, or scaled rotary
            positions.
        QuantError: for a key that is missing.
    """
    where = "config.json"
    model_type = converted(obj, _ModelType, where).model_type
    if model_type not in ("llama", "mistral"):
        raise UnsupportedError(
            f"config.json's model_type is {model_type!r}; the networks that can be run are: llama, mistral"
        )
    _only(obj, "hidden_act", ("silu", "swish"), where)
    _only(obj, "attention_bias", (False,), where)
    _only(obj, "mlp_bias", (False,), where)
    _only(obj, "sliding_window", (None,), where)
    _only(obj, "rope_scaling", (None,), where)
    said = converted(obj, _HuggingFace, where)
    if said.rope_parameters is not None and said.rope_parameters.rope_type != "default":
        _only(obj["rope_parameters"], "rope_type", ("default",), "config.json's rope_parameters")
    rope_theta = said.rope_theta if said.rope_parameters is None else said.rope_parameters.rope_theta or said.rope_theta
    return LlamaConfig(
        vocab=said.vocab_size,
        layers=said.num_hidden_layers,
        width=said.hidden_size,
        heads=said.num_attention_heads,
        kv_heads=said.num_key_value_heads or said.num_attention_heads,
        head_dim=said.head_dim or said.hidden_size // said.num_attention_heads,
        hidden=said.intermediate_size,
        norm_eps=said.rms_norm_eps,
        rope_theta=rope_theta,
        rope="half",
        tied=said.tie_word_embeddings,
        context=said.max_position_embeddings,
    )


def config_from_glassllm(obj: Mapping[str, Any]) -> LlamaConfig:
    """The configuration of the `__config__` object of a glassllm `.npz`.

    Args:
        obj: the JSON object.

    Returns:
        The configuration.

    Raises:
        QuantError: for a key that is missing.
    """
    said = converted(obj, _Glassllm, "__config__")
    return LlamaConfig(
        vocab=said.vocab_size,
        layers=said.n_layers,
        width=said.d_model,
        heads=said.n_heads,
        kv_heads=said.n_kv_heads,
        head_dim=said.d_model // said.n_heads,
        hidden=8 * said.d_model // 3,
        norm_eps=said.eps,
        rope_theta=said.rope_base,
        rope="interleaved",
        tied=True,
        context=said.max_len,
    )


def _only(said: Mapping[str, Any], key: str, allowed: tuple[Any, ...], where: str) -> None:
    """Refuses a key whose value would make another network than the one that is built."""
    if key in said and said[key] not in allowed:
        wanted = " or ".join(repr(a) for a in allowed)
        raise UnsupportedError(f"{where} says {key} = {said[key]!r:.80}; the networks that can be run have {wanted}")


# The JSON schemas of what checkpoints say of themselves: others' files, so further fields are ignored.

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
    vocab_size: Positive
    num_hidden_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    intermediate_size: Positive
    max_position_embeddings: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    rms_norm_eps: _Number = 1e-6
    rope_theta: _Number = 10_000.0
    rope_parameters: _RopeParameters | None = None
    tie_word_embeddings: bool = False


class _Glassllm(msgspec.Struct):
    vocab_size: Positive
    n_layers: Positive
    d_model: Positive
    n_heads: Positive
    n_kv_heads: Positive
    max_len: Positive
    eps: _Number
    rope_base: _Number

"""The configuration of a Llama from what its checkpoint says of itself: GGUF fields, config.json, or glassllm's."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

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
    said = _Said(fields, "the GGUF metadata")
    architecture = said.at("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(f"the GGUF file's architecture is {architecture!r}; the networks that can be run are: llama")
    said.only("llama.rope.scaling.type", ("none",))
    if "rope_freqs.weight" in names:
        raise UnsupportedError("the GGUF file has rope_freqs.weight: scaled rotary positions are not built")
    width, heads = said.at("llama.embedding_length"), said.at("llama.attention.head_count")
    head_dim = said.at("llama.attention.key_length", width // heads)
    said.only("llama.attention.value_length", (head_dim,))
    said.only("llama.rope.dimension_count", (head_dim,))
    said.only("llama.expert_count", (0,))
    tokens = fields.get("tokenizer.ggml.tokens", ())
    return LlamaConfig(
        vocab=len(tokens) or said.at("llama.vocab_size"),
        layers=said.at("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=said.at("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        hidden=said.at("llama.feed_forward_length"),
        norm_eps=said.at("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=said.at("llama.rope.freq_base", 10_000.0),
        rope="interleaved",
        tied="output.weight" not in names,
        context=said.at("llama.context_length"),
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
    said = _Said(obj, "config.json")
    model_type = said.at("model_type")
    if model_type not in ("llama", "mistral"):
        raise UnsupportedError(
            f"config.json's model_type is {model_type!r}; the networks that can be run are: llama, mistral"
        )
    said.only("hidden_act", ("silu", "swish"))
    said.only("attention_bias", (False,))
    said.only("mlp_bias", (False,))
    said.only("sliding_window", (None,))
    said.only("rope_scaling", (None,))
    rope = obj.get("rope_parameters") or {}
    _Said(rope, "config.json's rope_parameters").only("rope_type", ("default",))
    heads = said.at("num_attention_heads")
    return LlamaConfig(
        vocab=said.at("vocab_size"),
        layers=said.at("num_hidden_layers"),
        width=said.at("hidden_size"),
        heads=heads,
        kv_heads=said.at("num_key_value_heads", heads),
        head_dim=said.at("head_dim", None) or said.at("hidden_size") // heads,
        hidden=said.at("intermediate_size"),
        norm_eps=said.at("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", said.at("rope_theta", 10_000.0)),
        rope="half",
        tied=said.at("tie_word_embeddings", False),
        context=said.at("max_position_embeddings"),
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
    said = _Said(obj, "__config__")
    width, heads = said.at("d_model"), said.at("n_heads")
    return LlamaConfig(
        vocab=said.at("vocab_size"),
        layers=said.at("n_layers"),
        width=width,
        heads=heads,
        kv_heads=said.at("n_kv_heads"),
        head_dim=width // heads,
        hidden=8 * width // 3,
        norm_eps=said.at("eps"),
        rope_theta=said.at("rope_base"),
        rope="interleaved",
        tied=True,
        context=said.at("max_len"),
    )


_NEEDED = object()


@dataclasses.dataclass(frozen=True)
class _Said:
    """What a checkpoint says, and where it says it, for messages."""

    values: Mapping[str, Any]
    where: str

    def at(self, key: str, default: Any = _NEEDED) -> Any:
        """The value of a key, or the default where there is one."""
        if key not in self.values and default is _NEEDED:
            raise QuantError(f"{self.where} has no {key!r}; is this the checkpoint of a Llama?")
        return self.values.get(key, default)

    def only(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses a key whose value would make another network than the one that is built."""
        if key in self.values and self.values[key] not in allowed:
            wanted = " or ".join(repr(a) for a in allowed)
            raise UnsupportedError(
                f"{self.where} says {key} = {self.values[key]!r}; the networks that can be run have {wanted}"
            )

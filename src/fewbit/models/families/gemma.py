"""Gemma, Gemma 2 and Gemma 3 (text)."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig
from .family import (
    Common,
    Family,
    Number,
    activation,
    decoder_config,
    hf_table,
    read_config,
    refuse_unless,
    rope_by_kind,
    window_fields,
)


class _Gemma(Common, kw_only=True):
    head_dim: Positive | None = 256
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    activation: str | None = msgspec.field(name="hidden_activation", default="gelu_pytorch_tanh")
    attention_bias: bool = False
    bidirectional: bool | None = msgspec.field(name="use_bidirectional_attention", default=None)


class _Gemma1(_Gemma, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=16)


class _Scaled(_Gemma, kw_only=True):
    query_scale: Number = msgspec.field(name="query_pre_attn_scalar", default=256)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    layer_types: list[str] | None = None


class _Gemma2(_Scaled, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=30.0)
    attention_cap: Number | None = msgspec.field(name="attn_logit_softcapping", default=50.0)


class _Gemma3(_Scaled, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=None)
    pattern: Positive = msgspec.field(name="sliding_window_pattern", default=6)
    local_theta: Number | None = msgspec.field(name="rope_local_base_freq", default=None)


def _gemma(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """The first Gemma, whose files have "gelu" where the tanh approximation was meant."""
    found = read_config(obj, _Gemma1, names)
    refuse_unless(found.act, (None, "gelu", "gelu_pytorch_tanh"), "hidden_act")
    return decoder_config(found, **_shared_fields(found))


def _gemma2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gemma2, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[i % 2 == 0] for i in range(found.layers)]
    return decoder_config(
        found,
        **_scaled_fields(found),
        **window_fields(found.layer_types or of_layers, found.window),
        attention_cap=found.attention_cap or 0.0,
        logit_cap=found.logit_cap or 0.0,
    )


def _gemma3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gemma3, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[(i + 1) % found.pattern != 0] for i in range(found.layers)]
    return decoder_config(
        found,
        **_scaled_fields(found),
        **window_fields(found.layer_types or of_layers, found.window),
        **rope_by_kind(found, theta=found.rope_theta or 1_000_000.0, window_theta=found.local_theta or 10_000.0),
        qk_norm="head",
        logit_cap=found.logit_cap or 0.0,
    )


def _shared_fields(found: _Gemma) -> dict[str, Any]:
    """The fields of all generations."""
    refuse_unless(found.bidirectional, (None, False), "use_bidirectional_attention")
    return {
        "activation": activation(found.activation or "gelu_pytorch_tanh", "hidden_activation"),
        "norm_offset": 1.0,
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
        "embed_scale": found.width**0.5,
    }


def _scaled_fields(found: _Scaled) -> dict[str, Any]:
    """The fields of Gemma 2 and 3."""
    return {**_shared_fields(found), "norms": "sandwich", "attention_scale": found.query_scale**-0.5}


_NORMS = {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/norm": "pre_feedforward_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}

FAMILIES = (
    Family("gemma", "Gemma", _gemma, gguf="gemma"),
    Family("gemma2", "Gemma 2", _gemma2, hf_table(_NORMS), gguf="gemma2"),
    Family("gemma3_text", "Gemma 3 (text)", _gemma3, hf_table(_NORMS), gguf="gemma3"),
)

"""Gemma 2 and Gemma 3 (text)."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig
from .family import Family, Number, Windowed, activation, decoder_config, hf_table, read_config, refuse_unless, window_fields
from .rope import rope_fields


class _Gemma(Windowed, kw_only=True):
    head_dim: Positive | None = 256
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    activation: str | None = msgspec.field(name="hidden_activation", default="gelu_pytorch_tanh")
    attention_bias: bool = False
    query_scale: Number = msgspec.field(name="query_pre_attn_scalar", default=256)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    bidirectional: bool | None = msgspec.field(name="use_bidirectional_attention", default=None)


class _Gemma2(_Gemma, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=30.0)
    attention_cap: Number | None = msgspec.field(name="attn_logit_softcapping", default=50.0)


class _Gemma3(_Gemma, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=None)
    pattern: Positive = msgspec.field(name="sliding_window_pattern", default=6)
    local_theta: Number | None = msgspec.field(name="rope_local_base_freq", default=None)


def _gemma2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gemma2, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[i % 2 == 0] for i in range(found.layers)]
    return decoder_config(
        found,
        **_shared_fields(found),
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
        **_shared_fields(found),
        **window_fields(found.layer_types or of_layers, found.window),
        **_ropes(found),
        qk_norm="head",
        logit_cap=found.logit_cap or 0.0,
    )


def _shared_fields(found: _Gemma) -> dict[str, Any]:
    """The fields of both generations."""
    refuse_unless(found.bidirectional, (None, False), "use_bidirectional_attention")
    return {
        "activation": activation(found.activation or "gelu_pytorch_tanh", "hidden_activation"),
        "norms": "sandwich",
        "norm_offset": 1.0,
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
        "attention_scale": found.query_scale**-0.5,
        "embed_scale": found.width**0.5,
    }


def _ropes(found: _Gemma3) -> dict[str, Any]:
    """The rotary embedding of full layers, and the base of those with a window."""
    given = found.rope_parameters or {}
    full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if given and not (full or local):
        full = given
    refuse_unless(local.get("rope_type", "default"), ("default",), "rope_parameters.sliding_attention.rope_type")
    head_dim = found.head_dim or found.width // found.heads
    plain = {"rope_theta": found.rope_theta or 1_000_000.0, "partial_rotary_factor": 1.0}
    fields = rope_fields({**full, **(found.rope_scaling or {})}, plain, head_dim=head_dim, context=found.context)
    return {**fields, "window_rope_theta": local.get("rope_theta") or found.local_theta or 10_000.0}


_NORMS = {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/norm": "pre_feedforward_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}

FAMILIES = (
    Family("gemma2", "Gemma 2", _gemma2, hf_table(_NORMS), gguf="gemma2"),
    Family("gemma3_text", "Gemma 3 (text)", _gemma3, hf_table(_NORMS), gguf="gemma3"),
)

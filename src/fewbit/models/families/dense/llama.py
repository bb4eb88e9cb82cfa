"""Llama 2 and 3, InternLM 3, IQuest-Coder, CWM, Mistral, Ministral, Mixtral, Arcee."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import MIXTRAL_NAMES
from ..family import (
    Common,
    Family,
    Number,
    Windowed,
    decoder_config,
    every_nth_full,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)
from ..rope import llama3_rope


class _Llama(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class _InternLM3(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool | None = None  # the older names of the two
    bias: bool | None = None


class _IQuestCoder(_Llama, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)


class _Arcee(_Llama, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="relu2")


class _Cwm(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    window: Count | None = msgspec.field(name="sliding_window", default=8192)
    mlp_bias: bool = False


class _Mistral(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)


class _Ministral3(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)


class _Mixtral(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    experts: Positive = msgspec.field(name="num_local_experts", default=8)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=2)


def _llama(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Llama, names)
    bias = found.attention_bias
    return decoder_config(found, qkv_bias=bias, o_bias=bias, mlp_bias=found.mlp_bias)


def _internlm3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """InternLM 3. transformers has one setting of biases for the projections of attention and of the feed-forward block."""
    found = read_config(obj, _InternLM3, names)
    bias = found.attention_bias if found.qkv_bias is None else found.qkv_bias
    refuse_unless(found.mlp_bias if found.bias is None else found.bias, (bias,), "bias")
    return decoder_config(found, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _iquest_coder(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _IQuestCoder, names)
    bias = found.attention_bias
    return decoder_config(found, qkv_bias=bias, o_bias=bias, mlp_bias=found.mlp_bias)


def _cwm(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Meta's Code World Model: every fourth layer, from the first one on, attends to all positions."""
    found = read_config(obj, _Cwm, names)
    if found.rope_scaling is None and found.rope_parameters is None:
        found.rope_parameters = llama3_rope(1_000_000.0, 16.0)
    kinds = found.layer_types or every_nth_full(found.layers, 4, from_first=True)
    windows = window_fields(kinds, found.window)
    return decoder_config(found, theta=1_000_000.0, mlp_bias=found.mlp_bias, **windows)


def _arcee(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Arcee's AFM, whose feed-forward blocks have no gate."""
    found = read_config(obj, _Arcee, names)
    bias = found.attention_bias
    return decoder_config(found, gated=False, qkv_bias=bias, o_bias=bias, mlp_bias=found.mlp_bias)


def _mistral(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Mistral, names)
    return decoder_config(found, window=found.window or 0)


def _ministral(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Mistral, names)
    of_layers = ["sliding_attention" if found.window else "full_attention"] * found.layers
    return decoder_config(found, **window_fields(found.layer_types or of_layers, found.window))


def _ministral3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Ministral 3, whose queries grow with their position, by the parameters of its rotary embedding."""
    found = read_config(obj, _Ministral3, names)
    rope = found.rope_parameters or found.rope_scaling or _YARN
    found.rope_scaling, found.rope_parameters = None, {key: rope[key] for key in rope if key not in _TEMPERATURE}
    length = rope.get("original_max_position_embeddings") or found.context
    return decoder_config(
        found,
        theta=1_000_000.0,
        window=found.window or 0,
        temperature_scale=rope.get(_TEMPERATURE[0]) or 0.0,
        temperature_length=length,
    )


_TEMPERATURE = ("llama_4_scaling_beta", "max_position_embeddings")
"""The parameters of rotary embedding of Ministral 3 that others do not have."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mixtral(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Mixtral, names)
    experts = Experts(found.experts, found.active, found.hidden)
    return decoder_config(found, theta=1_000_000.0, window=found.window or 0, experts=experts)


FAMILIES = (
    Family("llama", "Llama 2, 3", _llama, gguf="llama", permutes=True),
    Family("internlm3", "InternLM 3", _internlm3, gguf="llama", permutes=True),
    Family("iquestcoder", "IQuest-Coder", _iquest_coder, gguf="llama", permutes=True),
    Family("cwm", "Code World Model", _cwm),
    Family("mistral", "Mistral", _mistral, gguf="llama", permutes=True),
    Family("ministral", "Ministral", _ministral),
    Family("ministral3", "Ministral 3", _ministral3),
    Family("arcee", "Arcee AFM", _arcee, gguf="arcee", permutes=True),
    Family("mixtral", "Mixtral", _mixtral, hf_table(MIXTRAL_NAMES), gguf="llama", permutes=True),
)

"""Qwen2, Qwen3, and their mixtures of experts."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ...errors import QuantError
from ..config import DecoderConfig, Experts
from .experts import expert_layout, expert_names
from .family import Family, Windowed, decoder_config, hf_table, read_config, window_fields


class _Qwen2(Windowed, kw_only=True):
    use_window: bool = msgspec.field(name="use_sliding_window", default=False)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    max_window_layers: Count = 28


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Positive | None = 128
    attention_bias: bool = False


class _Mixture(_Qwen2, kw_only=True):
    experts: Positive | None = msgspec.field(name="num_experts", default=None)
    local_experts: Positive | None = msgspec.field(name="num_local_experts", default=None)  # its other name
    active: Positive = msgspec.field(name="num_experts_per_tok")
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size")
    normalized: bool = msgspec.field(name="norm_topk_prob", default=False)
    step: Positive = msgspec.field(name="decoder_sparse_step", default=1)
    dense: list[Count] | None = msgspec.field(name="mlp_only_layers", default=None)


class _Qwen2Moe(_Mixture, kw_only=True):
    qkv_bias: bool = True
    shared_hidden: Positive = msgspec.field(name="shared_expert_intermediate_size")


class _Qwen3Moe(_Mixture, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    attention_bias: bool = False


def _qwen2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Qwen2, names)
    return decoder_config(found, qkv_bias=True, **_last_layers(found))


def _qwen3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Qwen3, names)
    bias = found.attention_bias
    return decoder_config(found, qk_norm="head", qkv_bias=bias, o_bias=bias, **_last_layers(found))


def _qwen2_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Qwen2Moe, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[i % 2 == 0 and i < found.max_window_layers and found.use_window] for i in range(found.layers)]
    windows = window_fields(found.layer_types or of_layers, found.window)
    experts = _experts(found, names, shared_hidden=found.shared_hidden)
    return decoder_config(found, qkv_bias=found.qkv_bias, experts=experts, **windows)


def _qwen3_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Qwen3Moe, names)
    bias, window = found.attention_bias, 0
    if found.use_window:
        window = found.window or 0
    return decoder_config(found, qk_norm="head", qkv_bias=bias, o_bias=bias, window=window, experts=_experts(found, names))


def _last_layers(found: _Qwen2) -> dict[str, Any]:
    """The fields of the window, which the layers after `max_window_layers` have."""
    full = min(found.max_window_layers, found.layers)
    if not found.use_window:
        full = found.layers
    of_layers = ["full_attention"] * full + ["sliding_attention"] * (found.layers - full)
    return window_fields(found.layer_types or of_layers, found.window)


def _experts(found: _Mixture, names: Collection[str], shared_hidden: int = 0) -> Experts | None:
    """The mixture of experts; None if every layer is dense."""
    count = found.experts or found.local_experts
    if count is None or found.local_experts not in (None, count):
        raise QuantError(
            f"config.json has num_experts = {found.experts} and num_local_experts = {found.local_experts}; one number of "
            "experts is expected"
        )
    dense = found.dense or []
    layers = tuple(i for i in range(found.layers) if i not in dense and (i + 1) % found.step == 0)
    if not layers:
        return None
    if len(layers) == found.layers:
        layers = ()
    return Experts(
        count,
        found.active,
        found.expert_hidden,
        normalized=found.normalized,
        layers=layers,
        shared_hidden=shared_hidden,
        layout=expert_layout(names),
    )


_EXPERTS = {**expert_names("shared_expert"), "mlp/shared_expert_gate": "mlp.shared_expert_gate.weight"}

FAMILIES = (
    Family("qwen2", "Qwen2", _qwen2, gguf="qwen2"),
    Family("qwen3", "Qwen3", _qwen3, gguf="qwen3"),
    Family("qwen2_moe", "Qwen2-MoE", _qwen2_moe, hf_table(_EXPERTS), gguf="qwen2moe"),
    Family("qwen3_moe", "Qwen3-MoE", _qwen3_moe, hf_table(_EXPERTS), gguf="qwen3moe"),
)

"""Qwen2, Qwen3, Qwen3-Next and Qwen3.5, and their mixtures of experts; Mellum 2."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import QuantError
from ...config import DecoderConfig
from ...part_configs import Experts, LinearAttention, LinearLayout
from ..experts import expert_layout, expert_names, sparse_layers
from ..family import (
    Common,
    Family,
    Windowed,
    decoder_config,
    gguf_table,
    hf_table,
    read_config,
    refuse_unless,
    rope_by_kind,
    window_fields,
)
from ..rope import without_images


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


class _Hybrid(Common, kw_only=True):
    """Three layers of four have linear attention, and the others a gate on the output of softmax attention."""

    head_dim: Positive | None = 256
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    attention_bias: bool = False
    has_gate: bool = msgspec.field(name="attn_output_gate", default=True)
    layer_types: list[str] | None = None
    period: Positive = msgspec.field(name="full_attention_interval", default=4)
    kernel: Positive = msgspec.field(name="linear_conv_kernel_dim", default=4)
    key_dim: Positive = msgspec.field(name="linear_key_head_dim", default=128)
    value_dim: Positive = msgspec.field(name="linear_value_head_dim", default=128)
    key_heads: Positive = msgspec.field(name="linear_num_key_heads", default=16)
    value_heads: Positive = msgspec.field(name="linear_num_value_heads", default=32)
    state_dtype: str | None = msgspec.field(name="mamba_ssm_dtype", default=None)
    gate_activation: str | None = msgspec.field(name="output_gate_type", default=None)  # of linear attention
    mtp_num_hidden_layers: Count | None = None  # whose tensors are named mtp.*


class _HybridMixture(_Hybrid, kw_only=True):
    hidden: Positive = msgspec.field(name="intermediate_size", default=5632)
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    experts: Positive = msgspec.field(name="num_experts")
    active: Positive = msgspec.field(name="num_experts_per_tok")
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=512)
    shared_hidden: Positive = msgspec.field(name="shared_expert_intermediate_size", default=512)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    step: Positive = msgspec.field(name="decoder_sparse_step", default=1)
    dense: list[Count] | None = msgspec.field(name="mlp_only_layers", default=None)


class _Qwen2Moe(_Mixture, kw_only=True):
    qkv_bias: bool = True
    shared_hidden: Positive = msgspec.field(name="shared_expert_intermediate_size")


class _Qwen3Moe(_Mixture, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    attention_bias: bool = False


class _Mellum(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    head_dim: Positive | None = 128
    window: Count | None = msgspec.field(name="sliding_window", default=1024)
    attention_bias: bool = False
    experts: Positive | None = msgspec.field(name="num_experts", default=None)
    local_experts: Positive | None = msgspec.field(name="num_local_experts", default=None)  # its other name
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=896)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    kinds: list[str] | None = msgspec.field(name="mlp_layer_types", default=None)


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


def _mellum(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Mellum 2: Qwen3's experts, and a sliding window in some layers. Layers for multi-token prediction are named mtp.*"""
    found = read_config(obj, _Mellum, names, _MULTI_TOKEN)
    layers, experts = sparse_layers(found.kinds or ["sparse"] * found.layers, found.layers), None
    if layers is not None:
        count = found.experts or found.local_experts or 64
        settings: dict[str, Any] = {"normalized": found.normalized, "layers": layers}
        experts = Experts(count, found.active, found.expert_hidden, layout=expert_layout(names), **settings)
    return decoder_config(
        found,
        qk_norm="head",
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        experts=experts,
        **rope_by_kind(found, theta=500_000.0, window_theta=10_000.0),
        **window_fields(found.layer_types or ["full_attention"] * found.layers, found.window),
    )


_MULTI_TOKEN = (
    *("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    "max_window_layers",
)
"""Keys of layers that are not run, and one that transformers does not read."""


def _qwen3_5(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    return _hybrid(read_config(obj, _Hybrid, names))


def _qwen3_5_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _HybridMixture, names)
    refuse_unless(found.dense or [], ([],), "mlp_only_layers")
    refuse_unless(found.step, (1,), "decoder_sparse_step")
    return _hybrid(found, experts=_hybrid_experts(found, (), names))


def _qwen3_next(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _HybridMixture, names)
    layers = _sparse_layers(found.layers, found.dense or [], found.step)
    experts = None if layers is None else _hybrid_experts(found, layers, names)
    return _hybrid(found, layout="by_key_head", experts=experts)


def _hybrid(found: _Hybrid, layout: LinearLayout = "separate", **settings: Any) -> DecoderConfig:
    """The configuration of a decoder with linear attention."""
    kinds = ("full_attention", "linear_attention")
    types = found.layer_types or [kinds[bool((i + 1) % found.period)] for i in range(found.layers)]
    if len(types) != found.layers:
        raise QuantError(f"config.json has layer_types of {len(types)} layers; expected num_hidden_layers, {found.layers}")
    for kind in types:
        refuse_unless(kind, kinds, "layer_types")
    refuse_unless(found.gate_activation, (None, "swish", "silu"), "output_gate_type")
    refuse_unless(found.state_dtype, (None, "float32"), "mamba_ssm_dtype")
    refuse_unless(found.act, ("silu", "swish", None), "hidden_act")
    linear = None
    if layers := tuple(i for i, kind in enumerate(types) if kind == "linear_attention"):
        sizes = (found.key_heads, found.value_heads, found.key_dim, found.value_dim, found.kernel)
        linear = LinearAttention(layers, *sizes, layout)
    rope = without_images(found.rope_parameters or {})
    found = msgspec.structs.replace(found, rope_parameters=rope, partial_rotary=found.partial_rotary or 0.25)
    return decoder_config(
        found,
        rotates_part=True,
        qk_norm="head",
        norm_offset=1.0,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        attention_gate=found.has_gate,
        linear=linear,
        **settings,
    )


def _hybrid_experts(found: _HybridMixture, layers: tuple[int, ...], names: Collection[str]) -> Experts:
    """The mixture of experts of a decoder with linear attention."""
    sizes = (found.experts, found.active, found.expert_hidden)
    settings = {"normalized": found.normalized, "shared_hidden": found.shared_hidden, "layout": expert_layout(names)}
    return Experts(*sizes, layers=layers, **settings)


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
    layers = _sparse_layers(found.layers, found.dense or [], found.step)
    if layers is None:
        return None
    return Experts(
        count,
        found.active,
        found.expert_hidden,
        normalized=found.normalized,
        layers=layers,
        shared_hidden=shared_hidden,
        layout=expert_layout(names),
    )


def _sparse_layers(count: int, dense: Collection[int], step: int) -> tuple[int, ...] | None:
    """The layers with experts, as `Experts.layers`; None: no layer has them."""
    layers = tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)
    if not layers:
        return None
    return layers if len(layers) < count else ()


_LINEAR = {
    **{f"attn/{name}": f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "qkvz", "ba")},
    "attn/beta": "linear_attn.in_proj_b.weight",
    "attn/alpha": "linear_attn.in_proj_a.weight",
    "attn/conv1d": "linear_attn.conv1d.weight",
    "attn/dt_bias": "linear_attn.dt_bias",
    "attn/A_log": "linear_attn.A_log",
    "attn/out_norm": "linear_attn.norm.weight",
    "attn/out": "linear_attn.out_proj.weight",
}
_EXPERTS = {**expert_names("shared_expert"), "mlp/shared_expert_gate": "mlp.shared_expert_gate.weight"}
_HYBRID_GGUF = gguf_table(
    {
        "mlp/norm": "post_attention_norm.weight",
        "attn/qkv": "attn_qkv.weight",
        "attn/z": "attn_gate.weight",
        **{f"attn/{name}": f"ssm_{name}.weight" for name in ("beta", "alpha", "ba", "conv1d", "out")},
        "attn/dt_bias": "ssm_dt.bias",
        "attn/A": "ssm_a",
        "attn/out_norm": "ssm_norm.weight",
    }
)
_HYBRID_TABLE = dataclasses.replace(hf_table({**_LINEAR, **_EXPERTS}), others=r"mtp\..*")

FAMILIES = (
    Family("qwen2", "Qwen2", _qwen2, gguf="qwen2"),
    Family("qwen3", "Qwen3", _qwen3, gguf="qwen3"),
    Family("qwen2_moe", "Qwen2-MoE", _qwen2_moe, hf_table(_EXPERTS), gguf="qwen2moe"),
    Family("qwen3_moe", "Qwen3-MoE", _qwen3_moe, hf_table(_EXPERTS), gguf="qwen3moe"),
    Family("mellum", "Mellum 2", _mellum, dataclasses.replace(hf_table(_EXPERTS), others=r"mtp\..*")),
    Family("qwen3_next", "Qwen3-Next", _qwen3_next, _HYBRID_TABLE, gguf="qwen3next", gguf_table=_HYBRID_GGUF),
    Family("qwen3_5_text", "Qwen3.5", _qwen3_5, _HYBRID_TABLE, gguf="qwen35", gguf_table=_HYBRID_GGUF),
    Family("qwen3_5_moe_text", "Qwen3.5-MoE", _qwen3_5_moe, _HYBRID_TABLE, gguf="qwen35moe", gguf_table=_HYBRID_GGUF),
)

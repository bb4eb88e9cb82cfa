"""GLM-4; and GLM-4.5 to 4.7, Solar Open, dots.llm1 and MiniMax-M2, with DeepSeek-V3's router."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import MIXTRAL_NAMES, ROUTED_NAMES, Routed, routed_experts
from ..family import (
    SECOND_NORM,
    Common,
    Family,
    Number,
    decoder_config,
    gguf_table,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)
from .deepseek import LATENT_GGUF, LATENT_NAMES, DeepSeekV3, latent_config


class _Glm4(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1.5625e-7)
    partial_rotary: Number | None = msgspec.field(name="partial_rotary_factor", default=0.5)
    attention_bias: bool = True


class _GlmMoe(Routed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    partial_rotary: Number | None = msgspec.field(name="partial_rotary_factor", default=0.5)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=1)
    attention_bias: bool = False
    qk_norm: bool = msgspec.field(name="use_qk_norm", default=False)
    extra_layers: Count = msgspec.field(name="num_nextn_predict_layers", default=0)


class _Solar(_GlmMoe, kw_only=True):
    hidden: Positive = msgspec.field(name="intermediate_size", default=1)  # of no layer
    head_dim: Positive | None = 128
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1280)
    experts: Positive = msgspec.field(name="n_routed_experts", default=128)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    shared: Count | None = msgspec.field(name="n_shared_experts", default=1)
    partial_rotary: Number | None = msgspec.field(name="partial_rotary_factor", default=None)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=0)


class _GlmLite(DeepSeekV3, kw_only=True):
    query_rank: Positive | None = msgspec.field(name="q_lora_rank", default=768)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    scale: Number = msgspec.field(name="routed_scaling_factor", default=1.8)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=1)
    kinds: list[str] | None = msgspec.field(name="mlp_layer_types", default=None)


class _Dots(Routed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=32)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    layer_types: list[str] | None = None
    max_window_layers: Count = 62
    attention_bias: bool = False
    scores: str | None = msgspec.field(name="scoring_func", default=None)
    step: Positive = msgspec.field(name="moe_layer_freq", default=1)


class _MiniMax(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    experts: Positive = msgspec.field(name="num_local_experts", default=256)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    rotary_dim: Positive | None = None
    scores: str = msgspec.field(name="scoring_func", default="sigmoid")
    kinds: list[int] = msgspec.field(name="attn_type_list", default_factory=list)
    has_norms: bool = msgspec.field(name="use_qk_norm", default=True)
    norms: str = msgspec.field(name="qk_norm_type", default="per_layer")
    has_corrections: bool = msgspec.field(name="use_routing_bias", default=True)
    full_beta: Number = msgspec.field(name="layernorm_full_attention_beta", default=1.0)
    linear_beta: Number = msgspec.field(name="layernorm_linear_attention_beta", default=1.0)
    mlp_beta: Number = msgspec.field(name="layernorm_mlp_beta", default=1.0)
    shared_moe_mode: str | None = None  # of a shared expert and of dense layers, which it does not have
    mlp_intermediate_size: int | None = None
    use_mtp: bool = False
    modules: Count = msgspec.field(name="num_mtp_modules", default=0)
    module_layers: Count = msgspec.field(name="mtp_transformer_layers", default=1)


def _glm(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Glm4, names)
    return decoder_config(found, rope="interleaved", rotates_part=True, fused_mlp=True, qkv_bias=found.attention_bias)


def _glm4(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    return dataclasses.replace(_glm(obj, names), norms="sandwich")


def _glm_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GlmMoe, names)
    return decoder_config(
        found,
        rotates_part=True,
        qkv_bias=found.attention_bias,
        qk_norm="head" if found.qk_norm else "none",
        experts=routed_experts(found, names, scores="sigmoid"),
        extra_layers=found.extra_layers,
    )


def _solar(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Solar Open, whose layers all have experts. Its files may say how dense ones would be."""
    found = read_config(obj, _Solar, names)
    refuse_unless(found.dense, (0,), "first_k_dense_replace")
    refuse_unless(found.qk_norm, (False,), "use_qk_norm")
    return decoder_config(
        found,
        theta=1_000_000.0,
        rotates_part=True,
        qkv_bias=found.attention_bias,
        experts=routed_experts(found, names, scores="sigmoid"),
    )


def _glm_lite(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GlmLite, names)
    return latent_config(found, names, found.kinds)


def _dots(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Dots, names)
    refuse_unless(found.scores, (None, "noaux_tc", "sigmoid"), "scoring_func")
    refuse_unless(found.step, (1,), "moe_layer_freq")
    full = found.max_window_layers if found.window else found.layers
    of_layers = ["full_attention" if i < full else "sliding_attention" for i in range(found.layers)]
    return decoder_config(
        found,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        qk_norm="head",
        experts=routed_experts(found, names, scores="sigmoid"),
        **window_fields(found.layer_types or of_layers, found.window),
    )


def _minimax(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _MiniMax, names)
    refuse_unless(found.scores, ("sigmoid",), "scoring_func")
    refuse_unless(found.has_norms, (True,), "use_qk_norm")
    refuse_unless(found.norms, ("per_layer",), "qk_norm_type")
    refuse_unless(found.has_corrections, (True,), "use_routing_bias")
    for kind in found.kinds:
        refuse_unless(kind, (1,), "attn_type_list")
    for name in ("full", "linear", "mlp"):
        refuse_unless(
            getattr(found, f"{name}_beta"), (1.0,), f"layernorm_{name}{'' if name == 'mlp' else '_attention'}_beta"
        )
    if found.rotary_dim:
        found.partial_rotary = found.rotary_dim / (found.head_dim or found.width // found.heads)
    return decoder_config(
        found,
        theta=5_000_000.0,
        rotates_part=True,
        qk_norm="projection",
        experts=Experts(found.experts, found.active, found.hidden, scores="sigmoid", shared_gate=False),
        extra_layers=found.modules * found.module_layers if found.use_mtp else 0,
    )


_MINIMAX_NAMES = {**MIXTRAL_NAMES, "mlp/router_correction_bias": "block_sparse_moe.e_score_correction_bias"}

_FUSED = {"mlp/gate+up": "mlp.gate_up_proj.weight"}
_FOUR_NORMS = {
    "attn/post_norm": "post_self_attn_layernorm.weight",
    "mlp/norm": "post_attention_layernorm.weight",
    "mlp/post_norm": "post_mlp_layernorm.weight",
}

FAMILIES = (
    Family("glm", "GLM-4 (2024)", _glm, hf_table(_FUSED)),
    Family(
        "glm4", "GLM-4", _glm4, hf_table({**_FUSED, **_FOUR_NORMS}), "glm4", gguf_table({"mlp/gate+up": "ffn_up.weight"})
    ),
    Family("glm4_moe", "GLM-4.5, 4.6", _glm_moe, hf_table(ROUTED_NAMES), "glm4moe", SECOND_NORM),
    Family("solar_open", "Solar Open", _solar, hf_table(ROUTED_NAMES), "glm4moe", SECOND_NORM),
    Family("glm4_moe_lite", "GLM-4.7-Flash", _glm_lite, hf_table(LATENT_NAMES), "deepseek2", LATENT_GGUF),
    Family("dots1", "dots.llm1", _dots, hf_table(ROUTED_NAMES), "dots1"),
    Family("minimax_m2", "MiniMax-M2", _minimax, hf_table(_MINIMAX_NAMES), "minimax-m2"),
)

"""Hunyuan: norms of queries and keys after rotary embedding; Hunyuan 3, with DeepSeek-V3's router."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import ROUTED_NAMES, Routed, expert_layout, expert_names, routed_experts
from ..family import Common, Family, Number, decoder_config, hf_table, read_config, refuse_unless


class _Hunyuan(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False
    has_norms: bool = msgspec.field(name="use_qk_norm", default=True)
    shares_keys: bool = msgspec.field(name="use_cla", default=False)


class _HunyuanMoe(_Hunyuan, kw_only=True):
    experts: Positive = msgspec.field(name="num_experts", default=1)
    active: Positive | list[Positive] = msgspec.field(name="moe_topk", default=1)
    shared: Positive | list[Positive] = msgspec.field(name="num_shared_expert", default=1)
    expert_hidden: Positive | list[Positive] | None = msgspec.field(name="moe_intermediate_size", default=None)


class _Hunyuan3(Routed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    experts: Positive = msgspec.field(name="num_experts", default=192)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1536)
    shared: Count | None = msgspec.field(name="num_shared_experts", default=1)
    scale: Number = msgspec.field(name="router_scaling_factor", default=2.826)
    normalized: bool = msgspec.field(name="route_norm", default=True)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=1)
    kinds: list[str] | None = msgspec.field(name="mlp_layer_types", default=None)
    attention_bias: bool = False
    mlp_bias: bool = False
    extra_layers: Count = msgspec.field(name="num_nextn_predict_layers", default=0)


_UNREAD = (
    *(
        "use_rotary_pos_emb",
        "norm_type",
        "mlp_bias",
        "attention_head_dim",
        "cla_share_factor",
        "org_vocab_size",
    ),
    *(
        "use_mixed_mlp_moe",
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "moe_layer_num_skipped",
        "num_media_embeds",
    ),
    *("position_embedding_xdrope", "add_classification_head", "class_num", "pool_type", "group_limited_greedy"),
)
"""Keys of published configurations that transformers does not read."""


def _hunyuan(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Hunyuan, names, _UNREAD)
    return decoder_config(found, **_shared_fields(found))


def _hunyuan_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Hunyuan-A13B, whose layers have as many experts of one width, and one that every token passes."""
    found = read_config(obj, _HunyuanMoe, names, _UNREAD)
    active = found.active if isinstance(found.active, int) else found.active[0]
    for key, given, size in (
        ("moe_topk", found.active, active),
        ("num_shared_expert", found.shared, 1),
        ("moe_intermediate_size", found.expert_hidden, found.hidden),
    ):
        refuse_unless(given, (size, [size] * found.layers, None), key)
    experts = Experts(
        found.experts,
        active,
        found.hidden,
        shared_hidden=found.hidden,
        shared_gate=False,
        layout=expert_layout(names),
    )
    return decoder_config(found, experts=experts, **_shared_fields(found))


def _shared_fields(found: _Hunyuan) -> dict[str, Any]:
    """The fields of the norms of queries and keys, of biases, and of rotary embedding, whose base may be scaled by `alpha`."""
    refuse_unless(found.has_norms, (True,), "use_qk_norm")
    refuse_unless(found.shares_keys, (False,), "use_cla")
    rope = found.rope_parameters or found.rope_scaling or {}
    fields = {"qk_norm": "rotated_head", "qkv_bias": found.attention_bias, "o_bias": found.attention_bias}
    if rope.get("rope_type", rope.get("type")) != "dynamic" or not rope.get("alpha"):
        return fields
    head_dim = found.head_dim or found.width // found.heads
    theta = rope.get("rope_theta") or found.rope_theta or 10_000.0
    return {**fields, "rope_theta": theta * rope["alpha"] ** (head_dim / (head_dim - 2))}


def _hunyuan3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Hunyuan3, names, ("enable_moe_fp32_combine",))
    refuse_unless(found.normalized, (True,), "route_norm")
    refuse_unless(found.mlp_bias, (False,), "mlp_bias")
    return decoder_config(
        found,
        theta=11_158_840.0,
        qk_norm="head",
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        experts=routed_experts(found, names, found.kinds, scores="sigmoid"),
        extra_layers=found.extra_layers,
    )


_NORMS = {"attn/q_norm": "self_attn.query_layernorm.weight", "attn/k_norm": "self_attn.key_layernorm.weight"}
_MOE = {
    **_NORMS,
    **expert_names("shared_mlp"),
    "mlp/router": "mlp.gate.wg.weight",
}
_HUNYUAN_3 = {
    **ROUTED_NAMES,
    **{f"mlp/shared/{name}": f"mlp.shared_mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "mlp/router": "mlp.router.gate.weight",
    "mlp/router_correction_bias": "mlp.expert_bias",
}

FAMILIES = (
    Family("hunyuan_v1_dense", "Hunyuan", _hunyuan, hf_table(_NORMS), "hunyuan-dense"),
    Family("hunyuan_v1_moe", "Hunyuan A13B", _hunyuan_moe, hf_table(_MOE), "hunyuan-moe"),
    Family("hy_v3", "Hunyuan 3", _hunyuan3, hf_table(_HUNYUAN_3)),
)

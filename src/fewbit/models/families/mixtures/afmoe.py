"""Arcee's Trinity: a gate on the output of attention, norms around blocks, DeepSeek-V3's router."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ..experts import ROUTED_NAMES, Routed, routed_experts
from ..family import Family, Number, decoder_config, every_nth_full, hf_table, read_config, refuse_unless, window_fields


class _Afmoe(Routed, kw_only=True):
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    context: Positive = msgspec.field(name="max_position_embeddings", default=16384)
    experts: Positive = msgspec.field(name="num_experts", default=64)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=6)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1408)
    shared: Count | None = msgspec.field(name="num_shared_experts", default=2)
    scale: Number = msgspec.field(name="route_scale", default=1.0)
    normalized: bool = msgspec.field(name="route_norm", default=True)
    scores: str | None = msgspec.field(name="score_func", default=None)
    dense: Count = msgspec.field(name="num_dense_layers", default=1)
    window: Count | None = msgspec.field(name="sliding_window", default=1024)
    layer_types: list[str] | None = None
    step: Positive = msgspec.field(name="global_attn_every_n_layers", default=4)
    scales_embeddings: bool = msgspec.field(name="mup_enabled", default=False)
    attention_bias: bool = False


_UNREAD = ("load_balance_coeff", "use_grouped_mm", "num_expert_groups", "num_limited_groups")
"""Keys of published configurations that transformers does not read."""


def _afmoe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Trinity. Its layers without a window have no rotary embedding."""
    found = read_config(obj, _Afmoe, names, _UNREAD)
    refuse_unless(found.normalized, (True,), "route_norm")
    refuse_unless(found.scores, (None, "sigmoid"), "score_func")
    refuse_unless(found.groups, (None, 1), "n_group")  # which transformers does not read
    kinds = found.layer_types or every_nth_full(found.layers, found.step)
    return decoder_config(
        found,
        norms="sandwich",
        qk_norm="head",
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        attention_gate=True,
        separate_gate=True,
        nope_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        embed_scale=found.width**0.5 if found.scales_embeddings else 1.0,
        experts=routed_experts(found, names, scores="sigmoid"),
        **window_fields(kinds, found.window),
    )


_NAMES = {
    **ROUTED_NAMES,
    "attn/gate": "self_attn.gate_proj.weight",
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/norm": "pre_mlp_layernorm.weight",
    "mlp/post_norm": "post_mlp_layernorm.weight",
    "mlp/router": "mlp.router.gate.weight",
    "mlp/router_correction_bias": "mlp.expert_bias",
}

FAMILIES = (Family("afmoe", "Trinity", _afmoe, hf_table(_NAMES)),)

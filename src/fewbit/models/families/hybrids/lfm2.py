"""LFM2 and LFM2-MoE: gated short convolutions in place of most attention."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ...._hybrids import LFM2, layers_with_state, lfm2_hidden, lfm2_layer_types
from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts, ShortConvolution
from ..experts import expert_layout
from ..family import Common, Family, Number, decoder_config, gguf_table, hf_table, read_config, refuse_unless


class _ShortConv(Common, kw_only=True):
    """The schema of decoders with short convolutions."""

    norm_eps: Number = msgspec.field(name="norm_eps", default=1e-5)
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    tied_before: bool | None = msgspec.field(name="tie_embedding", default=None)
    kernel: Positive = msgspec.field(name="conv_L_cache", default=3)
    conv_bias: bool = False


class _Lfm2(_ShortConv, kw_only=True):
    hidden: Positive = msgspec.field(name="intermediate_size", default=12288)
    hidden_before: Positive | None = msgspec.field(name="block_ff_dim", default=None)
    is_adjusted: bool = msgspec.field(name="block_auto_adjust_ff_dim", default=True)
    factor: Number | None = msgspec.field(name="block_ffn_dim_multiplier", default=1.0)
    multiple: Positive = msgspec.field(name="block_multiple_of", default=256)
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    attention: list[Count] | None = msgspec.field(name="full_attn_idxs", default=None)


class _Lfm2Moe(_ShortConv, kw_only=True):
    hidden: Positive = msgspec.field(name="intermediate_size", default=7168)
    kinds: list[str] = msgspec.field(name="layer_types")
    dense: Count = msgspec.field(name="num_dense_layers", default=2)
    experts: Positive = msgspec.field(name="num_experts", default=32)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=4)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1792)
    has_bias: bool = msgspec.field(name="use_expert_bias", default=True)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    scale: Number = msgspec.field(name="routed_scaling_factor", default=1.0)


_UNREAD = (
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps", "block_use_swiglu", "use_pos_enc"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
)
"""Keys of published configurations that transformers does not read."""


def _lfm2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Lfm2, names, _UNREAD)
    given = found.hidden_before or found.hidden
    hidden = lfm2_hidden(given, is_adjusted=found.is_adjusted, factor=found.factor, multiple=found.multiple)
    return _with_convolutions(found, lfm2_layer_types(found.kinds, found.attention, found.layers), hidden=hidden)


def _lfm2_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """LFM2 with experts in all but the first layers, whose router is DeepSeek-V3's."""
    found = read_config(obj, _Lfm2Moe, names, _UNREAD)
    refuse_unless(found.has_bias, (True,), "use_expert_bias")
    if found.dense >= found.layers:
        return _with_convolutions(found, found.kinds)
    experts = Experts(
        found.experts,
        found.active,
        found.expert_hidden,
        normalized=found.normalized,
        layers=tuple(range(found.dense, found.layers)) if found.dense else (),
        scores="sigmoid",
        scale=found.scale,
        sum_eps=1e-6,
        layout=expert_layout(names),
    )
    return _with_convolutions(found, found.kinds, experts=experts)


def _with_convolutions(found: _ShortConv, kinds: Sequence[str], **settings: Any) -> DecoderConfig:
    """The configuration of the shared fields, and of short convolutions in the layers of that kind."""
    layers = layers_with_state(kinds, found.layers, LFM2)
    return decoder_config(
        found,
        theta=1e6,
        tied=found.tied if found.tied_before is None else found.tied_before,
        qk_norm="head",
        short_conv=ShortConvolution(layers, found.width, found.kernel, found.conv_bias) if layers else None,
        **settings,
    )


_TABLE = hf_table(
    {
        "mlp/router": "feed_forward.gate.weight",
        "mlp/router_correction_bias": "feed_forward.expert_bias",
        "mlp/experts/{}/gate": "feed_forward.experts.{}.w1.weight",
        "mlp/experts/{}/up": "feed_forward.experts.{}.w3.weight",
        "mlp/experts/{}/down": "feed_forward.experts.{}.w2.weight",
        "mlp/experts/gate+up": "feed_forward.experts.gate_up_proj",
        "mlp/experts/down": "feed_forward.experts.down_proj",
        "attn/norm": "operator_norm.weight",
        "mlp/norm": "ffn_norm.weight",
        "attn/o": "self_attn.out_proj.weight",
        "attn/q_norm": "self_attn.q_layernorm.weight",
        "attn/k_norm": "self_attn.k_layernorm.weight",
        "mlp/gate": "feed_forward.w1.weight",
        "mlp/up": "feed_forward.w3.weight",
        "mlp/down": "feed_forward.w2.weight",
        "attn/in": "conv.in_proj.weight",
        "attn/in_bias": "conv.in_proj.bias",
        "attn/conv1d": "conv.conv.weight",
        "attn/conv1d_bias": "conv.conv.bias",
        "attn/out": "conv.out_proj.weight",
        "attn/out_bias": "conv.out_proj.bias",
    },
    {"norm": "model.embedding_norm.weight"},
)

_GGUF = gguf_table(
    {
        "attn/in": "shortconv.in_proj.weight",
        "attn/conv1d": "shortconv.conv.weight",
        "attn/out": "shortconv.out_proj.weight",
    },
    {"norm": "token_embd_norm.weight"},
)

FAMILIES = (
    Family("lfm2", "LFM2", _lfm2, _TABLE, gguf="lfm2", gguf_table=_GGUF),
    Family("lfm2_moe", "LFM2-MoE", _lfm2_moe, _TABLE, gguf="lfm2moe", gguf_table=_GGUF),
)

"""LFM2: gated short convolutions in place of most attention."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._hybrids import LFM2, layers_with_state, lfm2_hidden, lfm2_layer_types
from ..._json import Count, Positive
from ..config import DecoderConfig
from ..part_configs import ShortConvolution
from .family import Common, Family, Number, decoder_config, gguf_table, hf_table, read_config


class _Lfm2(Common, kw_only=True):
    hidden: Positive = msgspec.field(name="intermediate_size", default=12288)
    norm_eps: Number = msgspec.field(name="norm_eps", default=1e-5)
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    tied_before: bool | None = msgspec.field(name="tie_embedding", default=None)
    hidden_before: Positive | None = msgspec.field(name="block_ff_dim", default=None)
    is_adjusted: bool = msgspec.field(name="block_auto_adjust_ff_dim", default=True)
    factor: Number | None = msgspec.field(name="block_ffn_dim_multiplier", default=1.0)
    multiple: Positive = msgspec.field(name="block_multiple_of", default=256)
    kernel: Positive = msgspec.field(name="conv_L_cache", default=3)
    conv_bias: bool = False
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    attention: list[Count] | None = msgspec.field(name="full_attn_idxs", default=None)


_UNREAD = (
    *("block_dim", "conv_dim", "conv_dim_out", "num_heads", "block_norm_eps", "block_use_swiglu", "use_pos_enc"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
)
"""Keys of published configurations that transformers does not read."""


def _lfm2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config({key: obj[key] for key in obj if key not in _UNREAD}, _Lfm2, names)
    kinds = lfm2_layer_types(found.kinds, found.attention, found.layers)
    layers = layers_with_state(kinds, found.layers, LFM2)
    given = found.hidden_before or found.hidden
    return decoder_config(
        found,
        theta=1e6,
        hidden=lfm2_hidden(given, is_adjusted=found.is_adjusted, factor=found.factor, multiple=found.multiple),
        tied=found.tied if found.tied_before is None else found.tied_before,
        qk_norm="head",
        short_conv=ShortConvolution(layers, found.width, found.kernel, found.conv_bias) if layers else None,
    )


_TABLE = hf_table(
    {
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

FAMILIES = (Family("lfm2", "LFM2", _lfm2, _TABLE, gguf="lfm2", gguf_table=_GGUF),)

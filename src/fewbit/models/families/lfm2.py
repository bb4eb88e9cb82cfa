"""LFM2: gated short convolutions in place of most attention."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig
from ..part_configs import ShortConvolution
from .family import Common, Family, Number, decoder_config, gguf_table, hf_table, read_config, refuse_unless


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
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init", "theta"),
)
"""Keys of published configurations that transformers does not read."""


def _lfm2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config({key: obj[key] for key in obj if key not in _UNREAD}, _Lfm2, names)
    kinds = found.kinds
    if kinds is None:
        attention = range(found.layers) if found.attention is None else found.attention
        kinds = ["full_attention" if i in attention else "conv" for i in range(found.layers)]
    for kind in kinds:
        refuse_unless(kind, ("conv", "full_attention"), "layer_types")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "conv")
    return decoder_config(
        found,
        theta=1e6,
        hidden=_hidden(found),
        tied=found.tied if found.tied_before is None else found.tied_before,
        qk_norm="head",
        short_conv=ShortConvolution(layers, found.width, found.kernel, found.conv_bias) if layers else None,
    )


def _hidden(found: _Lfm2) -> int:
    """The width of the feed-forward block: two thirds of what is given, times a factor, rounded up."""
    hidden = found.hidden_before or found.hidden
    if not found.is_adjusted:
        return hidden
    hidden = int(2 * hidden / 3)
    if found.factor is None:
        return hidden
    return -(-int(found.factor * hidden) // found.multiple) * found.multiple


_TABLE = hf_table(
    {
        "attn/norm": "operator_norm.weight",
        "mlp/norm": "ffn_norm.weight",
        "attn/o": "self_attn.out_proj.weight",
        "attn/q_norm": "self_attn.q_layernorm.weight",
        "attn/k_norm": "self_attn.k_layernorm.weight",
        **{
            f"mlp/{ours}": f"feed_forward.{theirs}.weight" for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
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
        **{
            f"attn/{name}": f"shortconv.{theirs}.weight"
            for name, theirs in (("in", "in_proj"), ("conv1d", "conv"), ("out", "out_proj"))
        },
    },
    {"norm": "token_embd_norm.weight"},
)

FAMILIES = (Family("lfm2", "LFM2", _lfm2, _TABLE, gguf="lfm2", gguf_table=_GGUF),)

"""BitNet b1.58: a squared ReLU, and norms before the last projections."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, hf_table, read_config


class _BitNet(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=5)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="relu2")
    attention_bias: bool = False


def _bitnet(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _BitNet, names)
    bias = found.attention_bias
    return decoder_config(found, theta=500_000.0, sub_norms=True, qkv_bias=bias, o_bias=bias)


_NORMS = {"attn/sub_norm": "self_attn.attn_sub_norm.weight", "mlp/sub_norm": "mlp.ffn_sub_norm.weight"}

FAMILIES = (Family("bitnet", "BitNet", _bitnet, hf_table(_NORMS)),)

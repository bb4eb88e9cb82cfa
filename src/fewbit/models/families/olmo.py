"""OLMo 2: norms on the outputs of blocks and on whole projections."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..config import DecoderConfig
from .family import Common, Family, Number, decoder_config, hf_table, read_config


class _Olmo2(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False


def _olmo2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Olmo2, names)
    bias = found.attention_bias
    return decoder_config(found, norms="post", qk_norm="projection", qkv_bias=bias, o_bias=bias)


_NORMS = {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}

FAMILIES = (Family("olmo2", "OLMo 2", _olmo2, hf_table(_NORMS), gguf="olmo2"),)

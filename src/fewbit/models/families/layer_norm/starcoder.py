"""StarCoder2: no gate, biases, a sliding window."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import Family, Number, Windowed, decoder_config, hf_table, read_config


class _StarCoder2(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    norm_eps: Number = msgspec.field(name="norm_epsilon", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="gelu_pytorch_tanh")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    bias: bool = msgspec.field(name="use_bias", default=True)


_UNREAD = (
    *("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
    *("mlp_type", "norm_type", "layer_norm_epsilon"),
)
"""Keys of published configurations that transformers does not read."""


def _starcoder2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _StarCoder2, names, _UNREAD)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), found.bias)
    return decoder_config(found, norm_kind="layer", norm_bias=True, gated=False, window=found.window or 0, **biases)


_STARCODER2 = {
    "mlp/up": "mlp.c_fc.weight",
    "mlp/down": "mlp.c_proj.weight",
    "mlp/up_bias": "mlp.c_fc.bias",
    "mlp/down_bias": "mlp.c_proj.bias",
}

FAMILIES = (Family("starcoder2", "StarCoder2", _starcoder2, hf_table(_STARCODER2), gguf="starcoder2"),)

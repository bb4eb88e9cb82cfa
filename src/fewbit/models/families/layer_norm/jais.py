"""Jais 2: a squared ReLU without a gate, biases."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, read_config


class _Jais2(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="relu2")
    attention_bias: bool = True
    mlp_bias: bool = True


def _jais2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Jais2, names)
    biases = {"qkv_bias": found.attention_bias, "o_bias": found.attention_bias, "mlp_bias": found.mlp_bias}
    return decoder_config(found, norm_kind="layer", norm_bias=True, gated=False, **biases)


FAMILIES = (Family("jais2", "Jais 2", _jais2, gguf="jais2"),)

"""ERNIE 4.5 and Helium: Llama's layers with neighbouring coordinates rotated."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, read_config


class _Ernie(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    use_bias: bool = False


class _Helium(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=20)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-8)
    attention_bias: bool = False
    mlp_bias: bool = False


def _ernie(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Ernie, names)
    bias = found.use_bias
    return decoder_config(found, theta=500_000.0, rope="interleaved", qkv_bias=bias, o_bias=bias, mlp_bias=bias)


def _helium(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Helium, names)
    return decoder_config(found, theta=100_000.0, rope="interleaved", qkv_bias=found.attention_bias, mlp_bias=found.mlp_bias)


FAMILIES = (
    Family("ernie4_5", "ERNIE 4.5", _ernie, gguf="ernie4_5"),
    Family("helium", "Helium", _helium),
)

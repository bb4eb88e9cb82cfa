"""Seed-OSS: Llama's layers with biases of q, k and v."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import SECOND_NORM, Common, Family, decoder_config, read_config


class _SeedOss(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    attention_bias: bool = True
    o_bias: bool = msgspec.field(name="attention_out_bias", default=False)
    mlp_bias: bool = False


def _seed_oss(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _SeedOss, names)
    return decoder_config(found, qkv_bias=found.attention_bias, o_bias=found.o_bias, mlp_bias=found.mlp_bias)


FAMILIES = (Family("seed_oss", "Seed-OSS", _seed_oss, gguf="seed_oss", gguf_table=SECOND_NORM),)

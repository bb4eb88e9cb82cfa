"""Granite: multipliers of embeddings, attention, residuals and logits."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..config import DecoderConfig
from .family import Common, Family, Number, decoder_config, read_config


class _Granite(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embed_scale: Number = msgspec.field(name="embedding_multiplier", default=1.0)
    residual_scale: Number = msgspec.field(name="residual_multiplier", default=1.0)
    attention_scale: Number = msgspec.field(name="attention_multiplier", default=1.0)
    logit_divisor: Number = msgspec.field(name="logits_scaling", default=1.0)


def _granite(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Granite, names)
    return decoder_config(
        found,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        embed_scale=found.embed_scale,
        residual_scale=found.residual_scale,
        attention_scale=found.attention_scale,
        logit_scale=1 / found.logit_divisor,
    )


FAMILIES = (Family("granite", "Granite", _granite, gguf="granite", permutes=True),)

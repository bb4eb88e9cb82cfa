"""HyperCLOVA X: Granite's multipliers, and norms on the outputs of blocks."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, hf_table, read_config


class _HyperClovaX(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embed_scale: Number = msgspec.field(name="embedding_multiplier", default=1.0)
    residual_scale: Number = msgspec.field(name="residual_multiplier", default=1.0)
    attention_scale: Number | None = msgspec.field(name="attention_multiplier", default=None)
    logit_scale: Number = msgspec.field(name="logits_scaling", default=1.0)
    has_output_norms: bool = msgspec.field(name="use_post_norm", default=True)


def _hyperclovax(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """HyperCLOVA X SEED. Its logits are multiplied by what divides those of Granite."""
    found = read_config(obj, _HyperClovaX, names)
    return decoder_config(
        found,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        norms="sandwich" if found.has_output_norms else "pre",
        embed_scale=found.embed_scale,
        residual_scale=found.residual_scale,
        attention_scale=found.attention_scale or 0.0,
        logit_scale=found.logit_scale,
    )


_NORMS = {"attn/post_norm": "post_norm1.weight", "mlp/post_norm": "post_norm2.weight"}

FAMILIES = (Family("hyperclovax", "HyperCLOVA X", _hyperclovax, hf_table(_NORMS)),)

"""Granite: multipliers of embeddings, attention, residuals and logits; dense, or with experts."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Positive
from ..config import DecoderConfig, Experts
from .family import Common, Family, Number, decoder_config, hf_table, read_config


class _Granite(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embed_scale: Number = msgspec.field(name="embedding_multiplier", default=1.0)
    residual_scale: Number = msgspec.field(name="residual_multiplier", default=1.0)
    attention_scale: Number = msgspec.field(name="attention_multiplier", default=1.0)
    logit_divisor: Number = msgspec.field(name="logits_scaling", default=1.0)


class _GraniteMoe(_Granite, kw_only=True):
    experts: Positive = msgspec.field(name="num_local_experts", default=8)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=2)


def _granite(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Granite, names)
    return decoder_config(found, mlp_bias=found.mlp_bias, **_shared_fields(found))


def _granite_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GraniteMoe, names)
    experts = Experts(found.experts, found.active, found.hidden, layout="joined")
    return decoder_config(found, experts=experts, **_shared_fields(found))


def _shared_fields(found: _Granite) -> dict[str, Any]:
    """The fields of the biases of attention and of the multipliers."""
    return {
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
        "embed_scale": found.embed_scale,
        "residual_scale": found.residual_scale,
        "attention_scale": found.attention_scale,
        "logit_scale": 1 / found.logit_divisor,
    }


_EXPERTS = {
    "mlp/router": "block_sparse_moe.router.layer.weight",
    "mlp/experts/gate+up": "block_sparse_moe.input_linear.weight",
    "mlp/experts/down": "block_sparse_moe.output_linear.weight",
}

FAMILIES = (
    Family("granite", "Granite", _granite, gguf="granite", permutes=True),
    Family("granitemoe", "GraniteMoE", _granite_moe, hf_table(_EXPERTS), gguf="granitemoe", permutes=True),
)

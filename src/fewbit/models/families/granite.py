"""Granite: multipliers of embeddings, attention, residuals and logits."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig
from ..part_configs import Experts
from .family import Common, Family, Number, decoder_config, hf_table, read_config, refuse_unless


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


class _Granite4(_Granite, kw_only=True):
    hidden: Positive = msgspec.field(name="shared_intermediate_size", default=1024)
    experts_hidden: Positive | None = msgspec.field(name="intermediate_size", default=None)
    experts: Count = msgspec.field(name="num_local_experts", default=8)
    active: Count | None = msgspec.field(name="num_experts_per_tok", default=None)
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    positions: str | None = msgspec.field(name="position_embedding_type", default=None)
    normalization: str = msgspec.field(name="normalization_function", default="rmsnorm")
    init_method: str | None = None


def _granite(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Granite, names)
    return decoder_config(found, mlp_bias=found.mlp_bias, **_shared_fields(found))


def _granite_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GraniteMoe, names)
    experts = Experts(found.experts, found.active, found.hidden, layout="joined")
    return decoder_config(found, experts=experts, **_shared_fields(found))


def _granite4(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """The dense models of Granite 4 without Mamba layers, such as its micro."""
    found = read_config({key: obj[key] for key in obj if not key.startswith(_OF_MAMBA)}, _Granite4, names)
    for kind in found.kinds or ["mamba"]:
        refuse_unless(kind, ("attention", "full_attention"), "layer_types")
    refuse_unless(found.experts, (0,), "num_local_experts")
    refuse_unless(found.normalization, ("rmsnorm",), "normalization_function")
    nope = () if found.positions == "rope" else tuple(range(found.layers))
    return decoder_config(found, fused_mlp=True, nope_layers=nope, **_shared_fields(found))


_OF_MAMBA = ("mamba_", "time_step_")
"""What the keys of Mamba layers begin with."""


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

_SHARED = {"mlp/gate+up": "shared_mlp.input_linear.weight", "mlp/down": "shared_mlp.output_linear.weight"}

FAMILIES = (
    Family("granite", "Granite", _granite, gguf="granite", permutes=True),
    Family("granitemoe", "GraniteMoE", _granite_moe, hf_table(_EXPERTS), gguf="granitemoe", permutes=True),
    Family("granitemoehybrid", "Granite 4 (dense)", _granite4, hf_table(_SHARED)),
)

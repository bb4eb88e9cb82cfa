"""ERNIE 4.5, dense and of experts, and Helium: neighbouring coordinates are rotated."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import ROUTED_NAMES, expert_layout
from ..family import Common, Family, Number, decoder_config, hf_table, read_config, refuse_unless


class _Ernie(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    use_bias: bool = False


class _ErnieMoe(_Ernie, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    head_dim: Positive | None = None
    experts: Positive = msgspec.field(name="moe_num_experts", default=64)
    active: Positive = msgspec.field(name="moe_k", default=6)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1536)
    shared: Count = msgspec.field(name="moe_num_shared_experts", default=2)
    first: Count = msgspec.field(name="moe_layer_start_index", default=1)
    last: int = msgspec.field(name="moe_layer_end_index", default=-1)
    interval: Positive = msgspec.field(name="moe_layer_interval", default=1)
    least_sum: Number = msgspec.field(name="moe_norm_min", default=1e-12)


class _Helium(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=20)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-8)
    attention_bias: bool = False
    mlp_bias: bool = False


def _ernie(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Ernie, names)
    return decoder_config(found, **_shared_fields(found))


def _ernie_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """ERNIE 4.5 of experts. The least sum of weights is far below that of the largest probabilities, so that it may be added."""
    found = read_config(obj, _ErnieMoe, names, ("moe_capacity", "moe_use_aux_free"))
    refuse_unless(found.use_bias, (False,), "use_bias")  # which the shared expert would have, too
    last = found.layers - 1 if found.last == -1 else found.last
    layers = tuple(i for i in range(found.layers) if found.first <= i <= last and (i + 1) % found.interval == 0)
    experts = Experts(
        found.experts,
        found.active,
        found.expert_hidden,
        layers=layers if len(layers) < found.layers else (),
        scores="corrected_softmax",
        correction_row=True,
        sum_eps=found.least_sum,
        shared_hidden=found.shared * found.expert_hidden,
        shared_gate=False,
        layout=expert_layout(names),
    )
    return decoder_config(found, experts=experts if layers else None, **_shared_fields(found))


def _shared_fields(found: _Ernie) -> dict[str, Any]:
    """The fields of rotary embedding and of biases."""
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), found.use_bias)
    return {"theta": 500_000.0, "rope": "interleaved", **biases}


def _helium(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Helium, names)
    return decoder_config(found, theta=100_000.0, rope="interleaved", qkv_bias=found.attention_bias, mlp_bias=found.mlp_bias)


_MOE = {**ROUTED_NAMES, "mlp/router_correction_bias": "mlp.moe_statics.e_score_correction_bias"}

FAMILIES = (
    Family("ernie4_5", "ERNIE 4.5", _ernie, gguf="ernie4_5"),
    Family(
        "ernie4_5_moe",
        "ERNIE 4.5 MoE",
        _ernie_moe,
        dataclasses.replace(hf_table(_MOE), others=r"model\.mtp_.*"),
        gguf="ernie4_5-moe",
    ),
    Family("helium", "Helium", _helium),
)

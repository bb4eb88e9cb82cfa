"""OLMo 2, OLMo 3, OLMoE and FlexOlmo: norms on outputs and on projections."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import expert_layout, expert_names
from ..family import (
    OUTPUT_NORMS,
    Common,
    Family,
    Number,
    decoder_config,
    every_nth_full,
    hf_table,
    read_config,
    rope_by_kind,
    window_fields,
)


class _Olmo2(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False


class _Olmo3(_Olmo2, kw_only=True):
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    layer_types: list[str] | None = None


class _Olmoe(_Olmo2, kw_only=True):
    experts: Positive = msgspec.field(name="num_experts", default=64)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=False)


class _FlexOlmo(_Olmoe, kw_only=True):
    experts: Positive = msgspec.field(name="num_experts", default=7)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=5)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-6)


def _olmo2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Olmo2, names)
    return decoder_config(found, norms="post", **_shared_fields(found))


def _olmo3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Olmo3, names)
    windows = window_fields(found.layer_types or every_nth_full(found.layers, 4), found.window)
    theta = found.rope_theta or 500_000.0
    return decoder_config(
        found, norms="post", **_shared_fields(found), **windows, **rope_by_kind(found, theta=theta, window_theta=theta)
    )


def _olmoe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Olmoe, names)
    return decoder_config(found, **_shared_fields(found), experts=_experts(found, names))


def _flex_olmo(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _FlexOlmo, names)
    return decoder_config(found, theta=500_000.0, norms="post", **_shared_fields(found), experts=_experts(found, names))


def _experts(found: _Olmoe, names: Collection[str]) -> Experts:
    """The mixture of experts of every layer."""
    return Experts(found.experts, found.active, found.hidden, normalized=found.normalized, layout=expert_layout(names))


def _shared_fields(found: _Olmo2) -> dict[str, Any]:
    """The fields of the norms of q and k, and of biases."""
    return {"qk_norm": "projection", "qkv_bias": found.attention_bias, "o_bias": found.attention_bias}


FAMILIES = (
    Family("olmo2", "OLMo 2", _olmo2, hf_table(OUTPUT_NORMS), gguf="olmo2"),
    Family("olmo3", "OLMo 3", _olmo3, hf_table(OUTPUT_NORMS), gguf="olmo2"),
    Family("olmoe", "OLMoE", _olmoe, hf_table(expert_names("shared_expert")), gguf="olmoe"),
    Family("flex_olmo", "FlexOlmo", _flex_olmo, hf_table({**OUTPUT_NORMS, **expert_names("shared_expert")})),
)

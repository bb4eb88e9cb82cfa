"""EXAONE 4, and EXAONE of experts: full layers without rotary embedding."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import QuantError
from ...config import DecoderConfig
from ..experts import ROUTED_NAMES, Routed, routed_experts
from ..family import (
    OUTPUT_NORMS,
    Family,
    Number,
    Windowed,
    decoder_config,
    every_nth_full,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)


class _Exaone(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=32)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    pattern: Count | str | None = msgspec.field(name="sliding_window_pattern", default=4)


class _ExaoneMoe(Routed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=32)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    pattern: Count | str | None = msgspec.field(name="sliding_window_pattern", default=4)
    layer_types: list[str] | None = None
    experts: Positive = msgspec.field(name="num_experts", default=64)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=8)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1024)
    shared: Count | None = msgspec.field(name="num_shared_experts", default=1)
    scale: Number = msgspec.field(name="routed_scaling_factor", default=2.5)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=1)
    kinds: list[str] | None = msgspec.field(name="mlp_layer_types", default=None)
    scores: str | None = msgspec.field(name="scoring_func", default=None)
    method: str | None = msgspec.field(name="topk_method", default=None)


def _exaone(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Exaone, names)
    return decoder_config(found, norms="post", **_shared_fields(found))


def _exaone_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """K-EXAONE, whose layers for multi-token prediction are named mtp.*."""
    found = read_config(obj, _ExaoneMoe, names, ("first_last_k_dense_replace", "is_moe_layer", "num_nextn_predict_layers"))
    refuse_unless(found.scores, (None, "sigmoid"), "scoring_func")
    refuse_unless(found.method, (None, "noaux_tc"), "topk_method")
    experts = routed_experts(found, names, found.kinds, scores="sigmoid")
    return decoder_config(found, experts=experts, **_shared_fields(found))


def _shared_fields(found: _Exaone | _ExaoneMoe) -> dict[str, Any]:
    """The fields of norms of queries and keys, of windows, and of the layers without them, which have no rotary embedding."""
    if not found.window:
        return {"qk_norm": "head"}
    kinds = found.layer_types or _layer_types(found)
    nope = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return {"qk_norm": "head", "nope_layers": nope, **window_fields(kinds, found.window)}


def _layer_types(found: _Exaone | _ExaoneMoe) -> list[str]:
    """The kinds of the layers by `sliding_window_pattern`.

    It is `n`, every n-th layer attends to all positions, or letters that repeat, "LLLG" (local, global).
    """
    if isinstance(found.pattern, int) and found.pattern:
        return every_nth_full(found.layers, found.pattern)
    if not isinstance(found.pattern, str) or not found.pattern or set(found.pattern) - set("LG"):
        raise QuantError(
            f"config.json has sliding_window_pattern = {found.pattern!r}; expected a number of layers, or letters L and G"
        )
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    repeated = [kinds[found.pattern[i % len(found.pattern)]] for i in range(found.layers)]
    return [*repeated[:-1], "full_attention"]


_MOE = {**ROUTED_NAMES, "mlp/router_correction_bias": "mlp.e_score_correction_bias"}

FAMILIES = (
    Family("exaone4", "EXAONE 4", _exaone, hf_table(OUTPUT_NORMS), gguf="exaone4"),
    Family(
        "exaone_moe",
        "K-EXAONE",
        _exaone_moe,
        dataclasses.replace(hf_table(_MOE), others=r"mtp\..*"),
        gguf="exaone-moe",
    ),
)

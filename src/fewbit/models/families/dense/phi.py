"""Phi-1, 1.5 and 2 (parallel blocks), Phi-3 and Phi-4 (fused projections, LongRoPE)."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import (
    Common,
    Family,
    Number,
    Windowed,
    decoder_config,
    gguf_table,
    hf_table,
    read_config,
    refuse_unless,
)


class _Phi(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="gelu_new")
    has_norms: bool = msgspec.field(name="qk_layernorm", default=False)


class _Phi3(Windowed, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    full_attn_mod: int | None = None
    interpolate_factor: int | None = None
    original_context: Positive = msgspec.field(name="original_max_position_embeddings", default=4096)


def _phi(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Phi-1, 1.5 and 2. Attention and the feed-forward block read the same norm."""
    found = read_config(obj, _Phi, names)
    refuse_unless(found.has_norms, (False,), "qk_layernorm")
    found.partial_rotary = found.partial_rotary or 0.5
    biases = dict.fromkeys(("norm_bias", "qkv_bias", "o_bias", "mlp_bias", "head_bias"), True)
    return decoder_config(found, rotates_part=True, norm_kind="layer", gated=False, parallel="one_norm", **biases)


def _phi3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Phi3, names)
    for name in ("full_attn_mod", "interpolate_factor"):
        refuse_unless(getattr(found, name), (None, 1), name)
    for name in ("rope_scaling", "rope_parameters"):
        rope = getattr(found, name)
        if rope and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            kept = {key: value for key, value in rope.items() if key != "type"}
            setattr(found, name, {**kept, "rope_type": "longrope"})
    return decoder_config(found, fused=True, rotates_part=True, window=found.window or 0)


_PHI = hf_table(
    {
        "attn/o": "self_attn.dense.weight",
        "attn/o_bias": "self_attn.dense.bias",
        "mlp/up": "mlp.fc1.weight",
        "mlp/up_bias": "mlp.fc1.bias",
        "mlp/down": "mlp.fc2.weight",
        "mlp/down_bias": "mlp.fc2.bias",
    },
    {"norm": "model.final_layernorm.weight", "norm_bias": "model.final_layernorm.bias"},
)
_NAMES = {"attn/q+k+v": "self_attn.qkv_proj.weight", "mlp/gate+up": "mlp.gate_up_proj.weight"}
_GGUF_NAMES = {"attn/q+k+v": "attn_qkv.weight", "mlp/gate+up": "ffn_up.weight"}

FAMILIES = (
    Family("phi", "Phi-1, 1.5, 2", _phi, _PHI, gguf="phi2"),
    Family("phi3", "Phi-3", _phi3, hf_table(_NAMES), gguf="phi3", gguf_table=gguf_table(_GGUF_NAMES)),
)

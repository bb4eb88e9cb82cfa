"""Apertus: xIELU, an activation with parameters, in place of a gate."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, hf_table, read_config, refuse_unless
from ..rope import llama3_rope


class _Apertus(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="xielu")
    attention_bias: bool = False


def _apertus(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Apertus, names, ("mlp_bias", "qk_norm", "post_norm"))
    refuse_unless(found.act, ("xielu",), "hidden_act")
    if found.rope_scaling is None and found.rope_parameters is None:
        found.rope_parameters = llama3_rope(12_000_000.0, 8.0)
    bias = found.attention_bias
    return decoder_config(
        found, theta=12_000_000.0, qk_norm="head", gated=False, activation="xielu", qkv_bias=bias, o_bias=bias
    )


_NAMES = {
    "attn/norm": "attention_layernorm.weight",
    "mlp/norm": "feedforward_layernorm.weight",
    **{f"mlp/{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
}

FAMILIES = (Family("apertus", "Apertus", _apertus, hf_table(_NAMES)),)

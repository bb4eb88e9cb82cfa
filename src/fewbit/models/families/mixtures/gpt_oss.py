"""gpt-oss: attention sinks, clamped SwiGLU, interleaved experts."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ...part_configs import Experts
from ..family import (
    SECOND_NORM,
    Family,
    Number,
    Windowed,
    decoder_config,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)


class _GptOss(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 64
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    window: Count | None = msgspec.field(name="sliding_window", default=128)
    attention_bias: bool = True
    experts: Positive = msgspec.field(name="num_local_experts")
    active: Positive = msgspec.field(name="num_experts_per_tok", default=4)
    experts_per_token: Positive | None = None
    initial_context_length: Positive | None = None
    alpha: Number = msgspec.field(name="swiglu_alpha", default=1.702)
    limit: Number = msgspec.field(name="swiglu_limit", default=7.0)


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GptOss, names)
    refuse_unless(found.experts_per_token, (None, found.active), "experts_per_token")
    refuse_unless(found.alpha, (1.702,), "swiglu_alpha")
    if not (found.rope_scaling or found.rope_parameters):
        found.rope_parameters = dict(_ROPE)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[i % 2 == 0] for i in range(found.layers)]
    return decoder_config(
        found,
        theta=150_000.0,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        sinks=True,
        activation="clamped_swiglu",
        activation_limit=found.limit,
        experts=Experts(found.experts, found.active, found.hidden, bias=True, layout="interleaved"),
        **window_fields(found.layer_types or of_layers, found.window),
    )


_NAMES = {
    "attn/sinks": "self_attn.sinks",
    "mlp/router": "mlp.router.weight",
    "mlp/router_bias": "mlp.router.bias",
    "mlp/experts/gate+up": "mlp.experts.gate_up_proj",
    "mlp/experts/gate+up_bias": "mlp.experts.gate_up_proj_bias",
    "mlp/experts/down": "mlp.experts.down_proj",
    "mlp/experts/down_bias": "mlp.experts.down_proj_bias",
}

FAMILIES = (
    Family(
        "gpt_oss",
        "gpt-oss",
        _gpt_oss,
        hf_table(_NAMES),
        gguf="gpt-oss",
        gguf_table=SECOND_NORM,
    ),
)

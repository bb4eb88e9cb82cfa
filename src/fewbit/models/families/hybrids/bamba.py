"""Bamba: state spaces of Mamba-2 in most layers, partial rotary embedding in the others."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, hf_table, read_config
from .granite import STATE_KEYS, STATES, state_spaces


class _Bamba(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_layers: list[Count] | None = msgspec.field(name="attn_layer_indices", default=None)


_UNREAD = ("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types")
"""Keys that do not change what is computed."""


def _bamba(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Bamba: state spaces of Mamba-2 in most layers; a half of each head rotates in the others."""
    found = read_config(obj, _Bamba, names, (*STATE_KEYS, *_UNREAD))
    found.partial_rotary = 0.5
    layers = tuple(i for i in range(found.layers) if i not in (found.attention_layers or ()))
    return decoder_config(
        found,
        rotates_part=True,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        mamba=state_spaces(obj, found.width, layers),
    )


_NAMES = hf_table(
    {
        **STATES,
        "mlp/norm": "pre_ff_layernorm.weight",
        **{f"mlp/{name}": f"feed_forward.{name}_proj.weight" for name in ("gate", "up", "down")},
        **{f"mlp/{name}_bias": f"feed_forward.{name}_proj.bias" for name in ("gate", "up", "down")},
    },
    {"norm": "model.final_layernorm.weight"},
)

FAMILIES = (Family("bamba", "Bamba", _bamba, _NAMES),)

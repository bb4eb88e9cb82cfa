"""Bamba: state spaces of Mamba-2 in most layers, partial rotary embedding in the others."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, hf_table, read_config
from .granite import OF_TRAINING, STATES, state_spaces


class _Bamba(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_layers: list[Count] | None = msgspec.field(name="attn_layer_indices", default=None)
    mamba_heads: Positive = msgspec.field(name="mamba_n_heads", default=128)
    mamba_groups: Positive = msgspec.field(name="mamba_n_groups", default=1)
    mamba_state: Positive = msgspec.field(name="mamba_d_state", default=256)
    mamba_head_dim: Positive | str | None = msgspec.field(name="mamba_d_head", default=None)
    mamba_kernel: Positive = msgspec.field(name="mamba_d_conv", default=4)
    mamba_expand: Positive = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: list[float | str | dict[str, str]] | None = None


_UNREAD = ("num_logits_to_keep", "z_loss_coefficient", "mamba_chunk_size", "layers_block_type", "layer_types")
"""Keys that do not change what is computed."""


def _bamba(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Bamba: state spaces of Mamba-2 in most layers; a half of each head rotates in the others."""
    found = read_config({key: obj[key] for key in obj if key not in OF_TRAINING}, _Bamba, names, _UNREAD)
    found.partial_rotary = 0.5
    return decoder_config(
        found,
        rotates_part=True,
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        mlp_bias=found.mlp_bias,
        mamba=state_spaces(found, tuple(i for i in range(found.layers) if i not in (found.attention_layers or ()))),
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

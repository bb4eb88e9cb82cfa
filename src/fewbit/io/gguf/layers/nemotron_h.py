"""Layers of Nemotron-H in GGUF files.

Each is attention, a state space, a feed-forward block or experts. One without heads of keys and without a feed-forward width is a
state space, as `state_space.py` describes. Files have dense feed-forward blocks or experts, not both.

Reference: llama.cpp, conversion/nemotron.py and src/models/nemotron-h.cpp (2026).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...._hybrids import nemotron_h_kinds
from ...._json import Count, Positive, converted
from ....errors import UnsupportedError
from ..fields import Field


def name_of_architecture(config: Mapping[str, Any]) -> str:
    """The GGUF architecture, which llama.cpp's converter chooses by the layers, too.

    Args:
        config: as for `layer_fields`.

    Raises:
        QuantError: when config.json does not say what the layers are.
        UnsupportedError: for dense blocks and experts, or another kind of layer.
    """
    kinds = nemotron_h_kinds(config)
    if "moe" in kinds and "mlp" in kinds:
        raise UnsupportedError("llama.cpp runs Nemotron-H only with dense feed-forward blocks or experts, not with both")
    if "linear_attention" not in kinds:
        raise UnsupportedError("llama.cpp runs Nemotron-H only with state spaces in some layers")
    return "nemotron_h_moe" if "moe" in kinds else "nemotron_h"


def layer_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of the layers, of state spaces and of experts, by their keys after the architecture.

    Args:
        config: the content of config.json, with the defaults of the family.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: as in `name_of_architecture`.
    """
    found, kinds = converted(config, _NemotronH, "config.json"), nemotron_h_kinds(config)
    has_experts = "moe" in kinds
    hidden = found.expert_hidden if has_experts else found.hidden
    fields: dict[str, Field] = {
        "attention.head_count_kv": [found.kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [hidden if kind in ("mlp", "moe") else 0 for kind in kinds],
        "attention.layer_norm_epsilon": found.norm_eps,
        "ssm.conv_kernel": found.kernel,
        "ssm.state_size": found.state_dim,
        "ssm.group_count": found.groups,
        "ssm.inner_size": found.mamba_heads * found.mamba_head_dim,
        "ssm.time_step_rank": found.mamba_heads,
    }
    if not has_experts:
        return fields
    fields |= {
        "expert_count": found.experts,
        "expert_used_count": found.active,
        "expert_feed_forward_length": found.expert_hidden,
        "expert_shared_feed_forward_length": found.shared_hidden,
        "expert_shared_count": 1,
        "expert_weights_norm": found.is_normalized,
        "expert_weights_scale": found.scale,
        "expert_gating_func": 2,
    }
    if found.latent:
        fields["moe_latent_size"] = found.latent
    return fields


class _NemotronH(msgspec.Struct, kw_only=True):
    """The JSON schema of what is read of config.json."""

    kv_heads: Positive = msgspec.field(name="num_key_value_heads")
    hidden: Positive = msgspec.field(name="intermediate_size")
    norm_eps: float = msgspec.field(name="layer_norm_epsilon")
    mamba_heads: Positive = msgspec.field(name="mamba_num_heads")
    mamba_head_dim: Positive
    groups: Positive = msgspec.field(name="n_groups")
    state_dim: Positive = msgspec.field(name="ssm_state_size")
    kernel: Positive = msgspec.field(name="conv_kernel")
    experts: Positive = msgspec.field(name="n_routed_experts")
    active: Positive = msgspec.field(name="num_experts_per_tok")
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size")
    shared_hidden: Positive = msgspec.field(name="moe_shared_expert_intermediate_size")
    latent: Count | None = msgspec.field(name="moe_latent_size", default=None)
    is_normalized: bool = msgspec.field(name="norm_topk_prob")
    scale: float = msgspec.field(name="routed_scaling_factor")

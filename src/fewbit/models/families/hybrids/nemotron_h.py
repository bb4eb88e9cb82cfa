"""Nemotron-H and Nemotron 3: one block in each layer, of four kinds."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._hybrids import nemotron_h_kinds
from ...._json import Count, Positive
from ...config import DecoderConfig
from ...names import NameTable
from ...part_configs import Mamba2
from ..experts import Routed, routed_experts
from ..family import (
    Family,
    Number,
    activation,
    decoder_config,
    gguf_table,
    read_config,
    refuse_unless,
    table,
)
from .granite import STATES_GGUF, refuse_time_step_limit


class _NemotronH(Routed, kw_only=True):
    heads: Positive = msgspec.field(name="num_attention_heads", default=32)
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    hidden: Positive = msgspec.field(name="intermediate_size", default=21504)
    context: Positive = msgspec.field(name="max_position_embeddings", default=4096)
    norm_eps: Number = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    act: str | None = msgspec.field(name="mlp_hidden_act", default="relu2")
    experts: Positive = msgspec.field(name="n_routed_experts", default=8)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=2)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=7688)
    shared_hidden: Positive = msgspec.field(name="moe_shared_expert_intermediate_size", default=7688)
    latent: Count | None = msgspec.field(name="moe_latent_size", default=None)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    attention_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    proj_bias: bool = msgspec.field(name="mamba_proj_bias", default=False)
    conv_bias: bool = msgspec.field(name="use_conv_bias", default=True)
    mamba_heads: Positive = msgspec.field(name="mamba_num_heads", default=128)
    mamba_head_dim: Positive = 64
    mamba_act: str = msgspec.field(name="mamba_hidden_act", default="silu")
    groups_of_states: Positive = msgspec.field(name="n_groups", default=8)
    state_dim: Positive = msgspec.field(name="ssm_state_size", default=128)
    kernel: Positive = msgspec.field(name="conv_kernel", default=4)
    time_step_limit: list[float | str | dict[str, str]] | None = None


_UNREAD = (
    *("layers_block_type", "hybrid_override_pattern", "num_nextn_predict_layers", "mtp_layers_block_type"),
    *("mtp_hybrid_override_pattern", "num_logits_to_keep", "use_mamba_kernels", "expand", "chunk_size", "norm_eps"),
    *("mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "rescale_prenorm_residual", "residual_in_fp32"),
    *("time_step_min", "time_step_max", "time_step_floor", "is_moe", "attention_head_dim"),
)
"""Keys of other parts, of initial values, and of what transformers does not read."""


def _nemotron_h(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Nemotron-H and Nemotron 3, which have no rotary embedding.

    Time steps are not clamped, as in llama.cpp; transformers clamps those of prompts, not of single tokens, at `time_step_min`.
    """
    kinds = nemotron_h_kinds(obj)
    found = read_config({**obj, "num_hidden_layers": len(kinds)}, _NemotronH, names, _UNREAD)
    for key, value in (
        ("attention_bias", found.attention_bias),
        ("tie_word_embeddings", found.tied),
        ("mamba_proj_bias", found.proj_bias),
    ):
        refuse_unless(value, (False,), key)
    refuse_unless(found.mamba_act, ("silu", "swish"), "mamba_hidden_act")
    refuse_unless(obj.get("attention_head_dim"), (None, found.head_dim), "attention_head_dim")
    refuse_time_step_limit(found.time_step_limit)
    if "moe" in kinds:
        refuse_unless(found.mlp_bias, (False,), "mlp_bias")  # which the shared expert would have, too
    experts = routed_experts(found, names, ["sparse" if kind == "moe" else "dense" for kind in kinds], scores="sigmoid")
    if experts is not None:
        experts = dataclasses.replace(experts, shared_hidden=found.shared_hidden, latent=found.latent or 0)
    states = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    mamba = None
    if states:
        sizes = (found.mamba_heads, found.mamba_head_dim, found.state_dim, found.groups_of_states, found.kernel)
        mamba = Mamba2(states, *sizes, conv_bias=found.conv_bias, bias=found.use_bias)
    return decoder_config(
        found,
        rope_theta=10_000.0,
        nope_layers=tuple(range(found.layers)),
        mlp_layers=tuple(i for i, kind in enumerate(kinds) if kind in ("moe", "mlp")),
        gated=False,
        activation=activation(found.act or "relu2", "mlp_hidden_act"),
        mlp_bias=found.mlp_bias,
        mamba=mamba,
        experts=experts,
    )


_ENDS = {"": "weight", "_bias": "bias"}
_MIXERS = {
    **{f"attn/{name}": f"mixer.{name}_proj.weight" for name in ("q", "k", "v", "o")},
    **{f"attn/{name}{suffix}": f"mixer.{name}_proj.{part}" for name in ("in", "out") for suffix, part in _ENDS.items()},
    "attn/conv1d": "mixer.conv1d.weight",
    "attn/conv1d_bias": "mixer.conv1d.bias",
    **{f"attn/{name}": f"mixer.{name}" for name in ("dt_bias", "A_log", "D")},
    "attn/out_norm": "mixer.norm.weight",
    **{f"mlp/{name}{suffix}": f"mixer.{name}_proj.{part}" for name in ("up", "down") for suffix, part in _ENDS.items()},
    "mlp/router": "mixer.gate.weight",
    "mlp/router_correction_bias": "mixer.gate.e_score_correction_bias",
    "mlp/latent_in": "mixer.fc1_latent_proj.weight",
    "mlp/latent_out": "mixer.fc2_latent_proj.weight",
    **{f"mlp/experts/{{}}/{name}": f"mixer.experts.{{}}.{name}_proj.weight" for name in ("up", "down")},
    **{f"mlp/shared/{name}": f"mixer.shared_experts.{name}_proj.weight" for name in ("up", "down")},
}
_TABLE = table(
    "Hugging Face",
    {"embed": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight", "head": "lm_head.weight"},
    "backbone.layers.{}.",
    _MIXERS,
    others=r"mtp\..*",
)


def _table_of(config: DecoderConfig) -> NameTable:
    """The names of a configuration."""
    return _with_norms(_TABLE, "backbone.layers.{}.norm.weight", config)


_GGUF = gguf_table(
    {
        **STATES_GGUF,
        "mlp/latent_in": "ffn_latent_down.weight",
        "mlp/latent_out": "ffn_latent_up.weight",
    }
)


def _gguf_table_of(config: DecoderConfig) -> NameTable:
    """The names of a configuration in GGUF files."""
    return _with_norms(_GGUF, "blk.{}.attn_norm.weight", config)


def _with_norms(names: NameTable, name: str, config: DecoderConfig) -> NameTable:
    """The table with the norm of each layer, which is that of the one block that it has."""
    blocks = ["attn" if config.has_attention(i) else "mlp" for i in range(config.layers)]
    norms = {f"layers/{i}/{block}/norm": name.format(i) for i, block in enumerate(blocks)}
    return dataclasses.replace(names, names={**names.names, **norms})


FAMILIES = (
    Family(
        "nemotron_h",
        "Nemotron-H, Nemotron 3",
        _nemotron_h,
        _TABLE,
        "nemotron_h",
        _GGUF,
        other_table=_table_of,
        other_gguf_table=_gguf_table_of,
    ),
)

"""Gemma, Gemma 2, VaultGemma, Gemma 3 (text) and Gemma 4 (text)."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import QuantError, UnsupportedError
from ...config import DecoderConfig
from ...part_configs import Experts, FullAttention, PerLayerInputs, SharedKeys
from ..family import (
    Common,
    Family,
    Number,
    activation,
    decoder_config,
    gguf_table,
    hf_table,
    read_config,
    refuse_unless,
    rope_by_kind,
    window_fields,
)


class _Gemma(Common, kw_only=True):
    head_dim: Positive | None = 256
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    activation: str | None = msgspec.field(name="hidden_activation", default="gelu_pytorch_tanh")
    attention_bias: bool = False
    bidirectional: bool | str | None = msgspec.field(name="use_bidirectional_attention", default=None)


class _Gemma1(_Gemma, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=16)


class _Scaled(_Gemma, kw_only=True):
    query_scale: Number = msgspec.field(name="query_pre_attn_scalar", default=256)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    layer_types: list[str] | None = None


class _Gemma2(_Scaled, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=30.0)
    attention_cap: Number | None = msgspec.field(name="attn_logit_softcapping", default=50.0)


class _Gemma3(_Scaled, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=None)
    pattern: Positive = msgspec.field(name="sliding_window_pattern", default=6)
    local_theta: Number | None = msgspec.field(name="rope_local_base_freq", default=None)


class _Heads(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What `per_layer_config` says of a layer."""

    head_dim: Positive | None = None
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=None)


class _Gemma4(_Gemma, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    window: Count | None = msgspec.field(name="sliding_window", default=512)
    layer_types: list[str] | None = None
    logit_cap: Number | None = msgspec.field(name="final_logit_softcapping", default=None)
    full_head_dim: Positive = msgspec.field(name="global_head_dim", default=512)
    full_kv_heads: Positive | None = msgspec.field(name="num_global_key_value_heads", default=None)
    heads_by_layer: dict[str, _Heads] | None = msgspec.field(name="per_layer_config", default=None)
    keys_are_values: bool = msgspec.field(name="attention_k_eq_v", default=False)
    shared_layers: Count = msgspec.field(name="num_kv_shared_layers", default=0)
    is_wide: bool = msgspec.field(name="use_double_wide_mlp", default=False)
    has_experts: bool = msgspec.field(name="enable_moe_block", default=False)
    experts: Positive | None = msgspec.field(name="num_experts", default=None)
    active: Positive | None = msgspec.field(name="top_k_experts", default=None)
    expert_hidden: Positive | None = msgspec.field(name="moe_intermediate_size", default=None)
    input_width: Count = msgspec.field(name="hidden_size_per_layer_input", default=256)
    input_vocab: Positive = msgspec.field(name="vocab_size_per_layer_input", default=262_144)


def _gemma(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """The first Gemma, whose files have "gelu" where the tanh approximation was meant."""
    found = read_config(obj, _Gemma1, names)
    refuse_unless(found.act, (None, "gelu", "gelu_pytorch_tanh"), "hidden_act")
    return decoder_config(found, **_shared_fields(found))


def _gemma2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gemma2, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[i % 2 == 0] for i in range(found.layers)]
    return decoder_config(
        found,
        **_scaled_fields(found),
        **window_fields(found.layer_types or of_layers, found.window),
        attention_cap=found.attention_cap or 0.0,
        logit_cap=found.logit_cap or 0.0,
    )


def _vault_gemma(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """VaultGemma: Gemma 2 without norms on outputs."""
    return dataclasses.replace(_gemma2(obj, names), norms="pre")


def _gemma3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gemma3, names)
    kinds = ("full_attention", "sliding_attention")
    of_layers = [kinds[(i + 1) % found.pattern != 0] for i in range(found.layers)]
    return decoder_config(
        found,
        **_scaled_fields(found),
        **window_fields(found.layer_types or of_layers, found.window),
        **rope_by_kind(found, theta=found.rope_theta or 1_000_000.0, window_theta=found.local_theta or 10_000.0),
        qk_norm="head",
        logit_cap=found.logit_cap or 0.0,
    )


def _gemma4(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """The text of Gemma 4. Tokens of images see each other in both directions ("vision"), which text alone does not have."""
    found = read_config(obj, _Gemma4, names)
    refuse_unless(found.bidirectional, (None, False, "vision"), "use_bidirectional_attention")
    found.bidirectional = None
    kinds = ("full_attention", "sliding_attention")
    of_layers = found.layer_types or [kinds[(i + 1) % 6 != 0] for i in range(found.layers)]
    of_layers = [*of_layers[:-1], "full_attention"]  # as transformers has it
    found.rope_parameters = found.rope_parameters or {"full_attention": _PROPORTIONAL}
    full = _full_attention(found, of_layers)
    shared = SharedKeys(found.shared_layers, 2 * found.hidden if found.is_wide else 0) if found.shared_layers else None
    return decoder_config(
        found,
        **{**_shared_fields(found), "norm_offset": 0.0},
        **window_fields(of_layers, found.window),
        **rope_by_kind(found, theta=1_000_000.0, window_theta=10_000.0, head_dim=full.head_dim),
        norms="sandwich",
        attention_scale=1.0,
        qk_norm="head",
        value_norm=True,
        layer_scale=True,
        logit_cap=found.logit_cap or 0.0,
        full=None if full == FullAttention(found.kv_heads or found.heads, found.head_dim or full.head_dim) else full,
        experts=_experts_beside_dense(found),
        shared_keys=shared,
        per_layer=PerLayerInputs(found.input_vocab, found.input_width) if found.input_width else None,
    )


_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
"""Rotary embedding of layers without a window, where config.json is silent."""


def _full_attention(found: _Gemma4, of_layers: list[str]) -> FullAttention:
    """The heads of the layers without a window. `per_layer_config` of newer files has them for each of these layers."""
    full = _Heads(head_dim=found.full_head_dim, kv_heads=found.full_kv_heads if found.keys_are_values else None)
    if (given := found.heads_by_layer) is not None:
        layers = {str(i) for i, kind in enumerate(of_layers) if kind == "full_attention"}
        full = next(iter(given.values()), full)
        if set(given) != layers or any(heads != full for heads in given.values()):
            raise UnsupportedError(
                "config.json has a per_layer_config of other layers than those with full attention, or different heads"
            )
    kv_heads, head_dim = full.kv_heads or found.kv_heads or found.heads, full.head_dim or found.head_dim
    return FullAttention(kv_heads, head_dim or found.full_head_dim, found.keys_are_values)


def _experts_beside_dense(found: _Gemma4) -> Experts | None:
    """The mixture of experts; None: every layer is dense."""
    if not found.has_experts:
        return None
    sizes = {"num_experts": found.experts, "top_k_experts": found.active, "moe_intermediate_size": found.expert_hidden}
    given = [size for size in sizes.values() if size is not None]
    if len(given) < len(sizes):
        missing = next(name for name, size in sizes.items() if size is None)
        raise QuantError(f"config.json has enable_moe_block, but no {missing}")
    count, active, hidden = given
    return Experts(count, active, hidden, beside_dense=True, layout="joined")


def _shared_fields(found: _Gemma) -> dict[str, Any]:
    """The fields of all generations."""
    refuse_unless(found.bidirectional, (None, False), "use_bidirectional_attention")
    return {
        "activation": activation(found.activation or "gelu_pytorch_tanh", "hidden_activation"),
        "norm_offset": 1.0,
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
        "embed_scale": found.width**0.5,
    }


def _scaled_fields(found: _Scaled) -> dict[str, Any]:
    """The fields of Gemma 2 and 3."""
    return {**_shared_fields(found), "norms": "sandwich", "attention_scale": found.query_scale**-0.5}


_NORMS = {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/norm": "pre_feedforward_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}

_GEMMA4 = hf_table(
    {
        **_NORMS,
        "scale": "layer_scalar",
        "per_layer/gate": "per_layer_input_gate.weight",
        "per_layer/projection": "per_layer_projection.weight",
        "per_layer/post_norm": "post_per_layer_input_norm.weight",
        "mlp/out_norm": "post_feedforward_layernorm_1.weight",
        "moe/norm": "pre_feedforward_layernorm_2.weight",
        "moe/router": "router.proj.weight",
        "moe/router_norm": "router.scale",
        "moe/router_scale": "router.per_expert_scale",
        "moe/experts/gate+up": "experts.gate_up_proj",
        "moe/experts/down": "experts.down_proj",
        "moe/out_norm": "post_feedforward_layernorm_2.weight",
    },
    {
        "per_layer_embed": "model.embed_tokens_per_layer.weight",
        "per_layer_projection": "model.per_layer_model_projection.weight",
        "per_layer_norm": "model.per_layer_projection_norm.weight",
    },
)

_STACKS = {"gate": "gate", "up": "up", "down": "down", "gate+up": "gate_up"}
_GEMMA4_GGUF = gguf_table(
    {
        "scale": "layer_output_scale.weight",
        "per_layer/gate": "inp_gate.weight",
        "per_layer/projection": "proj.weight",
        "per_layer/post_norm": "post_norm.weight",
        "mlp/out_norm": "post_ffw_norm_1.weight",
        "moe/norm": "pre_ffw_norm_2.weight",
        "moe/router": "ffn_gate_inp.weight",
        "moe/router_norm": "ffn_gate_inp.scale",
        "moe/router_scale": "ffn_down_exps.scale",
        **{f"moe/experts/{ours}": f"ffn_{theirs}_exps.weight" for ours, theirs in _STACKS.items()},
        "moe/out_norm": "post_ffw_norm_2.weight",
    },
    {
        "per_layer_embed": "per_layer_token_embd.weight",
        "per_layer_projection": "per_layer_model_proj.weight",
        "per_layer_norm": "per_layer_proj_norm.weight",
    },
)

FAMILIES = (
    Family("gemma", "Gemma", _gemma, gguf="gemma"),
    Family("gemma2", "Gemma 2", _gemma2, hf_table(_NORMS), gguf="gemma2"),
    Family("vaultgemma", "VaultGemma", _vault_gemma, hf_table({"mlp/norm": _NORMS["mlp/norm"]})),
    Family("gemma3_text", "Gemma 3 (text)", _gemma3, hf_table(_NORMS), gguf="gemma3"),
    Family("gemma4_text", "Gemma 4 (text)", _gemma4, _GEMMA4, gguf="gemma4", gguf_table=_GEMMA4_GGUF),
)

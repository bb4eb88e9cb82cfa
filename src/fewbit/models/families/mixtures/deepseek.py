"""DeepSeek-V2 and V3: latent attention (MLA), experts in groups; Youtu-LLM, its attention alone."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...attention.rope_scaling import Yarn, yarn_gain
from ...config import DecoderConfig
from ...part_configs import Experts, LatentAttention
from ..experts import ROUTED_NAMES, Routed, routed_experts
from ..family import Family, Number, decoder_config, gguf_table, hf_table, read_config, refuse_unless


class _DeepSeek(Routed, kw_only=True):
    attention_bias: bool = False
    rank: Positive = msgspec.field(name="kv_lora_rank")
    query_rank: Positive | None = msgspec.field(name="q_lora_rank", default=None)
    plain_dim: Positive = msgspec.field(name="qk_nope_head_dim")
    rotary_dim: Positive = msgspec.field(name="qk_rope_head_dim")
    value_dim: Positive = msgspec.field(name="v_head_dim")
    head_width: Positive | None = msgspec.field(name="qk_head_dim", default=None)
    step: Positive = msgspec.field(name="moe_layer_freq", default=1)
    scores: str | None = msgspec.field(name="scoring_func", default=None)
    method: str | None = msgspec.field(name="topk_method", default=None)
    ep_size: Positive | None = None  # devices of training, and losses
    aux_loss_alpha: float | None = None
    seq_aux: bool = True


class DeepSeekV3(_DeepSeek, kw_only=True):
    """The schema of DeepSeek-V3, and of the families with its latent attention."""

    query_rank: Positive | None = msgspec.field(name="q_lora_rank", default=1536)
    normalized: bool = msgspec.field(name="norm_topk_prob", default=True)
    scale: Number = msgspec.field(name="routed_scaling_factor", default=2.5)
    dense: Count = msgspec.field(name="first_k_dense_replace", default=3)
    interleaved: bool = msgspec.field(name="rope_interleave", default=True)
    extra_layers: Count = msgspec.field(name="num_nextn_predict_layers", default=0)


class _Youtu(DeepSeekV3, kw_only=True):
    """The schema of DeepSeek-V3 without that of its experts."""

    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=16)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    rank: Positive = msgspec.field(name="kv_lora_rank", default=512)
    plain_dim: Positive = msgspec.field(name="qk_nope_head_dim", default=128)
    rotary_dim: Positive = msgspec.field(name="qk_rope_head_dim", default=64)
    value_dim: Positive = msgspec.field(name="v_head_dim", default=128)
    experts: Positive = msgspec.field(name="n_routed_experts", default=1)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=1)
    expert_hidden: Positive = msgspec.field(name="moe_intermediate_size", default=1)


def _deepseek_v2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _DeepSeek, names)
    refuse_unless(found.scores, (None, "softmax"), "scoring_func")
    refuse_unless(found.method, (None, "greedy", "group_limited_greedy"), "topk_method")
    refuse_unless(found.normalized, (False,), "norm_topk_prob")
    if found.method != "group_limited_greedy":
        found.groups, found.active_groups = None, None
    return _config(found, routed_experts(found, names), rope="interleaved")


def _deepseek_v3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    return latent_config(read_config(obj, DeepSeekV3, names), names)


def _youtu(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Youtu, names, ("embedding_initializer_range",))
    refuse_unless(found.experts, (1,), "n_routed_experts")
    return latent_config(found, names, ["dense"] * found.layers)


def latent_config(found: DeepSeekV3, names: Collection[str], kinds: Sequence[str] | None = None) -> DecoderConfig:
    """The configuration of a model with the attention and the experts of DeepSeek-V3.

    Args:
        found: the fields of config.json.
        names: the names of the checkpoint's tensors.
        kinds: as for `routed_experts`.
    """
    refuse_unless(found.scores, (None, "sigmoid"), "scoring_func")
    refuse_unless(found.method, (None, "noaux_tc"), "topk_method")
    rope = "interleaved" if found.interleaved else "half"
    experts = routed_experts(found, names, kinds, scores="sigmoid")
    return _config(found, experts, rope=rope, extra_layers=found.extra_layers)


def _config(found: _DeepSeek, experts: Experts | None, **settings: Any) -> DecoderConfig:
    """The configuration; YaRN's `mscale_all_dim` scales attention."""
    head_dim = found.plain_dim + found.rotary_dim
    rope = found.rope_scaling or found.rope_parameters or {}
    refuse_unless(found.step, (1,), "moe_layer_freq")
    refuse_unless(found.head_width, (None, head_dim), "qk_head_dim")
    refuse_unless(found.partial_rotary, (None, 1.0), "partial_rotary_factor")
    refuse_unless(rope.get("partial_rotary_factor"), (None, 1.0), "partial_rotary_factor")
    found.head_dim = found.rotary_dim
    config = decoder_config(
        found,
        head_dim=head_dim,
        rotary_dim=found.rotary_dim,
        latent=LatentAttention(found.rank, found.value_dim, found.query_rank or 0),
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        experts=experts,
        **settings,
    )
    if not isinstance(config.rope_scaling, Yarn) or not rope.get("mscale_all_dim"):
        return config
    gain = yarn_gain(config.rope_scaling.factor, rope["mscale_all_dim"])
    return dataclasses.replace(config, attention_scale=head_dim**-0.5 * gain**2)


LATENT_NAMES = {
    "attn/q_a": "self_attn.q_a_proj.weight",
    "attn/q_a_bias": "self_attn.q_a_proj.bias",
    "attn/q_a_norm": "self_attn.q_a_layernorm.weight",
    "attn/q_b": "self_attn.q_b_proj.weight",
    "attn/kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "attn/kv_a_bias": "self_attn.kv_a_proj_with_mqa.bias",
    "attn/kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "attn/kv_b": "self_attn.kv_b_proj.weight",
    **ROUTED_NAMES,
}
"""The names of latent attention and of the experts."""

LATENT_GGUF = gguf_table(
    {
        "attn/kv_a": "attn_kv_a_mqa.weight",
        **{f"attn/{name}": f"attn_{name}.weight" for name in ("q_a", "q_a_norm", "q_b", "kv_a_norm", "kv_b", "k_b", "v_b")},
    }
)
"""The names of both in GGUF files."""

FAMILIES = (
    Family("deepseek_v2", "DeepSeek-V2", _deepseek_v2, hf_table(LATENT_NAMES), "deepseek2", LATENT_GGUF),
    Family("deepseek_v3", "DeepSeek-V3", _deepseek_v3, hf_table(LATENT_NAMES), "deepseek2", LATENT_GGUF),
    Family("youtu", "Youtu-LLM", _youtu, hf_table(LATENT_NAMES)),
)

"""The metadata of GGUF files that configurations of decoders read."""

import functools
from collections.abc import Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive, converted
from ....errors import QuantError
from ..family import Number

WHERE = "the GGUF metadata"
"""Where a field stands, for messages."""


class GGUFMetadata(msgspec.Struct):
    """The metadata that configurations read."""

    width: Positive
    heads: Positive
    layers: Positive
    context: Positive
    norm_eps: Number
    extra_layers: Count = 0
    hidden: Positive | list[Count] | None = None
    kv_heads: Positive | list[Count] | None = None
    head_dim: Positive | None = None
    value_length: Positive | None = None
    window_head_dim: Positive | None = None
    window_value_length: Positive | None = None
    shared_layers: Count = 0
    input_width: Count = 0
    rope_theta: Number = 10_000.0
    window_rope_theta: Number = 10_000.0
    rotary_dim: Positive | None = None
    window_rotary_dim: Positive | None = None
    scaling: str | None = None
    scaling_factor: Number | None = None
    old_scaling_factor: Number | None = None
    original_context: Positive | None = None
    attention_factor: Number | None = None
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    yarn_log_multiplier: float = 0.0
    vocab: Positive | None = None
    tokens: list[str] = []
    experts: Count = 0
    active: Positive | None = None
    expert_hidden: Positive | None = None
    shared_hidden: Count = 0
    shared: Count = 0
    latent: Count = 0
    expert_scale: Number = 1.0
    normalized: bool = False
    scores: Count = 0
    groups: Count = 0
    active_groups: Count = 0
    rank: Positive | None = None
    query_rank: Count = 0
    split_key_length: Positive | None = None
    split_value_length: Positive | None = None
    temperature_scale: float = 0.0
    interval: Positive = 4
    conv_kernel: Positive | None = None
    state_size: Positive | None = None
    group_count: Positive | None = None
    time_step_rank: Positive | None = None
    inner_size: Positive | None = None
    conv_cache: Positive | None = None
    rotates: bool = True
    window: Count | None = None
    window_pattern: Positive | list[bool] | None = None
    attention_cap: float = 0.0
    logit_cap: float | None = None
    attention_scale: float = 0.0
    embed_scale: Number = 1.0
    residual_scale: Number = 1.0
    logit_scale: Number = 1.0
    is_parallel: bool = True

    @property
    def rows(self) -> int:
        """The rows of the embedding."""
        if rows := len(self.tokens) or self.vocab:
            return rows
        raise QuantError(f"{WHERE} has neither 'tokenizer.ggml.tokens' nor a 'vocab_size' of its architecture")


KEYS = {
    "width": "embedding_length",
    "heads": "attention.head_count",
    "layers": "block_count",
    "extra_layers": "nextn_predict_layers",
    "context": "context_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "hidden": "feed_forward_length",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "value_length": "attention.value_length",
    "window_head_dim": "attention.key_length_swa",
    "window_value_length": "attention.value_length_swa",
    "shared_layers": "attention.shared_kv_layers",
    "input_width": "embedding_length_per_layer_input",
    "rope_theta": "rope.freq_base",
    "window_rope_theta": "rope.freq_base_swa",
    "rotary_dim": "rope.dimension_count",
    "window_rotary_dim": "rope.dimension_count_swa",
    "scaling": "rope.scaling.type",
    "scaling_factor": "rope.scaling.factor",
    "old_scaling_factor": "rope.scale_linear",
    "original_context": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
    "vocab": "vocab_size",
    "experts": "expert_count",
    "active": "expert_used_count",
    "expert_hidden": "expert_feed_forward_length",
    "shared_hidden": "expert_shared_feed_forward_length",
    "shared": "expert_shared_count",
    "latent": "moe_latent_size",
    "expert_scale": "expert_weights_scale",
    "normalized": "expert_weights_norm",
    "scores": "expert_gating_func",
    "groups": "expert_group_count",
    "active_groups": "expert_group_used_count",
    "rank": "attention.kv_lora_rank",
    "query_rank": "attention.q_lora_rank",
    "split_key_length": "attention.key_length_mla",
    "split_value_length": "attention.value_length_mla",
    "temperature_scale": "attention.temperature_scale",
    "interval": "full_attention_interval",
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
    "group_count": "ssm.group_count",
    "time_step_rank": "ssm.time_step_rank",
    "inner_size": "ssm.inner_size",
    "conv_cache": "shortconv.l_cache",
    "rotates": "rope.scaling.finetuned",
    "window": "attention.sliding_window",
    "window_pattern": "attention.sliding_window_pattern",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "attention_scale": "attention.scale",
    "embed_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_scale": "logit_scale",
    "is_parallel": "use_parallel_residual",
}
"""The key of each field of `GGUFMetadata`, after the architecture."""
_LAYER_NORM = "attention.layer_norm_epsilon"
"""That of `norm_eps` of LayerNorms."""


@functools.cache
def _schema(architecture: str, has_layer_norms: bool) -> Any:
    """`GGUFMetadata` as the schema of an architecture's keys."""
    names = {field: f"{architecture}.{key}" for field, key in KEYS.items()} | {"tokens": "tokenizer.ggml.tokens"}
    if has_layer_norms:
        names["norm_eps"] = f"{architecture}.{_LAYER_NORM}"
    fields: list[Any] = []
    for field in msgspec.structs.fields(GGUFMetadata):
        option: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        fields.append((field.name, field.type, msgspec.field(name=names[field.name], **option)))
    return msgspec.defstruct("Gguf", fields)


def read_metadata(fields: Mapping[str, Any], architecture: str) -> GGUFMetadata:
    """Reads the metadata of an architecture.

    Args:
        fields: the metadata by key, as plain Python values.
        architecture: its name in GGUF.

    Raises:
        QuantError: for a missing key, or a value of another type.
    """
    schema = _schema(architecture, f"{architecture}.{_LAYER_NORM}" in fields)
    return GGUFMetadata(**msgspec.structs.asdict(converted(fields, schema, WHERE)))

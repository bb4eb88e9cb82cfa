"""Llama 2 and 3, Mistral, Mixtral."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig, ExpertLayout, Experts
from .family import Common, Family, Number, Windowed, decoder_config, hf_table, read_config


class _Llama(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


class _Mistral(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)


class _Mixtral(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    experts: Positive = msgspec.field(name="num_local_experts", default=8)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=2)


def _llama(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Llama, names)
    bias = found.attention_bias
    return decoder_config(found, qkv_bias=bias, o_bias=bias, mlp_bias=found.mlp_bias)


def _mistral(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Mistral, names)
    return decoder_config(found, window=found.window or 0)


def _mixtral(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Mixtral, names)
    experts = Experts(found.experts, found.active, found.hidden)
    return decoder_config(found, theta=1_000_000.0, window=found.window or 0, experts=experts)


def expert_layout(names: Collection[str]) -> ExpertLayout:
    """The layout of experts, by the tensors' names. They are separate matrices, or one stack as in transformers' modules."""
    if any(name.endswith("mlp.experts.gate_up_proj") for name in names):
        return "joined"
    return "separate"


def expert_names(shared: str) -> dict[str, str]:
    """The names of a router, its experts and the shared expert.

    Experts are separate matrices or stacks. The shared expert is a module called `shared`.
    """
    projections = ("gate", "up", "down")
    return {
        "mlp/router": "mlp.gate.weight",
        **{f"mlp/experts/{{}}/{name}": f"mlp.experts.{{}}.{name}_proj.weight" for name in projections},
        "mlp/experts/gate+up": "mlp.experts.gate_up_proj",
        "mlp/experts/down": "mlp.experts.down_proj",
        **{f"mlp/shared/{name}": f"mlp.{shared}.{name}_proj.weight" for name in projections},
    }


_MIXTRAL = {
    "mlp/router": "block_sparse_moe.gate.weight",
    "mlp/experts/{}/gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp/experts/{}/up": "block_sparse_moe.experts.{}.w3.weight",
    "mlp/experts/{}/down": "block_sparse_moe.experts.{}.w2.weight",
}

FAMILIES = (
    Family("llama", "Llama 2, 3", _llama, gguf="llama", permutes=True),
    Family("mistral", "Mistral", _mistral, gguf="llama", permutes=True),
    Family("mixtral", "Mixtral", _mixtral, hf_table(_MIXTRAL), gguf="llama", permutes=True),
)

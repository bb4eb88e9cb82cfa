"""Llama 4: attention in chunks, layers without rotary embedding, experts that read scaled inputs."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import QuantError, UnsupportedError
from ...config import DecoderConfig
from ...part_configs import Experts
from ..experts import expert_layout
from ..family import Common, Family, Number, decoder_config, hf_table, read_config, refuse_unless


class _Llama4(Common, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=8)
    head_dim: Positive | None = 128
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    dense_hidden: Positive = msgspec.field(name="intermediate_size_mlp", default=16384)
    experts: Positive = msgspec.field(name="num_local_experts", default=16)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=1)
    step: Positive = msgspec.field(name="interleave_moe_layer_step", default=1)
    expert_layers: list[Count] | None = msgspec.field(name="moe_layers", default=None)
    has_norms: bool = msgspec.field(name="use_qk_norm", default=True)
    rotary_layers: list[int] | None = msgspec.field(name="no_rope_layers", default=None)
    interval: Positive = msgspec.field(name="no_rope_layer_interval", default=4)
    layer_types: list[str] | None = None
    chunk: Positive | None = msgspec.field(name="attention_chunk_size", default=8192)
    is_tempered: bool | int = msgspec.field(name="attn_temperature_tuning", default=True)
    temperature_length: Positive = msgspec.field(name="floor_scale", default=8192)
    temperature_scale: Number = msgspec.field(name="attn_scale", default=0.1)
    attention_bias: bool = False


def _llama4(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Llama4, names, ("for_llm_compressor",))
    every, L = range(found.layers), found.layers
    rotary = found.rotary_layers or [int((i + 1) % found.interval != 0) for i in every]  # 1: with rotary embedding
    kinds = found.layer_types or ["chunked_attention" if is_rotary else "full_attention" for is_rotary in rotary]
    if len(rotary) < L or len(kinds) < L:
        raise QuantError(
            f"config.json has {len(rotary)} no_rope_layers, {len(kinds)} layer_types, and num_hidden_layers {L}"
        )
    return decoder_config(
        found,
        theta=500_000.0,
        rope="interleaved",
        hidden=found.dense_hidden,
        nope_layers=tuple(i for i in every if not rotary[i]),
        qkv_bias=found.attention_bias,
        o_bias=found.attention_bias,
        qk_norm="without_gain" if found.has_norms else "none",
        temperature_scale=found.temperature_scale if found.is_tempered else 0.0,
        temperature_length=found.temperature_length,
        temperature_nope=bool(found.is_tempered),
        experts=_experts(found, names),
        **_chunks(kinds[:L], found.chunk),
    )


def _chunks(kinds: list[str], chunk: int | None) -> dict[str, Any]:
    """The fields of the layers that attend to chunks of the positions."""
    for kind in kinds:
        refuse_unless(kind, ("full_attention", "chunked_attention"), "layer_types")
    layers = tuple(i for i, kind in enumerate(kinds) if kind == "chunked_attention")
    if not layers:
        return {}
    if chunk is None:
        raise UnsupportedError("config.json has layers of type 'chunked_attention', but no attention_chunk_size")
    return {"window": chunk, "window_is_chunk": True, "window_layers": layers if len(layers) < len(kinds) else ()}


def _experts(found: _Llama4, names: Collection[str]) -> Experts | None:
    """The experts, one of them for every token; None if every layer is dense."""
    layers = found.expert_layers
    if layers is None:
        layers = list(range(found.step - 1, found.layers, found.step))
    if not layers:
        return None
    return Experts(
        found.experts,
        found.active,
        found.hidden,
        normalized=False,
        layers=tuple(layers) if len(layers) < found.layers else (),
        scores="plain_sigmoid",
        scales_input=True,
        shared_hidden=found.hidden,
        shared_gate=False,
        layout="separate" if expert_layout(names) == "separate" else "joined_in_out",
    )


_PROJECTIONS = ("gate", "up", "down")
_NAMES = {
    **{f"mlp/{name}": f"feed_forward.{name}_proj.weight" for name in _PROJECTIONS},
    **{f"mlp/shared/{name}": f"feed_forward.shared_expert.{name}_proj.weight" for name in _PROJECTIONS},
    **{f"mlp/experts/{{}}/{name}": f"feed_forward.experts.{{}}.{name}_proj.weight" for name in _PROJECTIONS},
    "mlp/experts/gate+up": "feed_forward.experts.gate_up_proj",
    "mlp/experts/down": "feed_forward.experts.down_proj",
    "mlp/router": "feed_forward.router.weight",
}

FAMILIES = (Family("llama4_text", "Llama 4", _llama4, hf_table(_NAMES), "llama4"),)

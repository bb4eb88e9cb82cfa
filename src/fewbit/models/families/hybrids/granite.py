"""Granite: multipliers of embeddings, attention, residuals and logits."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._hybrids import GRANITE_4, layers_with_state
from ...._json import Count, Positive, converted
from ....errors import QuantError, UnsupportedError
from ...config import DecoderConfig
from ...part_configs import Experts, Mamba2
from ..family import (
    Common,
    Family,
    Number,
    decoder_config,
    every_nth_full,
    gguf_table,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)


class _Granite(Common, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embed_scale: Number = msgspec.field(name="embedding_multiplier", default=1.0)
    residual_scale: Number = msgspec.field(name="residual_multiplier", default=1.0)
    attention_scale: Number = msgspec.field(name="attention_multiplier", default=1.0)
    logit_divisor: Number = msgspec.field(name="logits_scaling", default=1.0)


class _GraniteMoe(_Granite, kw_only=True):
    experts: Positive = msgspec.field(name="num_local_experts", default=8)
    active: Positive = msgspec.field(name="num_experts_per_tok", default=2)


class _GraniteMoeShared(_GraniteMoe, kw_only=True):
    shared_hidden: Count = msgspec.field(name="shared_intermediate_size", default=0)


class _GraniteWindows(_Granite, kw_only=True):
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    window: Count | None = msgspec.field(name="sliding_window", default=128)
    layer_types: list[str] | None = None
    thetas: list[float] | None = msgspec.field(name="layer_rope_theta", default=None)


class _Granite4(_Granite, kw_only=True):
    hidden: Positive = msgspec.field(name="shared_intermediate_size", default=1024)
    experts_hidden: Positive = msgspec.field(name="intermediate_size", default=11008)
    experts: Count = msgspec.field(name="num_local_experts", default=8)
    active: Count | None = msgspec.field(name="num_experts_per_tok", default=2)
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    positions: str | None = msgspec.field(name="position_embedding_type", default=None)
    normalization: str = msgspec.field(name="normalization_function", default="rmsnorm")
    init_method: str | None = None


def _granite(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Granite, names)
    return decoder_config(found, mlp_bias=found.mlp_bias, **_shared_fields(found))


def _granite_moe(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GraniteMoe, names)
    experts = Experts(found.experts, found.active, found.hidden, shared_gate=False, layout="joined")
    return decoder_config(found, experts=experts, **_shared_fields(found))


def _granite_moe_shared(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _GraniteMoeShared, names)
    sizes = (found.experts, found.active, found.hidden)
    experts = Experts(*sizes, shared_hidden=found.shared_hidden, shared_gate=False, layout="joined")
    return decoder_config(found, fused_mlp=bool(found.shared_hidden), experts=experts, **_shared_fields(found))


def _granite4(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Granite 4, with state space layers of Mamba-2 or without, and with experts or without."""
    found = read_config(obj, _Granite4, names, STATE_KEYS)
    refuse_unless(found.normalization, ("rmsnorm",), "normalization_function")
    nope = () if found.positions == "rope" else tuple(range(found.layers))
    experts = None
    if found.experts:
        if not found.active:
            raise QuantError(f"config.json has num_local_experts {found.experts} and num_experts_per_tok {found.active}")
        sizes = (found.experts, found.active, found.experts_hidden)
        experts = Experts(*sizes, shared_hidden=found.hidden, shared_gate=False, layout="joined")
    layers = layers_with_state(found.kinds or ["mamba"] * found.layers, found.layers, GRANITE_4)
    return decoder_config(
        found,
        fused_mlp=True,
        nope_layers=nope,
        mamba=state_spaces(obj, found.width, layers),
        experts=experts,
        **_shared_fields(found),
    )


def _granite_windows(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Granite with attention sinks and a sliding window in three layers of four, each layer with its own base of rotary embedding."""
    found = read_config(obj, _GraniteWindows, names)
    kinds = found.layer_types or every_nth_full(found.layers, 4, from_first=True)
    fields = {**_shared_fields(found), **window_fields(kinds, found.window), "mlp_bias": found.mlp_bias, "sinks": True}
    if found.thetas is None:
        return decoder_config(found, **fields)
    thetas = found.thetas[: found.layers]
    if not len(thetas) == len(kinds) == found.layers:
        raise QuantError(
            f"config.json has {len(thetas)} layer_rope_theta and {len(kinds)} layer_types of {found.layers} layers"
        )
    full, local = (
        {theta for theta, kind in zip(thetas, kinds, strict=True) if theta and kind == wanted}
        for wanted in ("full_attention", "sliding_attention")
    )
    if len(full) > 1 or len(local) > 1:
        raise UnsupportedError(
            f"config.json has layer_rope_theta = {thetas!r:.80}; one base is supported for layers with a window, and one for others"
        )
    rope = found.rope_scaling or found.rope_parameters or {}
    if full and local and full != local:
        where = "config.json with several layer_rope_theta"
        refuse_unless(rope.get("rope_type", "default"), ("default",), "rope_type", where)
        fields["window_rope_theta"] = min(local)
    if bases := full or local:
        found.rope_scaling, found.rope_parameters = None, {**rope, "rope_theta": min(bases)}
    return decoder_config(found, nope_layers=tuple(i for i, theta in enumerate(thetas) if not theta), **fields)


_INFINITIES = (math.inf, "Infinity", "inf", {"__float__": "Infinity"})
"""What files have for infinity."""


def refuse_time_step_limit(given: object) -> None:
    """Raises UnsupportedError where the time steps of state spaces are limited."""
    refuse_unless(given, (None, *([0.0, infinity] for infinity in _INFINITIES)), "time_step_limit")


class StateSpaces(msgspec.Struct, kw_only=True):
    """The schema of state spaces, which is read beside that of a family."""

    heads: Positive = msgspec.field(name="mamba_n_heads", default=128)
    groups: Positive = msgspec.field(name="mamba_n_groups", default=1)
    state_dim: Positive = msgspec.field(name="mamba_d_state", default=256)
    head_dim: Positive | str | None = msgspec.field(name="mamba_d_head", default=None)
    kernel: Positive = msgspec.field(name="mamba_d_conv", default=4)
    expand: Positive = msgspec.field(name="mamba_expand", default=2)
    conv_bias: bool = msgspec.field(name="mamba_conv_bias", default=True)
    proj_bias: bool = msgspec.field(name="mamba_proj_bias", default=False)
    time_step_limit: list[float | str | dict[str, str]] | None = None


STATE_KEYS = (
    *(field.encode_name for field in msgspec.structs.fields(StateSpaces)),
    *("mamba_chunk_size", "time_step_min", "time_step_max", "time_step_floor"),
)
"""The keys of state spaces; of the last ones only speed and the initial values of parameters depend."""


def state_spaces(obj: Mapping[str, Any], width: int, layers: tuple[int, ...]) -> Mamba2 | None:
    """The state spaces of some layers; None if there are none.

    Args:
        obj: the JSON object of config.json.
        width: the width of the residual stream.
        layers: the layers.

    Raises:
        UnsupportedError: where time steps are limited, or a width is another word than "auto".
        QuantError: for a value of another type, or heads of another width than `mamba_expand` gives.
    """
    if not layers:
        return None
    found = converted(obj, StateSpaces, "config.json")
    refuse_time_step_limit(found.time_step_limit)
    inner, head_dim = found.expand * width, found.head_dim
    if not isinstance(head_dim, int):
        refuse_unless(head_dim, ("auto", None), "mamba_d_head")
        head_dim = inner // found.heads
    if head_dim * found.heads != inner:
        raise QuantError(
            f"config.json has {found.heads} heads of {head_dim} in state space layers, which mamba_expand makes {inner} wide"
        )
    biases = {"conv_bias": found.conv_bias, "bias": found.proj_bias}
    return Mamba2(layers, found.heads, head_dim, found.state_dim, found.groups, found.kernel, **biases)


def _shared_fields(found: _Granite) -> dict[str, Any]:
    """The fields of the biases of attention and of the multipliers."""
    return {
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
        "embed_scale": found.embed_scale,
        "residual_scale": found.residual_scale,
        "attention_scale": found.attention_scale,
        "logit_scale": 1 / found.logit_divisor,
    }


_EXPERTS = {
    "mlp/router": "block_sparse_moe.router.layer.weight",
    "mlp/experts/gate+up": "block_sparse_moe.input_linear.weight",
    "mlp/experts/down": "block_sparse_moe.output_linear.weight",
}

_MLP = {"mlp/gate+up": "shared_mlp.input_linear.weight", "mlp/down": "shared_mlp.output_linear.weight"}
STATES = {
    "attn/in": "mamba.in_proj.weight",
    "attn/in_bias": "mamba.in_proj.bias",
    "attn/conv1d": "mamba.conv1d.weight",
    "attn/conv1d_bias": "mamba.conv1d.bias",
    **{f"attn/{name}": f"mamba.{name}" for name in ("dt_bias", "A_log", "D")},
    "attn/out_norm": "mamba.norm.weight",
    "attn/out": "mamba.out_proj.weight",
    "attn/out_bias": "mamba.out_proj.bias",
}
"""The names of state spaces."""
_SHARED = {path.replace("mlp/", "mlp/shared/"): name for path, name in _MLP.items()}
_GRANITE_4_MOE = hf_table({**_EXPERTS, **STATES, **_SHARED})

STATES_GGUF = {
    **{f"attn/{name}": f"ssm_{name}.weight" for name in ("in", "conv1d", "out")},
    "attn/conv1d_bias": "ssm_conv1d.bias",
    "attn/dt_bias": "ssm_dt.bias",
    "attn/A": "ssm_a",
    "attn/D": "ssm_d",
    "attn/out_norm": "ssm_norm.weight",
}
"""The names of state spaces in GGUF files."""
_GGUF = gguf_table(STATES_GGUF)

FAMILIES = (
    Family("granite", "Granite", _granite, gguf="granite", permutes=True),
    Family("granitemoe", "GraniteMoE", _granite_moe, hf_table(_EXPERTS), gguf="granitemoe", permutes=True),
    Family(
        "granitemoeshared",
        "GraniteMoE, shared expert",
        _granite_moe_shared,
        hf_table({**_EXPERTS, **_SHARED}),
        gguf="granitemoe",
        permutes=True,
    ),
    Family("granite_swa", "Granite with windows", _granite_windows, hf_table({"attn/sinks": "self_attn.sinks"})),
    Family(
        "granitemoehybrid",
        "Granite 4",
        _granite4,
        hf_table({**_MLP, **STATES}),
        gguf="granitehybrid",
        gguf_table=_GGUF,
        permutes=True,
        other_table=lambda config: _GRANITE_4_MOE if config.experts is not None else None,
    ),
)

"""Granite: multipliers of embeddings, attention, residuals and logits."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from ...._hybrids import GRANITE_4, layers_with_state
from ...._json import Count, Positive
from ....errors import QuantError, UnsupportedError
from ...config import DecoderConfig
from ...part_configs import Experts, Mamba2
from ..family import (
    Common,
    Family,
    Number,
    decoder_config,
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
    mamba_heads: Positive = msgspec.field(name="mamba_n_heads", default=128)
    mamba_groups: Positive = msgspec.field(name="mamba_n_groups", default=1)
    mamba_state: Positive = msgspec.field(name="mamba_d_state", default=256)
    mamba_head_dim: Positive | str | None = msgspec.field(name="mamba_d_head", default=None)
    mamba_kernel: Positive = msgspec.field(name="mamba_d_conv", default=4)
    mamba_expand: Positive = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_chunk_size: Count = 256
    time_step_limit: list[float | str | dict[str, str]] | None = None


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
    found = read_config({key: obj[key] for key in obj if key not in OF_TRAINING}, _Granite4, names)
    refuse_unless(found.normalization, ("rmsnorm",), "normalization_function")
    nope = () if found.positions == "rope" else tuple(range(found.layers))
    experts = None
    if found.experts:
        if not found.active:
            raise QuantError(f"config.json has num_local_experts {found.experts} and num_experts_per_tok {found.active}")
        sizes = (found.experts, found.active, found.experts_hidden)
        experts = Experts(*sizes, shared_hidden=found.hidden, shared_gate=False, layout="joined")
    return decoder_config(
        found,
        fused_mlp=True,
        nope_layers=nope,
        mamba=state_spaces(found, layers_with_state(found.kinds or ["mamba"] * found.layers, found.layers, GRANITE_4)),
        experts=experts,
        **_shared_fields(found),
    )


def _granite_windows(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Granite with attention sinks and a sliding window in three layers of four, each layer with its own base of rotary embedding."""
    found = read_config(obj, _GraniteWindows, names)
    of_layers = ["sliding_attention" if i % 4 else "full_attention" for i in range(found.layers)]
    windows = window_fields(found.layer_types or of_layers, found.window)
    fields = {**_shared_fields(found), **windows, "mlp_bias": found.mlp_bias, "sinks": True}
    if found.thetas is None:
        return decoder_config(found, **fields)
    has_window = windows.get("window_layers", ()) or (range(found.layers) if windows else ())
    nope = tuple(i for i, theta in enumerate(found.thetas[: found.layers]) if not theta)
    of_kinds = [
        {found.thetas[i] for i in range(found.layers) if i not in nope and (i in has_window) == kind} for kind in (0, 1)
    ]
    if len(found.thetas) < found.layers or any(len(thetas) > 1 for thetas in of_kinds):
        raise UnsupportedError(
            f"config.json has layer_rope_theta = {found.thetas!r:.80}; one base is supported for layers with a window, and one for others"
        )
    full, local = (next(iter(thetas), 0.0) for thetas in of_kinds)
    rope = found.rope_scaling or found.rope_parameters or {}
    if full and local and full != local:
        refuse_unless(
            rope.get("rope_type", "default"), ("default",), "rope_type", "config.json with several layer_rope_theta"
        )
        fields["window_rope_theta"] = local
    if full or local:
        found.rope_scaling, found.rope_parameters = None, {**rope, "rope_theta": full or local}
    return decoder_config(found, nope_layers=nope, **fields)


OF_TRAINING = ("time_step_min", "time_step_max", "time_step_floor")
"""Keys of which only the initial values of parameters depend."""

_INFINITIES = (math.inf, "Infinity", "inf", {"__float__": "Infinity"})
"""What files have for infinity."""


def refuse_time_step_limit(given: object) -> None:
    """Raises UnsupportedError where the time steps of state spaces are limited."""
    refuse_unless(given, (None, *([0.0, infinity] for infinity in _INFINITIES)), "time_step_limit")


@runtime_checkable
class StateSpaces(Protocol):
    """What config.json says of state spaces; other fields are those of `Common`."""

    layers: int
    width: int
    mamba_heads: int
    mamba_groups: int
    mamba_state: int
    mamba_head_dim: int | str | None
    mamba_kernel: int
    mamba_expand: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool
    time_step_limit: list[Any] | None


def state_spaces(found: StateSpaces, layers: tuple[int, ...]) -> Mamba2 | None:
    """The state spaces of some layers; None if there are none.

    Args:
        found: the fields of config.json.
        layers: the layers.

    Raises:
        UnsupportedError: where time steps are limited, or a width is another word than "auto".
        QuantError: for heads of another width than `mamba_expand` gives.
    """
    if not layers:
        return None
    refuse_time_step_limit(found.time_step_limit)
    width = found.mamba_expand * found.width
    head_dim = found.mamba_head_dim
    if not isinstance(head_dim, int):
        refuse_unless(head_dim, ("auto", None), "mamba_d_head")
        head_dim = width // found.mamba_heads
    if head_dim * found.mamba_heads != width:
        raise QuantError(
            f"config.json has {found.mamba_heads} heads of {head_dim} in state space layers, which mamba_expand makes {width} wide"
        )
    return Mamba2(
        layers,
        found.mamba_heads,
        head_dim,
        found.mamba_state,
        found.mamba_groups,
        found.mamba_kernel,
        conv_bias=found.mamba_conv_bias,
        bias=found.mamba_proj_bias,
    )


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

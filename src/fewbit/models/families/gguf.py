"""The configuration of a GGUF file of each architecture."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from ..._json import Count, Positive, converted
from ..._registry import near_names
from ...array.qarray import QArray
from ...errors import QuantError, UnsupportedError
from ...kernels.quantize.dispatch import dequantize
from ..attention.rope_scaling import Linear, LongRope, RopeScaling, Yarn, yarn_gain
from ..config import DecoderConfig
from ..names import NameTable, check_layer_count
from ..part_configs import Experts, LatentAttention, LinearAttention
from .family import GGUF, MANY, Number, refuse_unless
from .table import FAMILIES

_WHERE = "the GGUF metadata"

Fields = Mapping[str, Any]
Tensors = Collection[str] | Mapping[str, Any]


def config_from_gguf(fields: Fields, names: Tensors) -> DecoderConfig:
    """Reads the configuration of a GGUF file.

    Args:
        fields: the metadata by key, as plain Python values.
        names: its tensors by name, or their names alone. The head is tied if none is `output.weight`. Factors of rotary
            frequencies (`rope_freqs.weight` of Llama 3.1) are tensors, so they need the values.

    Returns:
        A configuration. Of Llama and its relatives it has the "interleaved" layout: llama.cpp's converter orders the rows of
        q and k for it.

    Raises:
        UnsupportedError: for another architecture, or a feature that the decoder lacks.
        QuantError: for a missing key.
    """
    architecture = gguf_architecture(fields)
    found = _Gguf(**msgspec.structs.asdict(converted(fields, _schema(architecture), _WHERE)))
    check_layer_count(found.layers, len(names), MANY)
    if found.extra_layers >= found.layers:
        raise QuantError(f"{_WHERE} has {found.layers} layers, and {found.extra_layers} of them for multi-token prediction")
    found.layers -= found.extra_layers
    head_dim = found.head_dim or found.width // found.heads
    if architecture != "deepseek2":
        refuse_unless(found.value_length or head_dim, (head_dim,), f"{architecture}.attention.value_length", _WHERE)
    vocab = len(found.tokens) or found.vocab
    if vocab is None:
        raise QuantError(f"{_WHERE} has neither 'tokenizer.ggml.tokens' nor '{architecture}.vocab_size'")
    hidden = found.hidden or found.expert_hidden
    if hidden is None:
        raise QuantError(f"{_WHERE} lacks the field '{architecture}.feed_forward_length'")
    rotary_dim = found.rotary_dim or head_dim
    settings: dict[str, Any] = {
        "kv_heads": found.kv_heads or found.heads,
        "head_dim": head_dim,
        "rope": "half",
        "qkv_bias": "blk.0.attn_q.bias" in names,
        "o_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "rope_scaling": _scaling(architecture, found, names),
        "rotary_dim": 0 if rotary_dim == head_dim else rotary_dim,
        "experts": _experts(architecture, found, names),
        "extra_layers": found.extra_layers,
        **ARCHITECTURES[architecture](found),
    }
    if architecture == "glm4moe" and "blk.0.attn_q_norm.weight" in names:
        settings["qk_norm"] = "head"
    return DecoderConfig(
        vocab=vocab,
        layers=found.layers,
        width=found.width,
        heads=found.heads,
        hidden=hidden,
        norm_eps=found.norm_eps,
        rope_theta=found.rope_theta,
        tied="output.weight" not in names,
        context=found.context,
        **settings,
    )


def gguf_architecture(fields: Fields) -> str:
    """The architecture of a GGUF file.

    Raises:
        UnsupportedError: for one that the decoder cannot run.
    """
    architecture = converted(fields, _Architecture, _WHERE).name
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"the GGUF file's architecture is {architecture!r}, which the decoder cannot run; "
            f"{near_names(architecture, tuple(ARCHITECTURES))}"
        )
    return architecture


def gguf_table_of(fields: Fields) -> NameTable:
    """The names of the parameters in a GGUF file."""
    architecture = gguf_architecture(fields)
    return next((family.gguf_table for family in FAMILIES.values() if family.gguf == architecture), GGUF)


class _Architecture(msgspec.Struct):
    name: str = msgspec.field(name="general.architecture")


class _Gguf(msgspec.Struct):
    """The metadata that configurations read."""

    width: Positive
    heads: Positive
    layers: Positive
    context: Positive
    norm_eps: Number
    extra_layers: Count = 0
    hidden: Positive | None = None
    kv_heads: Positive | None = None
    head_dim: Positive | None = None
    value_length: Positive | None = None
    rope_theta: Number = 10_000.0
    window_rope_theta: Number = 10_000.0
    rotary_dim: Positive | None = None
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
    window: Count | None = None
    window_pattern: Positive | list[bool] | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    attention_scale: float = 0.0
    embed_scale: Number = 1.0
    residual_scale: Number = 1.0
    logit_divisor: Number = 1.0


_SIGMOID = 2  # expert_gating_func: 1 is softmax

_KEYS = {
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
    "rope_theta": "rope.freq_base",
    "window_rope_theta": "rope.freq_base_swa",
    "rotary_dim": "rope.dimension_count",
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
    "window": "attention.sliding_window",
    "window_pattern": "attention.sliding_window_pattern",
    "attention_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
    "attention_scale": "attention.scale",
    "embed_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "logit_divisor": "logit_scale",
}
"""The key of each field of `_Gguf`, after the architecture."""


@functools.cache
def _schema(architecture: str) -> Any:
    """`_Gguf` as the schema of an architecture's keys."""
    names = {field: f"{architecture}.{key}" for field, key in _KEYS.items()} | {"tokens": "tokenizer.ggml.tokens"}
    fields: list[Any] = []
    for field in msgspec.structs.fields(_Gguf):
        option: dict[str, Any] = {"default": field.default, "default_factory": field.default_factory}
        fields.append((field.name, field.type, msgspec.field(name=names[field.name], **option)))
    return msgspec.defstruct("Gguf", fields)


def _scaling(architecture: str, found: _Gguf, names: Tensors) -> RopeScaling | None:
    """The scaling of rotary frequencies. A factor without a type is linear, as in llama.cpp.

    Factors that are a tensor divide the frequencies, and a linear factor divides them again.
    """
    original = found.original_context or found.context
    key, factor = f"{architecture}.rope.scaling.type", found.scaling_factor or found.old_scaling_factor
    kind = found.scaling or ("none" if factor is None else "linear")
    stored = [name for name in ("rope_freqs.weight", "rope_factors_long.weight") if name in names]
    again = 1.0 if factor is None or kind == "none" else factor
    if stored:
        refuse_unless(kind, ("none", "linear", "longrope"), key, f"{_WHERE} with {stored[0]}")
    if "rope_freqs.weight" in names:
        factors = _factors(names, "rope_freqs.weight", again)
        return LongRope(factors, factors, found.context, 1.0)
    if "rope_factors_long.weight" in names:
        short, long = (_factors(names, f"rope_factors_{length}.weight", again) for length in ("short", "long"))
        return LongRope(short, long, original, found.attention_factor or 1.0)
    refuse_unless(kind, ("none", "linear", "yarn"), key, _WHERE)
    if kind == "none":
        return None
    if factor is None:
        raise QuantError(f"{_WHERE} has {key} = {kind!r}, but no '{architecture}.rope.scaling.factor'")
    if kind == "linear":
        return Linear(factor)
    # 1 is llama.cpp's default, and converters of OLMo 3 write YaRN's own gain.
    if not any(math.isclose(found.attention_factor or 1.0, known, rel_tol=1e-5) for known in (1.0, yarn_gain(factor))):
        raise UnsupportedError(
            f"{_WHERE} has {architecture}.rope.scaling.attn_factor = {found.attention_factor!r} of YaRN; supported is 1.0"
        )
    truncate = architecture != "gpt-oss"  # which was trained without rounding the ends of the ramp
    gain = 1.0 if found.yarn_log_multiplier else 0.0
    return Yarn(factor, original, found.beta_fast, found.beta_slow, truncate, gain)


def _factors(names: Tensors, name: str, again: float) -> tuple[float, ...]:
    """The factors of rotary frequencies that a file has as a tensor, times `again`."""
    if not isinstance(names, Mapping) or names[name] is None:
        raise UnsupportedError(f"the GGUF file has {name}: pass its tensors, since these factors scale rotary embedding")
    value = names[name]
    if isinstance(value, QArray):
        value = dequantize(value)
    return tuple(again * float(x) for x in np.asarray(value, np.float64))


def _experts(architecture: str, found: _Gguf, names: Tensors) -> Experts | None:
    """The mixture of experts, whose matrices a GGUF file stacks."""
    if not found.experts:
        return None
    if found.active is None:
        raise QuantError(f"{_WHERE} lacks the field '{architecture}.expert_used_count'")
    layers = tuple(i for i in range(found.layers) if f"blk.{i}.ffn_down_exps.weight" in names)
    if not layers:
        raise UnsupportedError(f"{_WHERE} has experts, but the file has no 'blk.0.ffn_down_exps.weight'")
    hidden = found.expert_hidden or found.hidden
    assert hidden is not None
    settings: dict[str, Any] = {
        "normalized": architecture not in ("qwen2moe", "olmoe"),
        "shared_hidden": found.shared_hidden,
    }
    if architecture in ("deepseek2", "glm4moe", "dots1", "minimax-m2"):
        settings = _routed_experts(architecture, found, hidden)
    return Experts(
        found.experts,
        found.active,
        hidden,
        layers=layers if len(layers) < found.layers else (),
        bias="blk.0.ffn_gate_inp.bias" in names,
        layout="stacked",
        **settings,
    )


def _routed_experts(architecture: str, found: _Gguf, hidden: int) -> dict[str, Any]:
    """The fields of DeepSeek's experts, and of those after them.

    Files of DeepSeek-V2 may not say that scores are softmax probabilities, nor those of GLM that they are sigmoids.
    """
    refuse_unless(found.scores, (0, 1, 2), f"{architecture}.expert_gating_func", _WHERE)
    scores = found.scores or (_SIGMOID if architecture == "glm4moe" else 1)
    return {
        "normalized": found.normalized or architecture == "minimax-m2",
        "scores": "sigmoid" if scores == _SIGMOID else "softmax",
        "groups": found.groups or 1,
        "active_groups": found.active_groups or 1,
        "scale": found.expert_scale,
        "shared_hidden": found.shared * hidden,
        "shared_gate": False,
    }


def _llama(found: _Gguf) -> dict[str, Any]:
    return {"rope": "interleaved"}


_EXAONE_WITH_WINDOWS = 64


def _exaone4(found: _Gguf) -> dict[str, Any]:
    """EXAONE 4. llama.cpp has windows where there are 64 layers, and then no rotary embedding in the layers without one."""
    fields: dict[str, Any] = {"norms": "post", "qk_norm": "head"}
    if found.layers != _EXAONE_WITH_WINDOWS:
        return fields
    windows = _windows(msgspec.structs.replace(found, window=found.window or 4096), 4)
    has_window = windows.get("window_layers", ()) or (range(found.layers) if windows else ())
    return {**fields, **windows, "nope_layers": tuple(i for i in range(found.layers) if i not in has_window)}


def _glm4(found: _Gguf) -> dict[str, Any]:
    return {"rope": "interleaved", "norms": "sandwich", "fused_mlp": True}


def _projection_norms(found: _Gguf) -> dict[str, Any]:
    return {"qk_norm": "projection"}


def _smollm3(found: _Gguf) -> dict[str, Any]:
    return {"rope": "interleaved", "nope_layers": tuple(range(3, found.layers, 4))}


def _granite(found: _Gguf) -> dict[str, Any]:
    return {
        "rope": "interleaved",
        "attention_scale": found.attention_scale,
        "embed_scale": found.embed_scale,
        "residual_scale": found.residual_scale,
        "logit_scale": 1 / found.logit_divisor,
    }


def _plain(found: _Gguf) -> dict[str, Any]:
    return {}


def _qwen3(found: _Gguf) -> dict[str, Any]:
    return {"qk_norm": "head"}


def _olmo2(found: _Gguf) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows. Rotary frequencies are not scaled in the layers that have them."""
    fields = {"norms": "post", "qk_norm": "projection", **_windows(found, 4)}
    return fields | {"window_rope_theta": found.rope_theta if found.window else 0.0}


def _phi3(found: _Gguf) -> dict[str, Any]:
    return {"fused": True, "window": found.window or 0}


def _gemma(found: _Gguf) -> dict[str, Any]:
    """The fields of every Gemma: converters have added 1 to the gains of norms."""
    return {"activation": "gelu_tanh", "embed_scale": found.width**0.5}


def _scaled_gemma(found: _Gguf, largest: int) -> dict[str, Any]:
    """The fields of Gemma 2 and 3."""
    head_dim = found.head_dim or found.width // found.heads
    if found.layers == largest:  # the 27B models, as in llama.cpp: query_pre_attn_scalar is not in the file
        head_dim = found.width // found.heads
    return {**_gemma(found), "norms": "sandwich", "attention_scale": head_dim**-0.5, "logit_cap": found.logit_cap}


def _gemma2(found: _Gguf) -> dict[str, Any]:
    if found.window is None:
        found = msgspec.structs.replace(found, window=4096)  # llama.cpp's default, as those of the caps
    caps = {"attention_cap": found.attention_cap or 50.0, "logit_cap": found.logit_cap or 30.0}
    return {**_scaled_gemma(found, 46), **_windows(found, 2), **caps}


def _gemma3(found: _Gguf) -> dict[str, Any]:
    return {
        **_scaled_gemma(found, 62),
        **_windows(found, 6),
        "qk_norm": "head",
        "window_rope_theta": found.window_rope_theta,
    }


def _gpt_oss(found: _Gguf) -> dict[str, Any]:
    if found.window is None:
        raise QuantError(f"{_WHERE} lacks the field 'gpt-oss.attention.sliding_window'")
    return {"sinks": True, "activation": "clamped_swiglu", **_windows(found, 2)}


def _deepseek2(found: _Gguf) -> dict[str, Any]:
    """Latent attention. Files since April 2025 have `kv_b` in two parts, and the sizes of heads in keys of their own."""
    if found.rank is None or found.rotary_dim is None:
        missing = "attention.kv_lora_rank" if found.rank is None else "rope.dimension_count"
        raise QuantError(f"{_WHERE} lacks the field 'deepseek2.{missing}'")
    refuse_unless(found.temperature_scale, (0.0,), "deepseek2.attention.temperature_scale", _WHERE)
    split = found.split_key_length is not None
    head_dim, value_dim = found.split_key_length or found.head_dim, found.split_value_length or found.value_length
    if head_dim is None or value_dim is None:
        raise QuantError(
            f"{_WHERE} lacks the lengths of keys or values, 'deepseek2.attention.key_length' and 'value_length'"
        )
    fields = {
        "kv_heads": found.heads,
        "head_dim": head_dim,
        "rotary_dim": found.rotary_dim,
        "rope": "interleaved",
        "latent": LatentAttention(found.rank, value_dim, found.query_rank, found.norm_eps, split),
    }
    if found.scaling != "yarn":
        return fields
    # As llama.cpp reads it: 0.1 times YaRN's mscale_all_dim.
    all_dims = round(found.yarn_log_multiplier / 0.1, 6)
    if not all_dims:
        raise UnsupportedError(f"{_WHERE} has deepseek2.rope.scaling.type = 'yarn', but no 'yarn_log_multiplier'")
    gain = yarn_gain(found.scaling_factor or found.old_scaling_factor or 1.0, all_dims)
    return fields | {"attention_scale": head_dim**-0.5 * gain**2}


def _hybrid(found: _Gguf, architecture: str) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: linear attention in all but every n-th layer, and a gate in the others. The 1 of gains is added."""
    sizes = {
        name: getattr(found, name) for name in ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
    }
    for name, size in sizes.items():
        if size is None:
            raise QuantError(f"{_WHERE} lacks the field '{architecture}.{_KEYS[name]}'")
    keys, values, key_dim, inner, kernel = sizes.values()
    if inner % values:
        raise QuantError(f"{_WHERE} has {architecture}.ssm.inner_size = {inner}, which {values} heads do not divide")
    layers = tuple(i for i in range(found.layers) if (i + 1) % found.interval)
    linear = None
    if layers:
        layout = "gguf" if architecture == "qwen3next" else "gguf_tiled"
        linear = LinearAttention(layers, keys, values, key_dim, inner // values, kernel, layout)
    return {"qk_norm": "head", "attention_gate": True, "linear": linear}


def _windows(found: _Gguf, period: int) -> dict[str, Any]:
    """The layers with the sliding window: those of the file's pattern, or all but each `period`-th."""
    if not found.window:
        return {}
    pattern = found.window_pattern or period
    if isinstance(pattern, int):
        pattern = [bool((i + 1) % pattern) for i in range(found.layers)]
    if len(pattern) != found.layers:
        raise QuantError(f"{_WHERE} has a 'sliding_window_pattern' of {len(pattern)} layers; expected {found.layers}")
    layers = tuple(i for i, has_window in enumerate(pattern) if has_window)
    if not layers:
        return {}
    return {"window": found.window, "window_layers": layers if len(layers) < found.layers else ()}


ARCHITECTURES: dict[str, Callable[[_Gguf], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "qwen2moe": _plain,
    "qwen3moe": _qwen3,
    **{name: functools.partial(_hybrid, architecture=name) for name in ("qwen3next", "qwen35", "qwen35moe")},
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmoe": _projection_norms,
    "seed_oss": _plain,
    "exaone4": _exaone4,
    "ernie4_5": _llama,
    "glm4": _glm4,
    "glm4moe": _plain,
    "dots1": _qwen3,
    "minimax-m2": _projection_norms,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
"""For each architecture the fields that differ from Llama's."""

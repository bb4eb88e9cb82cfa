"""The configuration of a GGUF file of each architecture."""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from ...._json import converted
from ...._registry import near_names
from ....array.qarray import QArray
from ....errors import QuantError, UnsupportedError
from ....kernels.quantize.dispatch import dequantize
from ...attention.rope_scaling import Linear, LongRope, Proportional, RopeScaling, Yarn, yarn_gain
from ...config import DecoderConfig
from ...names import NameTable, check_layer_count
from ...part_configs import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    PerLayerInputs,
    SharedKeys,
    ShortConvolution,
)
from ..family import GGUF, MANY, refuse_unless
from ..table import FAMILIES
from .metadata import KEYS, WHERE, GGUFMetadata, read_metadata

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
    found = read_metadata(fields, architecture)
    check_layer_count(found.layers, len(names), MANY)
    if found.extra_layers >= found.layers:
        raise QuantError(f"{WHERE} has {found.layers} layers, and {found.extra_layers} of them for multi-token prediction")
    found.layers -= found.extra_layers
    head_dim = found.head_dim or found.width // found.heads
    if architecture != "deepseek2":
        refuse_unless(found.value_length or head_dim, (head_dim,), f"{architecture}.attention.value_length", WHERE)
    hidden = found.hidden or found.expert_hidden
    if hidden is None:
        raise QuantError(f"{WHERE} lacks the field '{architecture}.feed_forward_length'")
    if architecture not in _OF_SEVERAL_SIZES:
        hidden = found.hidden = _of_all_layers(hidden, f"{architecture}.feed_forward_length")
        found.kv_heads = _of_all_layers(found.kv_heads or found.heads, f"{architecture}.attention.head_count_kv")
    rotary_dim = found.rotary_dim or head_dim
    settings: dict[str, Any] = {
        "kv_heads": found.kv_heads,
        "head_dim": head_dim,
        "hidden": hidden,
        "rope": "half",
        "qkv_bias": "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
        "o_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "norm_bias": "output_norm.bias" in names,
        "head_bias": "output.bias" in names,
        "rope_scaling": _scaling(architecture, found, names),
        "rotary_dim": 0 if rotary_dim == head_dim else rotary_dim,
        "experts": _experts(architecture, found, names),
        "extra_layers": found.extra_layers,
        **ARCHITECTURES[architecture](found, names),
    }
    return DecoderConfig(
        vocab=found.rows,
        layers=found.layers,
        width=found.width,
        heads=found.heads,
        norm_eps=found.norm_eps,
        rope_theta=found.rope_theta,
        tied="output.weight" not in names,
        context=found.context,
        **settings,
    )


_OF_SEVERAL_SIZES = ("gemma4", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
"""The architectures whose layers have heads of keys or feed-forward blocks of several sizes."""


def gguf_architecture(fields: Fields) -> str:
    """The architecture of a GGUF file.

    Raises:
        UnsupportedError: for one that the decoder cannot run.
    """
    architecture = converted(fields, _Architecture, WHERE).name
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"the GGUF file's architecture is {architecture!r}, which the decoder cannot run; "
            f"{near_names(architecture, tuple(ARCHITECTURES))}"
        )
    return architecture


def gguf_table_of(fields: Fields, config: DecoderConfig) -> NameTable:
    """The names of the parameters in a GGUF file.

    Args:
        fields: the metadata by key.
        config: its configuration.
    """
    architecture = gguf_architecture(fields)
    architecture = _NAMED_ALIKE.get(architecture, architecture)
    found = (family.gguf_table_of(config) for family in FAMILIES.values() if family.gguf == architecture)
    return next(found, GGUF)


_NAMED_ALIKE = {"nemotron_h_moe": "nemotron_h"}
"""Architectures with the names of another one."""


class _Architecture(msgspec.Struct):
    name: str = msgspec.field(name="general.architecture")


def _scaling(architecture: str, found: GGUFMetadata, names: Tensors) -> RopeScaling | None:
    """The scaling of rotary frequencies. A factor without a type is linear, as in llama.cpp.

    Factors that are a tensor divide the frequencies, and a linear factor divides them again.
    """
    original = found.original_context or found.context
    key, factor = f"{architecture}.rope.scaling.type", found.scaling_factor or found.old_scaling_factor
    kind = found.scaling or ("none" if factor is None else "linear")
    stored = [name for name in ("rope_freqs.weight", "rope_factors_long.weight") if name in names]
    again = 1.0 if factor is None or kind == "none" else factor
    if stored:
        refuse_unless(kind, ("none", "linear", "longrope"), key, f"{WHERE} with {stored[0]}")
    if "rope_freqs.weight" in names:
        factors = _factors(names, "rope_freqs.weight", again)
        return LongRope(factors, factors, found.context, 1.0)
    if "rope_factors_long.weight" in names:
        short, long = (_factors(names, f"rope_factors_{length}.weight", again) for length in ("short", "long"))
        return LongRope(short, long, original, found.attention_factor or 1.0)
    refuse_unless(kind, ("none", "linear", "yarn"), key, WHERE)
    if kind == "none":
        return None
    if factor is None:
        raise QuantError(f"{WHERE} has {key} = {kind!r}, but no '{architecture}.rope.scaling.factor'")
    if kind == "linear":
        return Linear(factor)
    # 1 is llama.cpp's default, and converters of OLMo 3 write YaRN's own gain.
    if not any(math.isclose(found.attention_factor or 1.0, known, rel_tol=1e-5) for known in (1.0, yarn_gain(factor))):
        raise UnsupportedError(
            f"{WHERE} has {architecture}.rope.scaling.attn_factor = {found.attention_factor!r} of YaRN; supported is 1.0"
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


def _experts(architecture: str, found: GGUFMetadata, names: Tensors) -> Experts | None:
    """The mixture of experts, whose matrices a GGUF file stacks."""
    if not found.experts:
        return None
    if found.active is None:
        raise QuantError(f"{WHERE} lacks the field '{architecture}.expert_used_count'")
    layers = tuple(i for i in range(found.layers) if f"blk.{i}.ffn_down_exps.weight" in names)
    if not layers:
        raise UnsupportedError(f"{WHERE} has experts, but the file has no 'blk.0.ffn_down_exps.weight'")
    hidden = found.expert_hidden or found.hidden
    if not isinstance(hidden, int):
        raise QuantError(f"{WHERE} lacks the field '{architecture}.expert_feed_forward_length'")
    settings: dict[str, Any] = {
        "normalized": architecture not in ("qwen2moe", "olmoe"),
        "shared_hidden": found.shared_hidden,
    }
    if architecture in ("deepseek2", "glm4moe", "dots1", "minimax-m2", "lfm2moe", "exaone-moe", "nemotron_h_moe"):
        settings = _routed_experts(architecture, found, hidden)
    if architecture in ("granitemoe", "granitehybrid", "hunyuan-moe", "ernie4_5-moe"):
        settings["shared_gate"] = False
    if architecture == "ernie4_5-moe" and f"blk.{layers[0]}.exp_probs_b.bias" in names:
        settings |= {"scores": "corrected_softmax", "sum_eps": 1e-12}
    if architecture == "nemotron_h_moe":
        settings |= {"scores": "sigmoid", "shared_hidden": found.shared_hidden, "latent": found.latent}
    if architecture == "llama4":
        settings = {"normalized": False, "scores": "plain_sigmoid", "scales_input": True}
        settings |= {"shared_hidden": hidden, "shared_gate": False}
    if architecture == "gemma4":
        settings |= {"beside_dense": True, "router_scale": f"blk.{layers[0]}.ffn_down_exps.scale" in names}
    is_joined = f"blk.{layers[0]}.ffn_gate_up_exps.weight" in names
    return Experts(
        found.experts,
        found.active,
        hidden,
        layers=layers if len(layers) < found.layers else (),
        bias="blk.0.ffn_gate_inp.bias" in names,
        layout="joined" if is_joined else "stacked",
        **settings,
    )


_SIGMOID = 2  # expert_gating_func: 1 is softmax


def _routed_experts(architecture: str, found: GGUFMetadata, hidden: int) -> dict[str, Any]:
    """The fields of DeepSeek's experts, and of those after them.

    Files of DeepSeek-V2 may not say that scores are softmax probabilities, nor those of GLM that they are sigmoids.
    """
    refuse_unless(found.scores, (0, 1, 2), f"{architecture}.expert_gating_func", WHERE)
    scores = found.scores or (_SIGMOID if architecture == "glm4moe" else 1)
    return {
        "normalized": found.normalized or architecture in ("minimax-m2", "lfm2moe"),
        "scores": "sigmoid" if scores == _SIGMOID else "softmax",
        "groups": found.groups or 1,
        "active_groups": found.active_groups or 1,
        "scale": found.expert_scale,
        "sum_eps": 1e-6 if architecture == "lfm2moe" else 1e-20,
        "shared_hidden": found.shared * hidden,
        "shared_gate": False,
    }


def _llama(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"rope": "interleaved"}


_EXAONE_WITH_WINDOWS = 64


def _exaone4(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """EXAONE 4. llama.cpp has windows where there are 64 layers, and then no rotary embedding in the layers without one."""
    fields: dict[str, Any] = {"norms": "post", "qk_norm": "head"}
    if found.layers != _EXAONE_WITH_WINDOWS:
        return fields
    windows = _windows(msgspec.structs.replace(found, window=found.window or 4096), 4)
    return {**fields, **windows, "nope_layers": _without_window(found, windows)}


def _without_window(found: GGUFMetadata, windows: dict[str, Any]) -> tuple[int, ...]:
    """The layers without a window, by the fields of those with one."""
    has_window = windows.get("window_layers", ()) or (range(found.layers) if windows else ())
    return tuple(i for i in range(found.layers) if i not in has_window)


def _glm4(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"rope": "interleaved", "norms": "sandwich", "fused_mlp": True}


def _glm4moe(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"qk_norm": "head" if "blk.0.attn_q_norm.weight" in names else "none"}


def _projection_norms(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"qk_norm": "projection"}


def _smollm3(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"rope": "interleaved", "nope_layers": tuple(range(3, found.layers, 4))}


def _llama4(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Llama 4. Files do not say what llama.cpp has built in: chunks, gains of queries, and norms unless there are 128 experts."""
    window, full = 8192, tuple(range(3, found.layers, 4))
    refuse_unless(found.window, (None, window), "llama4.attention.sliding_window", WHERE)
    return {
        "rope": "interleaved",
        "nope_layers": full,
        "qk_norm": "none" if found.experts == 128 else "without_gain",
        "window": window,
        "window_is_chunk": True,
        "window_layers": tuple(i for i in range(found.layers) if i not in full) if full else (),
        "temperature_scale": 0.1,
        "temperature_nope": True,
    }


def _granite(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {
        "rope": "interleaved",
        "attention_scale": found.attention_scale,
        "embed_scale": found.embed_scale,
        "residual_scale": found.residual_scale,
        "logit_scale": 1 / found.logit_scale,
        "nope_layers": () if found.rotates else tuple(range(found.layers)),
    }


def _cohere(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    refuse_unless("blk.0.attn_q_norm.weight" in names, (False,), "norms of queries and keys", WHERE)
    return {"rope": "interleaved", "norm_kind": "layer", "parallel": "one_norm", "logit_scale": found.logit_scale}


def _cohere2(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Cohere 2, whose layers without a window have no rotary embedding."""
    windows = _windows(found, 4)
    return {**_cohere(found, names), **windows, "nope_layers": _without_window(found, windows)}


def _layer_norms(
    found: GGUFMetadata, names: Tensors, *, activation: str = "silu", gated: bool = False, **others: Any
) -> dict[str, Any]:
    """StarCoder2, StableLM, Nemotron, Jais 2, Phi-2 and GPT-NeoX. Attention and the feed-forward block share a norm where there is one."""
    parallel = "none" if "blk.0.ffn_norm.weight" in names else "one_norm"
    return {"norm_kind": "layer", "parallel": parallel, "activation": activation, "gated": gated, **others}


def _gpt2(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    fields = _layer_norms(found, names, activation="gelu_tanh", fused=True)
    return fields | {"positions": found.context, "nope_layers": tuple(range(found.layers))}


def _gptneox(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    parallel = "two_norms" if found.is_parallel else "none"
    return _layer_norms(found, names, activation="gelu", fused=True) | {"parallel": parallel}


def _arcee(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"rope": "interleaved", "gated": False, "activation": "relu2"}


def _granite_moe(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Granite 3 and 4 with experts, which llama.cpp always rotates."""
    return _granite(found, names) | {"nope_layers": ()}


def _granite_hybrid(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Granite 4: a layer without heads of keys is a state space."""
    layers, kv_heads = _without_keys(found, "granitehybrid")
    return {
        **_granite(found, names),
        "kv_heads": kv_heads,
        "hidden": found.shared_hidden or found.hidden,
        "mamba": _mamba(found, names, layers, "granitehybrid"),
    }


def _mamba(found: GGUFMetadata, names: Tensors, layers: tuple[int, ...], architecture: str) -> Mamba2 | None:
    """The state spaces of some layers."""
    groups, heads, state_dim, head_dim, kernel = _state_sizes(found, architecture)
    if not layers:
        return None
    conv_bias = f"blk.{layers[0]}.ssm_conv1d.bias" in names
    return Mamba2(layers, heads, head_dim, state_dim, groups, kernel, conv_bias=conv_bias, is_gguf=True)


def _nemotron_h(found: GGUFMetadata, names: Tensors, architecture: str) -> dict[str, Any]:
    """Nemotron-H: a layer has heads of keys, a feed-forward width, or neither and a state."""
    kv_heads = _by_layer(found.kv_heads, found.layers, f"{architecture}.attention.head_count_kv")
    hidden = _by_layer(found.hidden, found.layers, f"{architecture}.feed_forward_length")
    attention, mlp = ([i for i, size in enumerate(sizes) if size] for sizes in (kv_heads, hidden))
    if not attention or not mlp or set(attention) & set(mlp):
        raise UnsupportedError(f"{WHERE} is not of layers with attention and layers with a feed-forward block")
    layers = tuple(i for i in range(found.layers) if i not in attention and i not in mlp)
    for name in ("attn_q.bias", "attn_output.bias"):
        refuse_unless(f"blk.{attention[0]}.{name}" in names, (False,), f"blk.{attention[0]}.{name}", WHERE)
    return {
        "kv_heads": _of_all_layers([kv_heads[i] for i in attention], f"{architecture}.attention.head_count_kv"),
        "hidden": _of_all_layers([hidden[i] for i in mlp], f"{architecture}.feed_forward_length"),
        "nope_layers": tuple(range(found.layers)),
        "mlp_layers": tuple(mlp),
        "mlp_bias": f"blk.{mlp[0]}.ffn_up.bias" in names,
        "gated": False,
        "activation": "relu2",
        "mamba": _mamba(found, names, layers, architecture),
    }


def _without_keys(found: GGUFMetadata, architecture: str) -> tuple[tuple[int, ...], int]:
    """The layers without heads of keys, which have a state in their place, and the number of heads in the others."""
    key = f"{architecture}.attention.head_count_kv"
    counts = _by_layer(found.kv_heads, found.layers, key)
    layers = tuple(i for i, count in enumerate(counts) if count == 0)
    return layers, _of_all_layers([count for count in counts if count], key)


def _lfm2(found: GGUFMetadata, names: Tensors, architecture: str = "lfm2") -> dict[str, Any]:
    """LFM2: a layer without heads of keys is a short convolution."""
    if found.conv_cache is None:
        raise QuantError(f"{WHERE} lacks the field '{architecture}.shortconv.l_cache'")
    layers, kv_heads = _without_keys(found, architecture)
    return {
        "kv_heads": kv_heads,
        "window": found.window or 0,
        "qk_norm": "head",
        "short_conv": ShortConvolution(layers, found.width, found.conv_cache, is_gguf=True) if layers else None,
    }


def _hunyuan(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"qk_norm": "rotated_head"}


def _exaone_moe(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """EXAONE of experts, whose layers without a window have no rotary embedding."""
    windows = _windows(found, 4)
    return {"qk_norm": "head", **windows, "nope_layers": _without_window(found, windows)}


def _plain(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {}


def _qwen3(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"qk_norm": "head"}


def _olmo2(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has windows. Rotary frequencies are not scaled in the layers that have them."""
    fields = {"norms": "post", "qk_norm": "projection", **_windows(found, 4)}
    return fields | {"window_rope_theta": found.rope_theta if found.window else 0.0}


def _phi3(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {"fused": True, "window": found.window or 0}


def _gemma(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """The fields of every Gemma: converters have added 1 to the gains of norms."""
    return {"activation": "gelu_tanh", "embed_scale": found.width**0.5}


def _scaled_gemma(found: GGUFMetadata, names: Tensors, largest: int) -> dict[str, Any]:
    """The fields of Gemma 2 and 3."""
    head_dim = found.head_dim or found.width // found.heads
    if found.layers == largest:  # the 27B models, as in llama.cpp: query_pre_attn_scalar is not in the file
        head_dim = found.width // found.heads
    return {
        **_gemma(found, names),
        "norms": "sandwich",
        "attention_scale": head_dim**-0.5,
        "logit_cap": found.logit_cap or 0.0,
    }


def _gemma2(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    if found.window is None:
        found = msgspec.structs.replace(found, window=4096)  # llama.cpp's default, as those of the caps
    caps = {"attention_cap": found.attention_cap or 50.0, "logit_cap": found.logit_cap or 30.0}
    return {**_scaled_gemma(found, names, 46), **_windows(found, 2), **caps}


def _gemma3(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    return {
        **_scaled_gemma(found, names, 62),
        **_windows(found, 6),
        "qk_norm": "head",
        "window_rope_theta": found.window_rope_theta,
    }


def _gemma4(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Gemma 4, whose layers with a sliding window have other heads than those without. Gains are stored as they are."""
    if found.head_dim is None or found.window_head_dim is None:
        raise QuantError(f"{WHERE} lacks 'gemma4.attention.key_length' or 'gemma4.attention.key_length_swa'")
    same = {"attention.value_length_swa": found.window_value_length, "rope.dimension_count_swa": found.window_rotary_dim}
    for key, size in same.items():
        refuse_unless(size or found.window_head_dim, (found.window_head_dim,), f"gemma4.{key}", WHERE)
    windows, own = _windows(found, 6), found.layers - found.shared_layers
    with_window = windows.get("window_layers")
    if not with_window or own < 1:
        raise UnsupportedError(f"{WHERE} is not of layers with and without a sliding window, keys and values of their own")
    without = [i for i in range(found.layers) if i not in with_window]
    kv_heads = _by_layer(found.kv_heads, found.layers, "gemma4.attention.head_count_kv")
    hidden = _by_layer(found.hidden, found.layers, "gemma4.feed_forward_length")
    sizes = ([kv_heads[i] for i in with_window], [kv_heads[i] for i in without], hidden[:own], hidden[own:] or hidden[:own])
    if any(len(set(one)) > 1 for one in sizes):
        raise UnsupportedError(f"{WHERE} has heads or feed-forward blocks of other sizes in layers of one kind")
    window_heads, full_heads, of_own, of_shared = (one[0] for one in sizes)
    keys_are_values = not any(f"blk.{i}.attn_v.weight" in names for i in without)
    full = FullAttention(full_heads, found.head_dim, keys_are_values)
    alike = full == FullAttention(window_heads, found.window_head_dim)
    shared = SharedKeys(found.shared_layers, 0 if of_shared == of_own else of_shared) if found.shared_layers else None
    return {
        **_gemma(found, names),
        **windows,
        "window_rope_theta": found.window_rope_theta,
        "rope_scaling": _of_pairs(_scaling("gemma4", found, names)),
        "head_dim": found.window_head_dim,
        "kv_heads": window_heads,
        "hidden": of_own,
        "full": None if alike else full,
        "shared_keys": shared,
        "per_layer": PerLayerInputs(found.rows, found.input_width) if found.input_width else None,
        "norms": "sandwich",
        "attention_scale": 1.0,
        "qk_norm": "head",
        "value_norm": True,
        "layer_scale": "blk.0.layer_output_scale.weight" in names,
        "logit_cap": 30.0 if found.logit_cap is None else found.logit_cap,  # llama.cpp's default
    }


_NO_ROTATION = 1e29
"""The least factor of a frequency that turns rotary embedding off; llama.cpp's converter writes 1e30."""


def _of_pairs(scaling: RopeScaling | None) -> RopeScaling | None:
    """The scaling of factors by which the first pairs of coordinates rotate alike and the others do not."""
    if not isinstance(scaling, LongRope):
        return scaling
    pairs, factor = sum(one < _NO_ROTATION for one in scaling.long), scaling.long[0]
    if scaling.long[:pairs] != (factor,) * pairs:
        return scaling
    if pairs < len(scaling.long):
        return Proportional(pairs, factor)
    return None if factor == 1 else Linear(factor)


def _of_all_layers(sizes: int | list[int], key: str) -> int:
    """The size of every layer; the file may list it for each."""
    if isinstance(sizes, int):
        return sizes
    refuse_unless(len(set(sizes)), (1,), f"number of different {key}", WHERE)
    return sizes[0]


def _by_layer(sizes: int | list[int] | None, layers: int, key: str) -> list[int]:
    """The size of each layer; the file may have one for all."""
    if sizes is None:
        raise QuantError(f"{WHERE} lacks the field {key!r}")
    sizes = [sizes] * layers if isinstance(sizes, int) else sizes
    if len(sizes) != layers:
        raise QuantError(f"{WHERE} has {key} of {len(sizes)} layers; expected {layers}")
    return sizes


def _gpt_oss(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    if found.window is None:
        raise QuantError(f"{WHERE} lacks the field 'gpt-oss.attention.sliding_window'")
    return {"sinks": True, "activation": "clamped_swiglu", **_windows(found, 2)}


def _deepseek2(found: GGUFMetadata, names: Tensors) -> dict[str, Any]:
    """Latent attention. Files since April 2025 have `kv_b` in two parts, and the sizes of heads in keys of their own."""
    if found.rank is None or found.rotary_dim is None:
        missing = "attention.kv_lora_rank" if found.rank is None else "rope.dimension_count"
        raise QuantError(f"{WHERE} lacks the field 'deepseek2.{missing}'")
    refuse_unless(found.temperature_scale, (0.0,), "deepseek2.attention.temperature_scale", WHERE)
    split = found.split_key_length is not None
    head_dim, value_dim = found.split_key_length or found.head_dim, found.split_value_length or found.value_length
    if head_dim is None or value_dim is None:
        raise QuantError(f"{WHERE} lacks the lengths of keys or values, 'deepseek2.attention.key_length' and 'value_length'")
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
        raise UnsupportedError(f"{WHERE} has deepseek2.rope.scaling.type = 'yarn', but no 'yarn_log_multiplier'")
    gain = yarn_gain(found.scaling_factor or found.old_scaling_factor or 1.0, all_dims)
    return fields | {"attention_scale": head_dim**-0.5 * gain**2}


def _hybrid(found: GGUFMetadata, names: Tensors, architecture: str) -> dict[str, Any]:
    """Qwen3-Next and Qwen3.5: linear attention in all but every n-th layer, and a gate in the others. The 1 of gains is added."""
    keys, values, key_dim, value_dim, kernel = _state_sizes(found, architecture)
    layers = tuple(i for i in range(found.layers) if (i + 1) % found.interval)
    linear = None
    if layers:
        layout = "gguf" if architecture == "qwen3next" else "gguf_tiled"
        linear = LinearAttention(layers, keys, values, key_dim, value_dim, kernel, layout)
    return {"qk_norm": "head", "attention_gate": True, "linear": linear}


def _state_sizes(found: GGUFMetadata, architecture: str) -> tuple[int, int, int, int, int]:
    """The sizes of layers with a state: groups, heads, the widths of a state and of a head, and the length of the convolution."""
    sizes = {
        name: getattr(found, name) for name in ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
    }
    for name, size in sizes.items():
        if size is None:
            raise QuantError(f"{WHERE} lacks the field '{architecture}.{KEYS[name]}'")
    groups, heads, state_dim, inner, kernel = sizes.values()
    if inner % heads:
        raise QuantError(f"{WHERE} has {architecture}.ssm.inner_size = {inner}, which {heads} heads do not divide")
    return groups, heads, state_dim, inner // heads, kernel


def _windows(found: GGUFMetadata, period: int) -> dict[str, Any]:
    """The layers with the sliding window: those of the file's pattern, or all but each `period`-th."""
    if not found.window:
        return {}
    pattern = found.window_pattern or period
    if isinstance(pattern, int):
        pattern = [bool((i + 1) % pattern) for i in range(found.layers)]
    if len(pattern) != found.layers:
        raise QuantError(f"{WHERE} has a 'sliding_window_pattern' of {len(pattern)} layers; expected {found.layers}")
    layers = tuple(i for i, has_window in enumerate(pattern) if has_window)
    if not layers:
        return {}
    return {"window": found.window, "window_layers": layers if len(layers) < found.layers else ()}


ARCHITECTURES: dict[str, Callable[[GGUFMetadata, Tensors], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "qwen2moe": _plain,
    "qwen3moe": _qwen3,
    **{name: functools.partial(_hybrid, architecture=name) for name in ("qwen3next", "qwen35", "qwen35moe")},
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "olmoe": _projection_norms,
    "seed_oss": _plain,
    "exaone4": _exaone4,
    "ernie4_5": _llama,
    "ernie4_5-moe": _llama,
    "hunyuan-dense": _hunyuan,
    "hunyuan-moe": _hunyuan,
    "exaone-moe": _exaone_moe,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "dots1": _qwen3,
    "minimax-m2": _projection_norms,
    "smollm3": _smollm3,
    "llama4": _llama4,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "granitehybrid": _granite_hybrid,
    **{name: functools.partial(_nemotron_h, architecture=name) for name in ("nemotron_h", "nemotron_h_moe")},
    "lfm2": _lfm2,
    "lfm2moe": functools.partial(_lfm2, architecture="lfm2moe"),
    "arcee": _arcee,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "starcoder2": functools.partial(_layer_norms, activation="gelu_tanh"),
    "stablelm": functools.partial(_layer_norms, gated=True),
    "jais2": functools.partial(_layer_norms, activation="relu2"),
    "nemotron": functools.partial(_layer_norms, activation="relu2"),
    "phi2": functools.partial(_layer_norms, activation="gelu_tanh"),
    "gpt2": _gpt2,
    "gptneox": _gptneox,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
"""For each architecture the fields that differ from Llama's."""

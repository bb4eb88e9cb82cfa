"""StarCoder2, StableLM, Nemotron, Command R: relatives of Llama with LayerNorms."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ..._json import Count, Positive
from ..config import DecoderConfig
from .family import (
    Common,
    Family,
    Number,
    Windowed,
    decoder_config,
    every_nth_full,
    hf_table,
    read_config,
    refuse_unless,
    window_fields,
)


class _StarCoder2(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=2)
    norm_eps: Number = msgspec.field(name="norm_epsilon", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="gelu_pytorch_tanh")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    bias: bool = msgspec.field(name="use_bias", default=True)


class _StableLM(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    qkv_bias: bool = msgspec.field(name="use_qkv_bias", default=False)
    has_norms: bool = msgspec.field(name="qk_layernorm", default=False)
    is_parallel: bool = msgspec.field(name="use_parallel_residual", default=False)
    rotary_part: Number | None = msgspec.field(name="rope_pct", default=None)


class _Nemotron(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="relu2")
    rotary_part: Number | None = msgspec.field(name="rope_percent", default=None)
    attention_bias: bool = False
    mlp_bias: bool = False


class _Cohere(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    logit_scale: Number = 0.0625
    attention_bias: bool = False
    has_norms: bool = msgspec.field(name="use_qk_norm", default=False)


class _Cohere2(_Cohere, kw_only=True):
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    layer_types: list[str] | None = None
    pattern: Positive = msgspec.field(name="sliding_window_pattern", default=4)
    use_embedding_sharing: bool = True
    use_gated_activation: bool = True
    use_parallel_block: bool = True
    position_embedding_type: str = "rope_gptj"
    rotary_pct: Number = 1.0


_UNREAD = (
    *("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
    *("mlp_type", "norm_type", "layer_norm_epsilon", "norm_eps", "rotary_scaling_factor"),
)
"""Keys of published configurations of StarCoder2 and StableLM that transformers does not read."""


def _starcoder2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _StarCoder2, names, _UNREAD)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), found.bias)
    return decoder_config(found, norm_kind="layer", norm_bias=True, gated=False, window=found.window or 0, **biases)


def _stablelm(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _StableLM, names, _UNREAD)
    refuse_unless(found.has_norms, (False,), "qk_layernorm")
    found.partial_rotary = found.partial_rotary or 0.25
    refuse_unless(found.rotary_part, (None, found.partial_rotary), "rope_pct")  # which transformers does not read
    parallel = "one_norm" if found.is_parallel else "none"
    return decoder_config(
        found, rotates_part=True, norm_kind="layer", norm_bias=True, qkv_bias=found.qkv_bias, parallel=parallel
    )


def _nemotron(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Nemotron 3 and 4, and Minitron. The gains of its norms are stored less 1."""
    found = read_config(obj, _Nemotron, names)
    found.partial_rotary = found.partial_rotary or 0.5
    refuse_unless(found.rotary_part, (None, found.partial_rotary), "rope_percent")  # which transformers does not read
    biases = {"qkv_bias": found.attention_bias, "o_bias": found.attention_bias, "mlp_bias": found.mlp_bias}
    return decoder_config(
        found, rotates_part=True, norm_kind="layer", norm_bias=True, norm_offset=1.0, gated=False, **biases
    )


def _cohere(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Cohere, names)
    return decoder_config(found, theta=500_000.0, **_shared_fields(found))


def _cohere2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Command R7B and A, whose layers without a window have no rotary embedding."""
    found = read_config(obj, _Cohere2, names, ("use_parallel_embedding", "order_of_interleaved_layers", "layer_switch"))
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        refuse_unless(getattr(found, key), (True,), key)
    refuse_unless(found.position_embedding_type, ("rope_gptj",), "position_embedding_type")
    refuse_unless(found.rotary_pct, (1.0,), "rotary_pct")
    kinds = found.layer_types or every_nth_full(found.layers, found.pattern)
    nope = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return decoder_config(found, **_shared_fields(found), **window_fields(kinds, found.window), nope_layers=nope)


def _shared_fields(found: _Cohere) -> dict[str, Any]:
    """The fields of Cohere's parallel blocks."""
    refuse_unless(found.has_norms, (False,), "use_qk_norm")
    return {
        "rope": "interleaved",
        "norm_kind": "layer",
        "parallel": "one_norm",
        "logit_scale": found.logit_scale,
        "qkv_bias": found.attention_bias,
        "o_bias": found.attention_bias,
    }


_STARCODER2 = {
    "mlp/up": "mlp.c_fc.weight",
    "mlp/down": "mlp.c_proj.weight",
    "mlp/up_bias": "mlp.c_fc.bias",
    "mlp/down_bias": "mlp.c_proj.bias",
}

FAMILIES = (
    Family("starcoder2", "StarCoder2", _starcoder2, hf_table(_STARCODER2), gguf="starcoder2"),
    Family("stablelm", "StableLM", _stablelm, gguf="stablelm"),
    Family("nemotron", "Nemotron, Minitron", _nemotron, gguf="nemotron"),
    Family("cohere", "Command R", _cohere, gguf="command-r"),
    Family("cohere2", "Command R7B, A", _cohere2, gguf="cohere2"),
)

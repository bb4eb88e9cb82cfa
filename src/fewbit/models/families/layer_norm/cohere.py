"""Command R and Cohere 2: attention and feed-forward block side by side."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, every_nth_full, read_config, refuse_unless, window_fields


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


FAMILIES = (
    Family("cohere", "Command R", _cohere, gguf="command-r"),
    Family("cohere2", "Command R7B, A", _cohere2, gguf="cohere2"),
)

"""SmolLM3: layers without rotary embedding."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Positive
from ...config import DecoderConfig
from ..family import Family, Windowed, decoder_config, read_config, window_fields


class _SmolLM3(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=4)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    attention_bias: bool = False
    mlp_bias: bool = False
    use_window: bool = msgspec.field(name="use_sliding_window", default=False)
    rotates: list[int] | None = msgspec.field(name="no_rope_layers", default=None)
    interval: Positive = msgspec.field(name="no_rope_layer_interval", default=4)
    max_window_layers: int | None = None


def _smollm3(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _SmolLM3, names)
    rotates = found.rotates or [int((i + 1) % found.interval != 0) for i in range(found.layers)]
    nope = tuple(i for i, rotated in enumerate(rotates[: found.layers]) if not rotated)
    windows: dict[str, Any] = {}
    if found.use_window and found.window:
        of_layers = ["full_attention" if rotated else "sliding_attention" for rotated in rotates[: found.layers]]
        windows = window_fields(found.layer_types or of_layers, found.window)
    bias = found.attention_bias
    return decoder_config(
        found,
        theta=2_000_000.0,
        nope_layers=nope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=found.mlp_bias,
        **windows,
    )


FAMILIES = (Family("smollm3", "SmolLM3", _smollm3, gguf="smollm3", permutes=True),)

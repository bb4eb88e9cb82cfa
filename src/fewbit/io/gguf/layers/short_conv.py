"""Short convolutions of LFM2 in GGUF files.

A layer without heads of keys is one, and its convolution is stored as `[C, K]`.

Reference: llama.cpp, conversion/lfm2.py and src/models/lfm2.cpp (2026).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...._hybrids import LFM2, layers_with_state, lfm2_hidden, lfm2_layer_types
from ...._json import Count, Positive, converted
from ..fields import Field


def layer_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of short convolutions, of attention and of the feed-forward block, by their keys after the architecture.

    Args:
        config: the content of config.json, with the defaults of the family.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for layers that llama.cpp does not run.
    """
    found = converted(config, _Lfm2, "config.json")
    kinds = lfm2_layer_types(found.kinds, found.attention, found.layers)
    convolutions = layers_with_state(kinds, found.layers, LFM2)
    return {
        "feed_forward_length": lfm2_hidden(
            found.hidden_before or found.hidden,
            is_adjusted=found.is_adjusted,
            factor=found.factor,
            multiple=found.multiple,
        ),
        "attention.head_count_kv": [0 if i in convolutions else found.kv_heads for i in range(found.layers)],
        "shortconv.l_cache": found.kernel,
    }


class _Lfm2(msgspec.Struct, kw_only=True):
    """The JSON schema of what is read of config.json."""

    layers: Positive = msgspec.field(name="num_hidden_layers")
    kv_heads: Positive = msgspec.field(name="num_key_value_heads")
    hidden: Positive = msgspec.field(name="intermediate_size")
    hidden_before: Positive | None = msgspec.field(name="block_ff_dim", default=None)
    is_adjusted: bool = msgspec.field(name="block_auto_adjust_ff_dim")
    factor: float | None = msgspec.field(name="block_ffn_dim_multiplier")
    multiple: Positive = msgspec.field(name="block_multiple_of")
    kernel: Positive = msgspec.field(name="conv_L_cache")
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    attention: list[Count] | None = msgspec.field(name="full_attn_idxs", default=None)

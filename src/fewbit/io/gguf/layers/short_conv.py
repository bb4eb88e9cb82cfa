"""Short convolutions of LFM2 in GGUF files.

A layer without heads of keys is one, and its convolution is stored as `[C, K]`.

Reference: llama.cpp, conversion/lfm2.py and src/models/lfm2.cpp (2026).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive, converted
from ....errors import QuantError, UnsupportedError
from ..fields import Field


def with_common_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, with the keys that other families have for the same.

    The width of the feed-forward block is two thirds of what is given, times a factor, rounded up.

    Args:
        config: the content of config.json, with the defaults of the family.

    Raises:
        QuantError: for a value that is missing or of another type.
    """
    found = converted(config, _Lfm2, "config.json")
    hidden = found.hidden_before or found.hidden
    if found.is_adjusted:
        hidden = int(2 * hidden / 3)
        if found.factor is not None:
            hidden = -(-int(found.factor * hidden) // found.multiple) * found.multiple
    tied = found.tied if found.tied_before is None else found.tied_before
    return {**config, "intermediate_size": hidden, "rms_norm_eps": found.norm_eps, "tie_word_embeddings": tied}


def layer_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    """The fields of short convolutions and of attention, by their keys after the architecture.

    Args:
        config: as for `with_common_keys`.

    Raises:
        QuantError: for a value that is missing or of another type.
        UnsupportedError: for layers that llama.cpp does not run.
    """
    found = converted(config, _Lfm2, "config.json")
    kinds = found.kinds
    if kinds is None:
        attention = range(found.layers) if found.attention is None else found.attention
        kinds = ["full_attention" if i in attention else "conv" for i in range(found.layers)]
    if unknown := [kind for kind in kinds if kind not in ("conv", "full_attention")]:
        raise UnsupportedError(f"llama.cpp has no layers of kind {unknown[0]!r} in lfm2")
    if len(kinds) != found.layers:
        raise QuantError(f"config.json has {len(kinds)} layer_types and num_hidden_layers {found.layers}")
    heads = [0 if kind == "conv" else found.kv_heads for kind in kinds]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": found.kernel}


class _Lfm2(msgspec.Struct, kw_only=True):
    """The JSON schema of what is read of config.json."""

    layers: Positive = msgspec.field(name="num_hidden_layers")
    kv_heads: Positive = msgspec.field(name="num_key_value_heads")
    norm_eps: float
    hidden: Positive = msgspec.field(name="intermediate_size")
    hidden_before: Positive | None = msgspec.field(name="block_ff_dim", default=None)
    is_adjusted: bool = msgspec.field(name="block_auto_adjust_ff_dim")
    factor: float | None = msgspec.field(name="block_ffn_dim_multiplier")
    multiple: Positive = msgspec.field(name="block_multiple_of")
    tied: bool = msgspec.field(name="tie_word_embeddings")
    tied_before: bool | None = msgspec.field(name="tie_embedding", default=None)
    kernel: Positive = msgspec.field(name="conv_L_cache")
    kinds: list[str] | None = msgspec.field(name="layer_types", default=None)
    attention: list[Count] | None = msgspec.field(name="full_attn_idxs", default=None)

"""Nemotron and Minitron: a squared ReLU without a gate."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, read_config, refuse_unless


class _Nemotron(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="relu2")
    rotary_part: Number | None = msgspec.field(name="rope_percent", default=None)
    attention_bias: bool = False
    mlp_bias: bool = False


def _nemotron(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Nemotron 3 and 4, and Minitron. The gains of its norms are stored less 1."""
    found = read_config(obj, _Nemotron, names)
    found.partial_rotary = found.partial_rotary or 0.5
    refuse_unless(found.rotary_part, (None, found.partial_rotary), "rope_percent")  # which transformers does not read
    biases = {"qkv_bias": found.attention_bias, "o_bias": found.attention_bias, "mlp_bias": found.mlp_bias}
    return decoder_config(
        found, rotates_part=True, norm_kind="layer", norm_bias=True, norm_offset=1.0, gated=False, **biases
    )


FAMILIES = (Family("nemotron", "Nemotron, Minitron", _nemotron, gguf="nemotron"),)

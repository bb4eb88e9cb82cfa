"""StableLM: a part of each head is rotated, and blocks may be parallel."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...config import DecoderConfig
from ..family import Common, Family, Number, decoder_config, read_config, refuse_unless


class _StableLM(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    qkv_bias: bool = msgspec.field(name="use_qkv_bias", default=False)
    has_norms: bool = msgspec.field(name="qk_layernorm", default=False)
    is_parallel: bool = msgspec.field(name="use_parallel_residual", default=False)
    rotary_part: Number | None = msgspec.field(name="rope_pct", default=None)


_UNREAD = ("norm_eps", "rotary_scaling_factor")
"""Keys of published configurations that transformers does not read."""


def _stablelm(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _StableLM, names, _UNREAD)
    refuse_unless(found.has_norms, (False,), "qk_layernorm")
    found.partial_rotary = found.partial_rotary or 0.25
    refuse_unless(found.rotary_part, (None, found.partial_rotary), "rope_pct")  # which transformers does not read
    parallel = "one_norm" if found.is_parallel else "none"
    return decoder_config(
        found, rotates_part=True, norm_kind="layer", norm_bias=True, qkv_bias=found.qkv_bias, parallel=parallel
    )


FAMILIES = (Family("stablelm", "StableLM", _stablelm, gguf="stablelm"),)

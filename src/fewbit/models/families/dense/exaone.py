"""EXAONE 4: norms on the outputs of blocks, and layers without rotary embedding."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import QuantError
from ...config import DecoderConfig
from ..family import (
    OUTPUT_NORMS,
    Family,
    Number,
    Windowed,
    decoder_config,
    every_nth_full,
    hf_table,
    read_config,
    window_fields,
)


class _Exaone(Windowed, kw_only=True):
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=32)
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-5)
    window: Count | None = msgspec.field(name="sliding_window", default=4096)
    pattern: Count | str | None = msgspec.field(name="sliding_window_pattern", default=4)


def _exaone(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Exaone, names)
    if not found.window:
        return decoder_config(found, norms="post", qk_norm="head")
    kinds = found.layer_types or _layer_types(found)
    nope = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return decoder_config(found, norms="post", qk_norm="head", nope_layers=nope, **window_fields(kinds, found.window))


def _layer_types(found: _Exaone) -> list[str]:
    """The kinds of the layers by `sliding_window_pattern`.

    It is `n`, every n-th layer attends to all positions, or letters that repeat, "LLLG" (local, global).
    """
    if isinstance(found.pattern, int) and found.pattern:
        return every_nth_full(found.layers, found.pattern)
    if not isinstance(found.pattern, str) or not found.pattern or set(found.pattern) - set("LG"):
        raise QuantError(
            f"config.json has sliding_window_pattern = {found.pattern!r}; expected a number of layers, or letters L and G"
        )
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    repeated = [kinds[found.pattern[i % len(found.pattern)]] for i in range(found.layers)]
    return [*repeated[:-1], "full_attention"]


FAMILIES = (Family("exaone4", "EXAONE 4", _exaone, hf_table(OUTPUT_NORMS), gguf="exaone4"),)

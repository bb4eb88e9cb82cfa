"""The configuration and the names of a glassllm `.npz`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..._json import Positive, converted
from ..config import DecoderConfig
from .family import Number, table


def config_from_glassllm(obj: Mapping[str, Any]) -> DecoderConfig:
    """Reads the `__config__` object of a glassllm `.npz`.

    Args:
        obj: the JSON object.

    Returns:
        The configuration.

    Raises:
        QuantError: for a missing key.
    """
    found = converted(obj, _Glassllm, "__config__")
    return DecoderConfig(
        **msgspec.structs.asdict(found),
        head_dim=found.width // found.heads,
        hidden=8 * found.width // 3,
        rope="interleaved",
        tied=True,
    )


class _Glassllm(msgspec.Struct):
    vocab: Positive = msgspec.field(name="vocab_size")
    layers: Positive = msgspec.field(name="n_layers")
    width: Positive = msgspec.field(name="d_model")
    heads: Positive = msgspec.field(name="n_heads")
    kv_heads: Positive = msgspec.field(name="n_kv_heads")
    context: Positive = msgspec.field(name="max_len")
    norm_eps: Number = msgspec.field(name="eps")
    rope_theta: Number = msgspec.field(name="rope_base")


_GLASSLLM_MATRICES = {
    **{f"attn/{name}": f"attn.W_{name.upper()}" for name in ("q", "k", "v", "o")},
    **{f"mlp/{name}": f"ffn.{theirs}" for name, theirs in (("gate", "W1"), ("up", "W3"), ("down", "W2"))},
}
GLASSLLM = table(
    "glassllm",
    {"embed": "E", "norm": "norm_f.gamma"},
    "blocks.{}.",
    {"attn/norm": "norm1.gamma", "mlp/norm": "norm2.gamma", **_GLASSLLM_MATRICES},
    transposed=frozenset(f"layers/{{}}/{part}" for part in _GLASSLLM_MATRICES),
    derived="__config__",
)
"""The names of a glassllm `.npz`: weights are `[in, out]`, rotary embedding is "interleaved"."""

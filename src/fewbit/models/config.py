"""The configuration of a Llama model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .._json import Positive, checked, form_of
from ..errors import QuantError

RopeLayout = Literal["interleaved", "half"]
"""The pairs of coordinates that rotate: `2i` and `2i + 1` (GGUF), or `i` and `i + head_dim / 2` (Hugging Face)."""


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A Llama decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

    Attributes:
        vocab: vocabulary size (V).
        layers: number of layers (L).
        width: width of the residual stream (D).
        heads: query heads (H).
        kv_heads: key and value heads (K); divides `heads`.
        head_dim: width of a head (h), even.
        hidden: width of the feed-forward block (F).
        norm_eps: added to the mean square before its root.
        rope_theta: base of the rotary frequencies, `rope_theta ** (-2 i / head_dim)`.
        rope: the layout of the rotary pairs, which depends on the weights' container.
        tied: whether the embedding is also the output head.
        context: the max sequence length, in tokens.

    Raises:
        QuantError: when a number is not positive, or `kv_heads` or `head_dim` does not divide as it must.

    >>> LlamaConfig(vocab=64, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24).group
    2
    """

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope: RopeLayout = "half"
    tied: bool = True
    context: int = 2048

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
                raise QuantError(f"{name} is {value!r}, must be a positive whole number below 2**40")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise QuantError(f"{name} is {value!r}, must be a positive number")
        if not isinstance(self.tied, bool):
            raise QuantError(f"tied is {self.tied!r}, must be true or false")
        if self.rope not in get_args(RopeLayout):
            raise QuantError(f"rope is {self.rope!r}, must be one of {', '.join(get_args(RopeLayout))}")
        if self.heads % self.kv_heads:
            raise QuantError(f"kv_heads is {self.kv_heads}, must divide heads, which is {self.heads}")
        if self.head_dim % 2:
            raise QuantError(f"head_dim is {self.head_dim}, must be even: rotary embedding rotates pairs of coordinates")

    @property
    def group(self) -> int:
        """The query heads per key head (G)."""
        return self.heads // self.kv_heads

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> "LlamaConfig":
        """Reads the JSON object of `to_json`.

        Raises:
            QuantError: for an unknown or missing field.
        """
        return cls(**checked(obj, _CONFIG, "a Llama configuration"))


_SIZES = ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "hidden", "context")
_CONFIG = form_of(LlamaConfig, **dict.fromkeys(_SIZES, Positive))

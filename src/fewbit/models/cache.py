"""The keys and values of the tokens that a decoder has already read."""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from ..kvcache import Block, KVPolicy, QuantizedCache, empty_quantized_cache, seen_positions
from .config import LlamaConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Room for `S` positions in every layer, of which the first `length` are filled. A frozen pytree.

    Attributes:
        keys: after the rotary turn.
        values: as projected.
        length: how many positions are filled, for every row of the batch alike.
    """

    keys: Float[Array, "L B K S h"]
    values: Float[Array, "L B K S h"]
    length: Int[Array, ""]

    @property
    def room(self) -> int:
        """The positions that there is room for (S)."""
        return self.keys.shape[-2]

    @property
    def nbytes(self) -> int:
        """The bytes that keys and values take."""
        return sum(a.size * a.dtype.itemsize for a in (self.keys, self.values))

    def written(
        self, layer: Int[Array, ""] | int, keys: Float[Array, "B K T h"], values: Float[Array, "B K T h"]
    ) -> "Cache":
        """The cache with the keys and values of one layer's new tokens after those that it holds; `length` stays."""
        zero = jnp.int32(0)
        start = (jnp.int32(layer), zero, zero, self.length, zero)
        return dataclasses.replace(
            self,
            keys=lax.dynamic_update_slice(self.keys, keys[None], start),
            values=lax.dynamic_update_slice(self.values, values[None], start),
        )

    def advanced(self, count: int) -> "Cache":
        """The cache with `count` more positions filled: what every layer has written."""
        return dataclasses.replace(self, length=self.length + count)

    def blocks(
        self, layer: Int[Array, ""] | int, keys: Float[Array, "B K T h"], values: Float[Array, "B K T h"]
    ) -> tuple[Block, ...]:
        """What new tokens attend to, after `written` and before `advanced`: the cache, which holds them."""
        return (Block(self.keys, self.values, seen_positions(self.length, keys.shape[-2]), layer),)


AnyCache: TypeAlias = Cache | QuantizedCache
"""A cache that `prefill` and `decode_step` read and write: of floating numbers, or of few bits."""


def empty_cache(
    config: LlamaConfig, *, batch: int, room: int, dtype: DTypeLike = jnp.float32, kv: KVPolicy | None = None
) -> AnyCache:
    """A cache that holds nothing yet.

    Args:
        config: the network.
        batch: how many sequences (B).
        room: how many positions there is room for, at most `config.context` (S).
        dtype: what keys and values are kept in: the compute dtype of the network. Without `kv` only.
        kv: how keys and values are kept in few bits; None keeps them in `dtype`.

    Returns:
        The cache.

    Raises:
        QuantError: when `room` is not between 1 and the context, or `batch` not positive.
    """
    if not 1 <= room <= config.context:
        raise QuantError(f"room is {room} positions, must be from 1 to the context of the model, {config.context}")
    if batch < 1:
        raise QuantError(f"batch is {batch}, must be at least 1")
    if kv is not None:
        sizes = {"layers": config.layers, "heads": config.kv_heads, "head_dim": config.head_dim}
        return empty_quantized_cache(kv, batch=batch, room=room, **sizes)
    shape = (config.layers, batch, config.kv_heads, room, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))

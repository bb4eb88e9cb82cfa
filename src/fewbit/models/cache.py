"""The keys and values of the tokens that a decoder has already read."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
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

    def layer(self, layer: Int[Array, ""] | int) -> tuple[Float[Array, "B K S h"], Float[Array, "B K S h"]]:
        """The keys and values of one layer, all positions of it."""
        index = jnp.int32(layer)
        return (
            lax.dynamic_index_in_dim(self.keys, index, keepdims=False),
            lax.dynamic_index_in_dim(self.values, index, keepdims=False),
        )


def empty_cache(config: LlamaConfig, *, batch: int, room: int, dtype: DTypeLike = jnp.float32) -> Cache:
    """A cache that holds nothing yet.

    Args:
        config: the network.
        batch: how many sequences (B).
        room: how many positions there is room for, at most `config.context` (S).
        dtype: what keys and values are kept in: the compute dtype of the network.

    Returns:
        The cache.

    Raises:
        QuantError: when `room` is not between 1 and the context, or `batch` not positive.
    """
    if not 1 <= room <= config.context:
        raise QuantError(f"room is {room} positions, must be from 1 to the context of the model, {config.context}")
    if batch < 1:
        raise QuantError(f"batch is {batch}, must be at least 1")
    shape = (config.layers, batch, config.kv_heads, room, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))

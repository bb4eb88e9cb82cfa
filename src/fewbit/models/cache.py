"""The KV cache of a decoder: float, and with the states of linear attention."""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from ..kernels.attention.problem import Block, seen_positions, window_start
from ..kvcache.cache import QuantizedCache, empty_quantized_cache
from ..kvcache.policy import KVPolicy
from .attention.linear import LinearState, empty_state
from .config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """A KV cache of max length S, filled up to `length`. A frozen pytree.

    Attributes:
        keys: after rotary embedding.
        values: as projected; None: the keys are the values too (latent attention).
        length: the number of filled positions, the same for every row of the batch.
    """

    keys: Float[Array, "L B K S h"]
    values: Float[Array, "L B K S h"] | None
    length: Int[Array, ""]

    @property
    def max_length(self) -> int:
        """The number of positions (S)."""
        return self.keys.shape[-2]

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return sum(a.size * a.dtype.itemsize for a in (self.keys, self.values) if a is not None)

    def written(
        self, layer: Int[Array, ""] | int, keys: Float[Array, "B K T h"], values: Float[Array, "B K T h"]
    ) -> "Cache":
        """Writes one layer's new keys and values at `length`, which does not change."""
        zero = jnp.int32(0)
        start = (jnp.int32(layer), zero, zero, self.length, zero)
        written = dataclasses.replace(self, keys=lax.dynamic_update_slice(self.keys, keys[None], start))
        if self.values is None:
            return written
        return dataclasses.replace(written, values=lax.dynamic_update_slice(self.values, values[None], start))

    def advanced(self, count: Int[Array, ""] | int) -> "Cache":
        """Increases `length` by `count`, after every layer has written its tokens."""
        return dataclasses.replace(self, length=self.length + count)

    def blocks(
        self,
        layer: Int[Array, ""] | int,
        keys: Float[Array, "B K T h"],
        values: Float[Array, "B K T h"],
        window: Int[Array, ""] | int = 0,
    ) -> tuple[Block, ...]:
        """The blocks that new tokens attend to, between `written` and `advanced`.

        With `window` 0 these are all positions.
        """
        seen = seen_positions(self.length, keys.shape[-2])
        cached_values = self.keys if self.values is None else self.values
        return (Block(self.keys, cached_values, seen, layer, window_start(seen, window)),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    """The KV cache of the layers with softmax attention, and the states of those with linear attention. A frozen pytree.

    Attributes:
        kv: keys and values; layers are numbered by `DecoderConfig.place_of`.
        states: one for each layer with linear attention, in order: as arrays of their own each is replaced in place, where XLA would
            copy a stack of all for each layer.
    """

    kv: Cache | QuantizedCache
    states: tuple[LinearState, ...]

    @property
    def length(self) -> Int[Array, ""]:
        """The number of filled positions."""
        return self.kv.length

    @property
    def max_length(self) -> int:
        """The number of positions (S)."""
        return self.kv.max_length

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and states."""
        return self.kv.nbytes + sum(array.nbytes for array in jax.tree.leaves(self.states))

    def advanced(self, count: Int[Array, ""] | int) -> "HybridCache":
        """Increases `length` by `count`, after every layer has written its tokens."""
        return dataclasses.replace(self, kv=self.kv.advanced(count))


AnyCache: TypeAlias = Cache | QuantizedCache | HybridCache
"""A KV cache for `prefill` and `decode_step`: float or quantized, and with the states of linear attention."""


def kv_of(cache: AnyCache) -> Cache | QuantizedCache:
    """The keys and values of a cache."""
    return cache.kv if isinstance(cache, HybridCache) else cache


def empty_cache(
    config: DecoderConfig, *, batch: int, max_length: int, dtype: DTypeLike = jnp.float32, kv: KVPolicy | None = None
) -> AnyCache:
    """An empty KV cache.

    Args:
        config: the configuration.
        batch: the number of sequences (B).
        max_length: the number of positions (S), at most `config.context`.
        dtype: the compute dtype of the model: that of keys and values without `kv`, and of the inputs of convolutions.
        kv: how keys and values are quantized; None keeps them in `dtype`.

    Returns:
        The cache.

    Raises:
        QuantError: when `max_length` is not between 1 and the context, or `batch` not positive.
    """
    if not 1 <= max_length <= config.context:
        raise QuantError(f"max_length is {max_length}, must be from 1 to the context of the model, {config.context}")
    if batch < 1:
        raise QuantError(f"batch is {batch}, must be at least 1")
    if kv is not None:
        sizes = {"layers": config.cached_layers, "heads": config.cached_heads, "head_dim": config.cached_dim}
        cache: Cache | QuantizedCache = empty_quantized_cache(kv, batch=batch, max_length=max_length, **sizes)
    else:
        shape = (config.cached_layers, batch, config.cached_heads, max_length, config.cached_dim)
        values = jnp.zeros(shape, dtype) if config.latent is None else None
        cache = Cache(jnp.zeros(shape, dtype), values, jnp.int32(0))
    if config.linear is None:
        return cache
    return HybridCache(cache, tuple(empty_state(config.linear, batch=batch, dtype=dtype) for _ in config.linear.layers))

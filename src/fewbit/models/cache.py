"""The KV cache of a decoder, float or hybrid."""

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
        *,
        is_chunk: bool = False,
    ) -> tuple[Block, ...]:
        """The blocks that new tokens attend to, between `written` and `advanced`.

        With `window` 0 these are all positions; `is_chunk` is as for `window_start`.
        """
        seen = seen_positions(self.length, keys.shape[-2])
        cached_values = self.keys if self.values is None else self.values
        return (Block(self.keys, cached_values, seen, layer, window_start(seen, window, is_chunk=is_chunk)),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    """The cache of a decoder whose layers have different kinds of attention. A frozen pytree.

    Attributes:
        kv: keys and values of softmax attention; layers are numbered by `DecoderConfig.place_of`.
        states: one for each layer that has a state, in order: as arrays of their own each is replaced in place, where XLA would
            copy a stack of all for each layer.
        full: keys and values of the layers without a sliding window, where their heads are others (`DecoderConfig.full`); None: they
            are in `kv`.
    """

    kv: Cache | QuantizedCache
    states: tuple[LinearState, ...]
    full: Cache | QuantizedCache | None = None

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
        return sum(part.nbytes for part in kvs_of(self)) + sum(array.nbytes for array in jax.tree.leaves(self.states))

    def advanced(self, count: Int[Array, ""] | int) -> "HybridCache":
        """Increases `length` by `count`, after every layer has written its tokens."""
        full = None if self.full is None else self.full.advanced(count)
        return dataclasses.replace(self, kv=self.kv.advanced(count), full=full)


AnyCache: TypeAlias = Cache | QuantizedCache | HybridCache
"""A KV cache for `prefill` and `decode_step`: float or quantized, and of layers of different kinds."""


def kvs_of(cache: AnyCache) -> tuple[Cache | QuantizedCache, ...]:
    """The keys and values of a cache, for each of `DecoderConfig.kinds`."""
    if not isinstance(cache, HybridCache):
        return (cache,)
    return (cache.kv,) if cache.full is None else (cache.kv, cache.full)


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

    def of_kind(number: int, kind: DecoderConfig) -> Cache | QuantizedCache:
        layers, heads, head_dim = config.cached_layers(number), kind.cached_heads, kind.cached_dim
        if kv is not None:
            sizes = {"layers": layers, "heads": heads, "head_dim": head_dim}
            return empty_quantized_cache(kv, batch=batch, max_length=max_length, **sizes)
        shape = (layers, batch, heads, max_length, head_dim)
        values = jnp.zeros(shape, dtype) if config.latent is None else None
        return Cache(jnp.zeros(shape, dtype), values, jnp.int32(0))

    caches = [of_kind(number, kind) for number, kind in enumerate(config.kinds)]
    part = config.recurrent
    if part is None and config.full is None:
        return caches[0]
    states = () if part is None else tuple(empty_state(part, batch=batch, dtype=dtype) for _ in part.layers)
    return HybridCache(caches[0], states, *caches[1:])

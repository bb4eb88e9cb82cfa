"""Softmax attention of a decoder's layers: grouped-query or latent, full or in a window.

Dimension letters as in `decoder`.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ...kernels.attention.dispatch import attention
from ...kernels.attention.problem import QUERIES, Block, seen_positions, window_start
from ...kernels.quantize.dispatch import quantize
from ...kvcache.cache import QuantizedCache
from ...kvcache.policy import KVPolicy
from ..cache import AnyCache, Cache, kvs_of
from ..config import DecoderConfig
from ..layer import Params, queries, queries_keys_values
from .latent import absorbed_heads, absorbed_values, expanded_heads
from .rope import LayerRotations, Rotation

_Heads: TypeAlias = tuple[Float[Array, "B K T h"], Float[Array, "B K T h"]]


class KeysValues(NamedTuple):
    """The keys and values that pass from layer to layer, for each of `DecoderConfig.kinds`. A pytree.

    Attributes:
        caches: those of a KV cache; empty: there is none.
        last: the new ones of the last layer that has its own; empty: no layer shares them.
    """

    caches: tuple[Cache | QuantizedCache, ...]
    last: tuple[_Heads, ...]


class SoftmaxAttention:
    """Softmax attention of every layer, for T tokens."""

    def __init__(
        self,
        config: DecoderConfig,
        tokens: int,
        cache: AnyCache | None,
        kv: KVPolicy | None,
        length: Array | None,
    ):
        """Rotary tables, windows and places in the cache.

        Args:
            config: the configuration.
            tokens: how many tokens there are (T).
            cache: the KV cache; None: the tokens attend to each other alone.
            kv: quantizes keys and values where there is no cache; None: they stay float.
            length: how many of the tokens count, before padding; None: all.
        """
        start, longest = (0, tokens) if cache is None else (cache.length, max(cache.max_length, tokens))
        caches = () if cache is None else kvs_of(cache)
        self.config, self.kinds, self.tokens, self.kv = config, config.kinds, tokens, kv
        self.rotations = [LayerRotations(kind, start, tokens, longest, length) for kind in self.kinds]
        self.windows = [_Windows(kind) for kind in self.kinds]
        self.places = [config.place_of(layer) for layer in range(config.layers)]
        self.policy = caches[0].policy if caches and isinstance(caches[0], QuantizedCache) else kv
        self.is_absorbed = config.latent is not None and (config.latent.split or bool(caches) or kv is not None)

    def start(self, cache: AnyCache | None, batch: int, dtype: DTypeLike) -> KeysValues:
        """The keys and values before the first layer."""
        last: tuple[_Heads, ...] = ()
        if self.config.shared_keys is not None:
            zeros = [jnp.zeros((batch, k.kv_heads, self.tokens, k.head_dim), dtype) for k in self.kinds]
            last = tuple((array, array) for array in zeros)
        return KeysValues(() if cache is None else kvs_of(cache), last)

    def __call__(
        self, y: Float[Array, "B T D"], attn: Params, kvs: KeysValues, index: Array | int
    ) -> tuple[Float[Array, "B T w"], KeysValues]:
        """The values of all heads for normed tokens, and the keys and values with the tokens' own.

        Args:
            y: the tokens.
            attn: the parameters of attention, by whose shapes a layer has its kind.
            kvs: keys and values of the tokens before, and of the layers before.
            index: the number of the layer, which `lax.scan` traces.
        """
        kind = self._kind_of(attn)
        config, rotation = self.kinds[kind], self.rotations[kind].of_layer(index)
        window, place = self.windows[kind].of_layer(index), _of_layer(self.places, index)
        q, k, v, gate = self._heads(y, attn, rotation, config, kvs, kind)
        q = rotation.tempered(q)
        if self.config.shared_keys is not None:
            kvs = kvs._replace(last=_replaced(kvs.last, kind, (k, v)))
        if kvs.caches:
            cache = kvs.caches[kind]
            if self._has_keys(attn):
                cache = cache.written(place, k, v)
                kvs = kvs._replace(caches=_replaced(kvs.caches, kind, cache))
            blocks = cache.blocks(place, k, v, window, is_chunk=config.window_is_chunk)
        else:
            seen = seen_positions(0, self.tokens)
            if self.kv is not None:
                k, v = quantize(k, self.kv.keys), quantize(v, self.kv.values)
            blocks = (Block(k, v, seen, first=window_start(seen, window, is_chunk=config.window_is_chunk)),)
        if self.policy is not None and self.policy.int8_queries:
            q = quantize(q, QUERIES)
        mixed = attention(q, blocks, sinks=attn.get("sinks"), soft_cap=config.attention_cap)
        mixed = self._values(mixed, attn, config).swapaxes(1, 2).reshape(*y.shape[:2], -1)
        return mixed if gate is None else mixed * jax.nn.sigmoid(gate), kvs

    def _kind_of(self, attn: Params) -> int:
        """Which of `DecoderConfig.kinds` a layer has. A scan has layers of one kind alone, since their shapes differ."""
        if self.config.full is None:
            return 0
        return int(attn["o"].shape[-1] == self.config.heads * self.config.full.head_dim)

    def _has_keys(self, attn: Params) -> bool:
        """Whether a layer has keys and values of its own."""
        return self.config.shared_keys is None or "k" in attn or "q+k+v" in attn

    def _heads(
        self, y: Array, attn: Params, rotation: Rotation, config: DecoderConfig, kvs: KeysValues, kind: int
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys and values of normed tokens, as a KV cache has them or of every head; and the gate of the output."""
        if not self._has_keys(attn):
            return queries(y, attn, rotation, config), *kvs.last[kind], None
        if config.latent is None:
            return queries_keys_values(y, attn, rotation, config)
        if not self.is_absorbed:
            return *expanded_heads(y, attn, rotation, config, config.latent), None
        q, cached = absorbed_heads(y, attn, rotation, config, config.latent)
        return q, cached, cached, None

    def _values(self, mixed: Array, attn: Params, config: DecoderConfig) -> Array:
        """The values of every head from the result of attention."""
        if config.latent is None:
            return mixed
        if not self.is_absorbed:
            return mixed[..., : config.latent.value_dim]
        return absorbed_values(mixed, attn, config, config.latent)


def _replaced(parts: tuple[Any, ...], place: int, part: Any) -> tuple[Any, ...]:
    """The tuple with another part at one place."""
    return (*parts[:place], part, *parts[place + 1 :])


class _Windows:
    """The sliding window of every layer; 0: all positions."""

    def __init__(self, config: DecoderConfig):
        self.sizes = [config.window_of(layer) for layer in range(config.layers)]

    def of_layer(self, layer: Array | int) -> Array | int:
        """The window of a layer, which `lax.scan` traces. A layer without a window then has one longer than any sequence."""
        if len(set(self.sizes)) == 1:
            return self.sizes[0]
        if isinstance(layer, int):
            return self.sizes[layer]
        return _of_layer([size or _ALL for size in self.sizes], layer)


_ALL = 1 << 30


def _of_layer(numbers: list[int], layer: Array | int) -> Array | int:
    """The number of a layer, which `lax.scan` traces."""
    if numbers == list(range(len(numbers))):
        return layer
    if isinstance(layer, int):
        return numbers[layer]
    return jnp.asarray(numbers, jnp.int32)[layer]

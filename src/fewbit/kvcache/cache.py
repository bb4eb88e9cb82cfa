"""A quantized KV cache of fixed length: packed codes and scales."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Shaped, UInt8

from ..array.packing import code_capacity
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError
from ..kernels.attention.problem import Block, seen_positions, taken, window_start
from ..kernels.quantize.dispatch import quantize
from .policy import KVPolicy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """A quantized KV cache with a max length of `S` positions. A frozen pytree.

    The first `length` positions are filled. Caches stacked for `vmap` or `scan` have leading axes (`*N`).

    Each token is quantized once, when it is written: prefilling a prompt at once or token by token gives the same bytes.
    All-zero keys come back as exact zeros; NaN or infinity makes all elements with its scale NaN.

    The codes are plain arrays here, and QArrays in the result of `layer`, so that `fb.transparent` does not take a cache
    among its arguments for weights.

    Attributes:
        key_codes: the codes of `h` coordinates, packed in `p` bytes.
        key_scale: J is K, or 1 when all heads of a token share a scale.
        value_codes: as `key_codes`.
        value_scale: as `key_scale`.
        length: the number of filled positions, the same for every row of the batch.
        policy: the schemes of keys and values. Static.
        head_dim: the head width (h). Static.

    >>> from fewbit.kvcache import kv_policy
    >>> cache = empty_quantized_cache(kv_policy("int4"), layers=1, batch=1, heads=1, head_dim=4, max_length=8)
    >>> cache = cache.written(0, jnp.array([[[[7.0, -7.0, 0.4, 0.0]]]]), jnp.zeros((1, 1, 1, 4))).advanced(1)
    >>> fb.dequantize(cache.layer(0)[0])[0, 0, :2].tolist()
    [[7.0, -7.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    >>> cache.nbytes
    96
    """

    key_codes: UInt8[Array, "*N L B K S p"]
    key_scale: Shaped[Array, "*N L B J S 1"]
    value_codes: UInt8[Array, "*N L B K S P"]
    value_scale: Shaped[Array, "*N L B I S 1"]
    length: Int[Array, "*N"]
    policy: KVPolicy = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})

    @property
    def max_length(self) -> int:
        """The number of positions (S)."""
        return self.key_codes.shape[-2]

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        arrays = (self.key_codes, self.key_scale, self.value_codes, self.value_scale)
        return sum(a.size * a.dtype.itemsize for a in arrays)

    def written(
        self, layer: Int[Array, ""] | int, keys: Float[Array, "B K T h"], values: Float[Array, "B K T h"]
    ) -> "QuantizedCache":
        """Writes one layer's keys and values of new tokens at `length`, which is unchanged.

        Args:
            layer: which layer, from 0; a negative one counts from the end.
            keys: of the T new tokens, in any floating dtype.
            values: as `keys`.

        Raises:
            QuantError: when the shapes are not those of the cache, and when layer or length are concrete (not traced) and
                the layer does not exist or the tokens do not fit. Inside `jit` the length is not known: tokens beyond the
                max length then overwrite the last ones, so check the total before the loop.
        """
        self._check_new_tokens(layer, keys, values)
        k, v = quantize(keys, self.policy.keys), quantize(values, self.policy.values)

        def put(cached: Array, new: Array) -> Array:
            zero = jnp.int32(0)
            return lax.dynamic_update_slice(cached, new[None], (jnp.int32(layer), zero, zero, self.length, zero))

        return dataclasses.replace(
            self,
            key_codes=put(self.key_codes, k.codes),
            key_scale=put(self.key_scale, k.scale),
            value_codes=put(self.value_codes, v.codes),
            value_scale=put(self.value_scale, v.scale),
        )

    def advanced(self, count: Int[Array, ""] | int) -> "QuantizedCache":
        """The cache with `count` more filled positions, after every layer has written them.

        Raises:
            QuantError: when the length is concrete and they do not fit.
        """
        self._check_room(count)
        return dataclasses.replace(self, length=self.length + count)

    def _check_new_tokens(self, layer: Array | int, keys: Array, values: Array) -> None:
        """Raises QuantError unless new keys and values fit this cache."""
        L, B, K, S, _ = self.key_codes.shape
        for name, x in (("keys", keys), ("values", values)):
            if len(x.shape) != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (B, K, self.head_dim):
                raise QuantError(
                    f"{name} has shape {x.shape}; this cache takes [batch={B}, heads={K}, tokens, head_dim={self.head_dim}]"
                )
        if keys.shape != values.shape:
            raise QuantError(f"keys has {keys.shape[2]} tokens and values {values.shape[2]}; they must have the same")
        if keys.shape[2] > S:
            raise QuantError(
                f"{keys.shape[2]} tokens do not fit a cache of {S} positions; make it with a larger max_length="
            )
        if not isinstance(layer, Tracer) and not -L <= int(layer) < L:
            raise QuantError(f"layer is {int(layer)}, but the cache has {L} layers")
        self._check_room(keys.shape[2])

    def _check_room(self, count: Array | int) -> None:
        """Raises QuantError when the length is concrete and `count` more tokens do not fit."""
        if not isinstance(self.length, Tracer) and (filled := int(np.max(self.length))) + count > self.max_length:
            raise QuantError(
                f"{count} more tokens do not fit: {filled} of {self.max_length} positions are filled; make the cache with a "
                "larger max_length="
            )

    def layer(self, layer: Int[Array, ""] | int) -> tuple[QArray, QArray]:
        """The keys and values of one layer, `[B, K, S, h]`. They are zeros where nothing is written."""
        keys, values = self.layers()
        return taken(keys, layer), taken(values, layer)

    def layers(self) -> tuple[QArray, QArray]:
        """The keys and values of all layers, `[*N, L, B, K, S, h]`."""
        return (
            self._quantized(self.key_codes, self.key_scale, self.policy.keys),
            self._quantized(self.value_codes, self.value_scale, self.policy.values),
        )

    def _quantized(self, codes: Array, scale: Array, scheme: Scheme) -> QArray:
        slack = code_capacity(codes.shape[-1], scheme.format.bits) - self.head_dim
        return QArray(codes, scale, None, None, scheme, jnp.dtype(jnp.float32), slack)

    def blocks(
        self,
        layer: Int[Array, ""] | int,
        keys: Float[Array, "B K T h"],
        values: Float[Array, "B K T h"],
        window: Int[Array, ""] | int = 0,
        *,
        is_chunk: bool = False,
    ) -> tuple[Block, ...]:
        """The blocks that new tokens attend to, after `written` and before `advanced`.

        They are the cache, and under `sees_raw` the unquantized new tokens. `window` is the positions that a token attends
        to, its own included; 0: all. `is_chunk` is as for `window_start`.
        """
        T = keys.shape[-2]
        seen = seen_positions(self.length, T)
        first = window_start(seen, window, is_chunk=is_chunk)
        if not self.policy.sees_raw:
            return (Block(*self.layers(), seen, layer, first),)
        earlier, new = jnp.broadcast_to(self.length, (T,)), seen_positions(0, T)
        return (
            Block(*self.layers(), earlier, layer, first),
            Block(keys, values, new, first=None if first is None else jnp.maximum(first - self.length, 0)),
        )


def empty_quantized_cache(
    policy: KVPolicy, *, layers: int, batch: int, heads: int, head_dim: int, max_length: int
) -> QuantizedCache:
    """An empty cache.

    Args:
        policy: the schemes of keys and values.
        layers: the number of layers (L).
        batch: the number of sequences (B).
        heads: the number of KV heads (K).
        head_dim: the head width (h).
        max_length: the number of positions (S).

    Returns:
        The cache.

    Raises:
        QuantError: when a number is not positive.
    """
    numbers = {"layers": layers, "batch": batch, "heads": heads, "head_dim": head_dim, "max_length": max_length}
    for name, number in numbers.items():
        if number < 1:
            raise QuantError(f"{name} is {number}, must be at least 1")

    def blank(scheme: Scheme) -> tuple[Array, Array]:
        one = jax.ShapeDtypeStruct((layers, batch, heads, max_length, head_dim), jnp.float32)
        q = jax.eval_shape(lambda x: quantize(x, scheme), one)
        return jnp.zeros(q.codes.shape, q.codes.dtype), jnp.zeros(q.scale.shape, q.scale.dtype)

    (key_codes, key_scale), (value_codes, value_scale) = blank(policy.keys), blank(policy.values)
    return QuantizedCache(key_codes, key_scale, value_codes, value_scale, jnp.int32(0), policy, head_dim)

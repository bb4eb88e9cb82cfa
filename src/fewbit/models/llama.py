"""The Llama family as plain JAX over a tree of parameters: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The tree, with weights `[out, in]` as GGUF and Hugging Face keep them:

    {"embed": [V, D],
     "layers": [{"attn": {"norm": [D], "q": [H h, D], "k": [K h, D], "v": [K h, D], "o": [D, H h]},
                 "mlp": {"norm": [D], "gate": [F, D], "up": [F, D], "down": [D, F]}}, ...],
     "norm": [D],
     "head": [V, D]}                       only when `config.tied` is false

so a path reads `layers/3/attn/q`. `join_products` makes one leaf of q, k and v, and of gate and up. The code knows nothing
of quantization: through `fb.transparent` the same functions run with quantized leaves. Dimension letters: B batch, T tokens,
V vocabulary, D width, H heads, K key heads, G = H / K, h head width, F hidden, S positions that are attended to.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from ..kernels.quantize import quantize
from ..kvcache import Block, KVPolicy, attention, seen_positions
from .cache import AnyCache
from .config import LlamaConfig
from .joined import JOINED, products
from .rope import turned, turns

Params: TypeAlias = dict[str, Any]


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    config: LlamaConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    kv: KVPolicy | None = None,
) -> Float[Array, "B T V"]:
    """The logits of the next token after each token of whole sequences.

    Args:
        params: the tree above; `layers` may be the list, which is unrolled, or what `stack_layers` makes of it, which
            is scanned.
        tokens: token ids from 0 to V - 1; another id makes all logits of its row NaN.
        config: the network that the tree belongs to.
        dtype: what products are computed from; they accumulate in float32, and norms and softmax are float32 always.
        kv: when given, keys and values are quantized and read as a cache of this policy would: what a text costs that is
            read token by token.

    Returns:
        Float32 logits.

    Raises:
        QuantError: when the tokens are more than the context, the tree has no head of its own although `config.tied` is
            false, or `kv.sees_raw` would leave nothing quantized.
    """
    if kv is not None and kv.sees_raw:
        raise QuantError("kv.sees_raw shows whole sequences unquantized, so kv would do nothing; pass a policy without it")
    x, _ = _hidden(params, tokens, kv, config, dtype)
    return _logits(params, x, config)


@partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames="cache")
def prefill(
    params: Params, tokens: Int[Array, "B T"], cache: AnyCache, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "B V"], AnyCache]:
    """Reads tokens that follow those of the cache, and gives the logits after the last of them.

    The cache is donated: the one that is returned takes its memory. When it has no room left for the tokens, the logits are
    NaN, since how full it is is not known while tracing.

    Args:
        params: as for `forward`.
        tokens: the token ids, as many for every row.
        cache: from `empty_cache` or from an earlier call, kept in `dtype` or in few bits.
        config: the network.
        dtype: as for `forward`.

    Returns:
        Float32 logits, and the cache with the tokens in it.

    Raises:
        QuantError: when the tokens are more than the whole room of the cache.
    """
    if cache.room < tokens.shape[1]:
        raise QuantError(
            f"tokens has {tokens.shape[1]} positions, more than the cache has room for, {cache.room}; "
            "give empty_cache more room"
        )
    x, cache = _hidden(params, tokens, cache, config, dtype)
    cache = cache.advanced(tokens.shape[1])
    logits = _logits(params, x[:, -1:], config)[:, 0]
    fits = jnp.broadcast_to(cache.length <= cache.room, logits.shape)
    return jnp.where(fits, logits, jnp.full_like(logits, jnp.nan)), cache


def decode_step(
    params: Params, token: Int[Array, " B"], cache: AnyCache, config: LlamaConfig, *, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "B V"], AnyCache]:
    """Reads one more token of each row: `prefill` with a single token.

    Args:
        params: as for `forward`.
        token: one token id a row.
        cache: as for `prefill`.
        config: the network.
        dtype: as for `forward`.

    Returns:
        The logits of each row's next token, and the cache with the token in it.
    """
    return prefill(params, token[:, None], cache, config, dtype=dtype)


def stack_layers(params: Params) -> Params:
    """The same parameters with runs of alike layers stacked, so that `forward` scans over each run.

    A run compiles as one layer. On a CPU the unrolled list decodes faster once it is compiled, since there each step of
    the scan copies its slice of the weights. Layers are alike when their trees have the same structure, static parts
    included, and their leaves the same shapes and dtypes. So a model of one scheme becomes one segment, and layers in
    another scheme begin a new one.

    Args:
        params: a tree whose `layers` is a list.

    Returns:
        The tree with a tuple of segments for `layers`: layers whose leaves have one more axis in front.

    Raises:
        QuantError: when the layers are stacked already.
    """
    layers = params["layers"]
    if not isinstance(layers, list):
        raise QuantError("stack_layers needs params['layers'] to be a list of layers; they are stacked already")
    segments: list[list[Any]] = []
    for layer in layers:
        if segments and _signature(segments[-1][0]) == _signature(layer):
            segments[-1].append(layer)
        else:
            segments.append([layer])
    stacked = tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *segment) for segment in segments)
    return {**params, "layers": stacked}


def _signature(layer: Any) -> tuple[Any, ...]:
    """What two layers have in common when they can be stacked."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _hidden(
    params: Params, tokens: Array, memory: AnyCache | KVPolicy | None, config: LlamaConfig, dtype: DTypeLike
) -> tuple[Array, Any]:
    """The residual stream after the last layer `[B, T, D]`, and the cache with the tokens' keys and values.

    The memory is a cache; without one, the policy by which keys and values are quantized, or None when they are not.
    """
    cache = None if isinstance(memory, KVPolicy) else memory
    kv = memory if isinstance(memory, KVPolicy) else None
    T = tokens.shape[1]
    if config.context < T:
        raise QuantError(
            f"tokens has {T} positions, more than the context of the model, {config.context}; cut it into windows"
        )
    if cache is None:
        cos, sin = turns(config, T)
    else:
        every = turns(config, max(cache.room, T))
        cos, sin = (lax.dynamic_slice_in_dim(jnp.asarray(t), cache.length, T) for t in every)

    def block(x: Array, cache: AnyCache | None, layer: Any, index: Array | int) -> tuple[Array, AnyCache | None]:
        q, k, v = _heads_of(_rms_norm(x, layer["attn"]["norm"], config), layer["attn"], (cos, sin), config)
        if cache is None:
            blocks = (_whole(k, v, kv),)
        else:
            cache = cache.written(index, k, v)
            blocks = cache.blocks(index, k, v)
        mixed = attention(q, blocks).swapaxes(1, 2).reshape(*x.shape[:2], -1)
        x = x + _linear(mixed, layer["attn"]["o"])
        return x + _mlp(x, layer["mlp"], config), cache

    x = jnp.take(params["embed"], tokens, axis=0).astype(dtype)
    return _through_layers(block, x, cache, params["layers"])


def _through_layers(block: Any, x: Array, cache: AnyCache | None, layers: Any) -> tuple[Array, AnyCache | None]:
    """Runs the layers one after another: a list unrolled, segments each by a scan."""
    if isinstance(layers, list):
        for index, layer in enumerate(layers):
            x, cache = block(x, cache, layer, index)
        return x, cache
    first = 0
    for segment in layers:
        indices = jnp.arange(first, first + jax.tree.leaves(segment)[0].shape[0], dtype=jnp.int32)
        (x, cache), _ = lax.scan(lambda carry, at: (block(*carry, *at), None), (x, cache), (segment, indices))
        first += len(indices)
    return x, cache


def _heads_of(
    y: Array, attn: Any, positions: tuple[Any, Any], config: LlamaConfig
) -> tuple[Float[Array, "B H T h"], Float[Array, "B K T h"], Float[Array, "B K T h"]]:
    """The queries, keys and values of normed tokens, queries and keys turned by their positions."""
    counts = (config.heads, config.kv_heads, config.kv_heads)
    flat = products(attn, JOINED["attn"], [n * config.head_dim for n in counts], partial(_linear, y))
    q, k, v = (_heads(part, count) for part, count in zip(flat, counts, strict=True))
    return turned(q, *positions, config.rope), turned(k, *positions, config.rope), v


def _whole(k: Array, v: Array, kv: KVPolicy | None) -> Block:
    """A whole sequence, each token of which sees itself and those before it."""
    seen = seen_positions(0, k.shape[-2])
    return Block(k, v, seen) if kv is None else Block(quantize(k, kv.keys), quantize(v, kv.values), seen)


def _mlp(x: Array, mlp: Any, config: LlamaConfig) -> Array:
    """What the feed-forward block adds to the residual stream: `down (silu(gate y) * up y)`."""
    y = _rms_norm(x, mlp["norm"], config)
    gate, up = products(mlp, JOINED["mlp"], [config.hidden] * 2, partial(_linear, y))
    return _linear(jax.nn.silu(gate) * up, mlp["down"])


def _logits(params: Params, x: Array, config: LlamaConfig) -> Array:
    """The logits of the residual stream, float32."""
    has_head = "head" in params
    if has_head == config.tied:
        have = "has" if has_head else "has no"
        raise QuantError(f"config.tied is {config.tied}, but the tree {have} 'head'; make the two agree")
    y = _rms_norm(x, params["norm"], config)
    return _linear(y, params["embed" if config.tied else "head"], dtype=jnp.float32)


def _rms_norm(x: Array, gain: Any, config: LlamaConfig) -> Array:
    """`x / sqrt(mean(x ** 2) + eps) * gain`, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    return (wide * inverse * gain.astype(jnp.float32)[None, None, :]).astype(x.dtype)


def _heads(x: Array, count: int) -> Array:
    """`[B, T, n h]` as `[B, n, T, h]`."""
    B, T, _ = x.shape
    return x.reshape(B, T, count, -1).swapaxes(1, 2)


def _linear(x: Array, weight: Any, dtype: DTypeLike | None = None) -> Array:
    """`x weight^T` over the last axes `[B, T, in], [out, in]`, accumulated in float32, in `dtype` or that of `x`."""
    return _dot(x, weight.astype(x.dtype), (((2,), (1,)), ((), ()))).astype(x.dtype if dtype is None else dtype)


def _dot(lhs: Array, rhs: Any, dimension_numbers: Any) -> Array:
    """A product with a float32 result; float32 operands are not rounded first, as accelerators do by default."""
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=jnp.float32)

"""A decoder in plain JAX for Llama, Qwen, Gemma and others.

RMSNorm, rotary embedding, grouped-query, latent or linear attention, a gated feed-forward block or a mixture of experts. The pytree of
parameters, with weights `[out, in]` as in GGUF and Hugging Face files; of a Llama:

    {"embed": [V, D],
     "layers": [{"attn": {"norm": [D], "q": [H h, D], "k": [K h, D], "v": [K h, D], "o": [D, H h]},
                 "mlp": {"norm": [D], "gate": [F, D], "up": [F, D], "down": [D, F]}}, ...],
     "norm": [D],
     "head": [V, D]}                       only if `config.tied` is false

`shapes` lists the leaves of any configuration. A path is `layers/3/attn/q`. `fuse_weights` fuses q, k and v, and gate and up.
With quantized leaves the same functions run through `fb.transparent`. Dimension letters: B batch, T tokens, V vocabulary, D
width, H heads, K key heads, G = H / K, h head width, F hidden, S cache positions, E experts.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from ..kernels.attention.dispatch import attention
from ..kernels.attention.problem import QUERIES, Block, seen_positions, window_start
from ..kernels.quantize.dispatch import quantize
from ..kvcache.cache import QuantizedCache
from ..kvcache.policy import KVPolicy
from ..ops.hadamard import hadamard_transform
from .attention.latent import absorbed_heads, absorbed_values, expanded_heads
from .attention.linear import LinearState, linear_attention
from .attention.rope import LayerRotations
from .cache import AnyCache, Cache, HybridCache, kv_of
from .config import DecoderConfig
from .experts import mixture
from .layer import Params, changed_input, feed_forward, linear, plus_bias, queries_keys_values, rms_norm, scaled, sub_norm


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    kv: KVPolicy | None = None,
) -> Float[Array, "B T V"]:
    """The next-token logits after each token of full sequences.

    Args:
        params: the pytree above; `layers` may be the list, which is unrolled, or the result of `stack_layers`, which is
            scanned.
        tokens: token ids from 0 to V - 1; another id makes the logits at and after it NaN.
        config: the configuration of the parameters.
        dtype: the dtype of matmul operands; matmuls accumulate in float32, norms and softmax are always float32.
        kv: if given, keys and values are quantized as in a KV cache of this policy, to measure its loss.

    Returns:
        Float32 logits.

    Raises:
        QuantError: when there are no tokens or more than the context, `config.tied` contradicts the pytree's head, or
            `kv.sees_raw` would leave nothing quantized.
    """
    if kv is not None and kv.sees_raw:
        raise QuantError("kv.sees_raw attends to unquantized keys and values, so kv has no effect; pass a policy without it")
    x, _ = _hidden(params, tokens, config, dtype, kv=kv)
    return output_logits(params, x, config)


@partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames="cache")
def prefill(
    params: Params,
    tokens: Int[Array, "B T"],
    cache: AnyCache,
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    length: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B V"], AnyCache]:
    """Appends tokens to the KV cache and returns the logits after the last one.

    The cache is donated: the returned one takes its memory. If the tokens exceed the max length of the cache, the logits
    are NaN, since its length is not known while tracing.

    Args:
        params: as for `forward`.
        tokens: token ids, the same number in every row.
        cache: from `empty_cache` or from an earlier call, in `dtype` or quantized.
        config: the configuration.
        dtype: as for `forward`.
        length: how many of the tokens count, from 1 to T; those after them are padding, with which prompts of different
            lengths share one program. None: all.

    Returns:
        Float32 logits, and the cache with the tokens.

    Raises:
        QuantError: when there are no tokens or more than the max length of the cache, or it has another dtype.
    """
    if cache.max_length < tokens.shape[1]:
        raise QuantError(
            f"tokens has {tokens.shape[1]} positions, more than the max length of the cache, {cache.max_length}; "
            "pass a larger max_length to empty_cache"
        )
    kv = kv_of(cache)
    if isinstance(kv, Cache) and kv.keys.dtype != dtype:
        raise QuantError(f"the cache is {kv.keys.dtype} and dtype is {jnp.dtype(dtype)}; pass the same dtype to empty_cache")
    T = tokens.shape[1]
    fits = cache.length + T <= cache.max_length
    x, cache = _hidden(params, tokens, config, dtype, cache=cache, length=length)
    if length is None:
        cache, last = cache.advanced(T), x[:, -1:]
    else:
        cache, last = cache.advanced(length), lax.dynamic_slice_in_dim(x, length - 1, 1, axis=1)
    logits = output_logits(params, last, config)[:, 0]
    fits = jnp.broadcast_to(fits, logits.shape)
    return jnp.where(fits, logits, jnp.full_like(logits, jnp.nan)), cache


def decode_step(
    params: Params, token: Int[Array, " B"], cache: AnyCache, config: DecoderConfig, *, dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "B V"], AnyCache]:
    """One decode step: `prefill` with a single token per row.

    Args:
        params: as for `forward`.
        token: one token id per row.
        cache: as for `prefill`.
        config: the configuration.
        dtype: as for `forward`.

    Returns:
        The logits of each row's next token, and the cache with the token.
    """
    return prefill(params, token[:, None], cache, config, dtype=dtype)


def stack_layers(params: Params) -> Params:
    """Stacks runs of identical layers, so that `forward` scans over each run.

    A run compiles as one layer. On a CPU the unrolled list decodes faster once compiled, since each step of the scan copies
    its slice of the weights. Layers are identical if their pytrees have the same structure, static parts (schemes)
    included, and their leaves the same shapes and dtypes; a layer of another scheme begins a new segment.

    Args:
        params: a pytree whose `layers` is a list.

    Returns:
        The pytree with a tuple of segments for `layers`: layers whose leaves have a new leading axis.

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


def _signature(layer: Params) -> tuple[Any, ...]:
    """Structure, shapes and dtypes; equal for layers that can be stacked."""
    leaves, structure = jax.tree.flatten(layer)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _hidden(
    params: Params,
    tokens: Array,
    config: DecoderConfig,
    dtype: DTypeLike,
    *,
    cache: AnyCache | None = None,
    kv: KVPolicy | None = None,
    length: Array | None = None,
) -> tuple[Array, Any]:
    """The residual stream after the last layer, and the KV cache.

    The stream is `[B, T, D]`; the cache has the tokens' keys and values. `kv` quantizes keys and values where there is no
    cache; None: they stay float. `length` is as for `prefill`.
    """
    x = embedded(params, tokens, config, dtype=dtype)
    return _through_layers(_block(config, tokens.shape[1], cache, kv, length), x, cache, params["layers"])


def embedded(params: Params, tokens: Int[Array, "B T"], config: DecoderConfig, *, dtype: DTypeLike = jnp.float32) -> Array:
    """The residual stream before the first layer `[B, T, D]`.

    Args:
        params: as for `forward`; only `embed` is read.
        tokens: as for `forward`.
        config: the configuration.
        dtype: as for `forward`.
    """
    table = params["embed"]
    tokens = jnp.where(tokens < 0, table.shape[0], tokens)  # a negative one would count from the end
    return scaled(jnp.take(table, tokens, axis=0).astype(dtype), config.embed_scale)


def layer_output(
    layer: Params, x: Float[Array, "B T D"], config: DecoderConfig, index: Int[Array, ""] | int
) -> Float[Array, "B T D"]:
    """The residual stream after one layer, for full sequences.

    Args:
        layer: the parameters of the layer.
        x: the residual stream before it.
        config: the configuration.
        index: the number of the layer, from 0; traced, identical layers share a program.

    Raises:
        QuantError: when there are no tokens or more than the context.
    """
    x, _, _ = _block(config, x.shape[1])(x, None, None, layer, index)
    return x


_KV: TypeAlias = Cache | QuantizedCache | None
_Block = Callable[[Array, _KV, LinearState | None, Params, Array | int], tuple[Array, _KV, LinearState | None]]


def _block(
    config: DecoderConfig, T: int, cache: AnyCache | None = None, kv: KVPolicy | None = None, length: Array | None = None
) -> _Block:
    """The function of one layer for `T` tokens.

    Its arguments are the residual stream, keys and values, the state of linear attention, the parameters and the layer's number.
    """
    if T < 1:
        raise QuantError("tokens has no positions; pass at least one token")
    if config.context < T:
        raise QuantError(
            f"tokens has {T} positions, more than the context of the model, {config.context}; cut it into windows"
        )
    if cache is None:
        rotations = LayerRotations(config, 0, T, T)
    else:
        rotations = LayerRotations(config, cache.length, T, max(cache.max_length, T), length)
    windows = _Windows(config)
    cached = None if cache is None else kv_of(cache)
    policy = cached.policy if isinstance(cached, QuantizedCache) else kv
    places = None if config.linear is None else [config.place_of(layer) for layer in range(config.layers)]
    is_absorbed = config.latent is not None and (config.latent.split or cache is not None or kv is not None)

    def attended(y: Array, attn: Params, cache: _KV, index: Array | int) -> tuple[Array, _KV]:
        """The values of all heads of softmax attention for normed tokens, and the cache with the tokens."""
        window, place = windows.of_layer(index), index if places is None else _of_layer(places, index)
        q, k, v, gate = _heads(y, attn, rotations.of_layer(index), config, is_absorbed)
        q = rotations.tempered(q)
        if cache is not None:
            cache = cache.written(place, k, v)
            blocks = cache.blocks(place, k, v, window)
        else:
            seen = seen_positions(0, T)
            if kv is not None:
                k, v = quantize(k, kv.keys), quantize(v, kv.values)
            blocks = (Block(k, v, seen, first=window_start(seen, window)),)
        if policy is not None and policy.int8_queries:
            q = quantize(q, QUERIES)
        mixed = attention(q, blocks, sinks=attn.get("sinks"), soft_cap=config.attention_cap)
        mixed = _values(mixed, attn, config, is_absorbed).swapaxes(1, 2).reshape(*y.shape[:2], -1)
        return mixed if gate is None else mixed * jax.nn.sigmoid(gate), cache

    def block(
        x: Array, cache: _KV, state: LinearState | None, layer: Params, index: Array | int
    ) -> tuple[Array, _KV, LinearState | None]:
        attn, name = layer["attn"], "out" if _is_linear(layer) else "o"
        y = _before(x, attn, config)
        if config.linear is not None and _is_linear(layer):
            mixed, state = linear_attention(y, attn, config, config.linear, state, length)
        else:
            mixed, cache = attended(y, attn, cache, index)
        mixed = sub_norm(mixed, attn, config)
        x = x + _after(plus_bias(linear(changed_input(mixed, attn, name, config), attn[name]), attn, name), attn, config)
        mlp = layer["mlp"]
        y = _before(x, mlp, config)
        if config.experts is not None and "experts" in mlp:
            y = mixture(y, mlp, config, config.experts)
        else:
            y = feed_forward(y, mlp, config)
        return x + _after(y, mlp, config), cache, state

    return block


def _is_linear(layer: Params) -> bool:
    """Whether a layer has linear attention."""
    return "out" in layer["attn"]


def _heads(
    y: Array, attn: Params, rotations: tuple[Any, Any], config: DecoderConfig, is_absorbed: bool
) -> tuple[Array, Array, Array, Array | None]:
    """Queries, keys and values of normed tokens, as a KV cache has them or of every head; and the gate of the output."""
    if config.latent is None:
        return queries_keys_values(y, attn, rotations, config)
    if not is_absorbed:
        return *expanded_heads(y, attn, rotations, config, config.latent), None
    q, cached = absorbed_heads(y, attn, rotations, config, config.latent)
    return q, cached, cached, None


def _values(mixed: Array, attn: Params, config: DecoderConfig, is_absorbed: bool) -> Array:
    """The values of every head from the result of attention."""
    if config.latent is None:
        return mixed
    if not is_absorbed:
        return mixed[..., : config.latent.value_dim]
    return absorbed_values(mixed, attn, config, config.latent)


def _before(x: Array, part: Params, config: DecoderConfig) -> Array:
    """The input of attention or the feed-forward block, with its norm if it has one."""
    if config.norms == "post":
        return x
    return rms_norm(x, part["norm"], config)


def _after(y: Array, part: Params, config: DecoderConfig) -> Array:
    """The scaled output of attention or the feed-forward block. Its norm is applied, if it has one, and then its rotation."""
    if config.norms != "pre":
        y = rms_norm(y, part["post_norm"], config)
    if config.rotated_outputs:
        y = hadamard_transform(y)
    return scaled(y, config.residual_scale)


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
    if isinstance(layer, int):
        return numbers[layer]
    return jnp.asarray(numbers, jnp.int32)[layer]


def _through_layers(
    block: _Block,
    x: Array,
    cache: AnyCache | None,
    layers: list[Any] | tuple[Any, ...],
) -> tuple[Array, AnyCache | None]:
    """Runs the layers: a list unrolled, stacked segments by `lax.scan`."""
    kv = None if cache is None else kv_of(cache)
    states = iter(cache.states if isinstance(cache, HybridCache) else ())
    new_states: list[LinearState] = []
    if isinstance(layers, list):
        for index, layer in enumerate(layers):
            x, kv, state = block(x, kv, next(states, None) if _is_linear(layer) else None, layer, index)
            new_states += [] if state is None else [state]
        return x, _with(cache, kv, new_states)
    first = 0
    for segment in layers:
        count = jax.tree.leaves(segment)[0].shape[0]
        indices = jnp.arange(first, first + count, dtype=jnp.int32)
        of_segment = list(itertools.islice(states, count)) if _is_linear(segment) else []
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_segment) if of_segment else None

        def step(carry: tuple[Array, _KV], at: tuple[Any, ...]) -> tuple[tuple[Array, _KV], LinearState | None]:
            layer, index, state = at
            x, kv, new = block(*carry, state, layer, index)
            return (x, kv), None if state is None else new

        (x, kv), new = lax.scan(step, (x, kv), (segment, indices, stacked))
        new_states += [jax.tree.map(lambda leaf, i=i: leaf[i], new) for i in range(len(of_segment))]
        first += count
    return x, _with(cache, kv, new_states)


def _with(cache: AnyCache | None, kv: _KV, states: list[LinearState]) -> AnyCache | None:
    """The cache with the keys, values and states of more tokens."""
    if isinstance(cache, HybridCache):
        assert kv is not None
        return HybridCache(kv, tuple(states))
    return kv


def output_logits(params: Params, x: Float[Array, "B T D"], config: DecoderConfig) -> Float[Array, "B T V"]:
    """The logits of the residual stream after the last layer, float32.

    Args:
        params: as for `forward`; only `norm` and `head`, or `embed` where they are tied, are read.
        x: the residual stream.
        config: the configuration.

    Raises:
        QuantError: when `config.tied` contradicts the pytree's head.
    """
    if config.tied and "head" in params:
        raise QuantError("config.tied is True, but params has 'head'; make the two agree")
    if not config.tied and "head" not in params:
        raise QuantError("config.tied is False, but params has no 'head'; make the two agree")
    y = rms_norm(x, params["norm"], config)
    head = params["embed"] if config.tied else params["head"]
    logits = scaled(linear(y, head, dtype=jnp.float32), config.logit_scale)
    if config.logit_cap:
        logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
    return logits

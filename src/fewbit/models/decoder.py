"""A decoder in plain JAX for Llama, Qwen, Gemma and others.

Norms, rotary embedding, grouped-query, latent or linear attention, state spaces, short convolutions, a feed-forward block or
experts. The pytree of parameters, with weights `[out, in]` as in GGUF and Hugging Face files; of a Llama:

    {"embed": [V, D],
     "layers": [{"attn": {"norm": [D], "q": [H h, D], "k": [K h, D], "v": [K h, D], "o": [D, H h]},
                 "mlp": {"norm": [D], "gate": [F, D], "up": [F, D], "down": [D, F]}}, ...],
     "norm": [D],
     "head": [V, D]}                       only if `config.tied` is false

A layer of Nemotron-H has one of "attn" and "mlp".

`shapes` lists the leaves of any configuration. A path is `layers/3/attn/q`. `fuse_weights` fuses q, k and v, and gate and up.
With quantized leaves the same functions run through `fb.transparent`. Dimension letters: B batch, T tokens, V vocabulary, D
width, H heads, K key heads, G = H / K, h head width, F hidden, S cache positions, E experts.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from ..kvcache.policy import KVPolicy
from ..ops.hadamard import hadamard_transform
from .attention.linear import LinearState, linear_attention
from .attention.mamba import state_space_layer
from .attention.short_conv import short_convolution
from .attention.softmax import KeysValues, SoftmaxAttention
from .cache import AnyCache, Cache, HybridCache, kvs_of
from .config import DecoderConfig
from .experts import dense_and_mixture, mixture
from .layer import (
    Params,
    changed_input,
    feed_forward,
    gated,
    linear,
    plus_bias,
    rms_norm,
    scaled,
    stream_norm,
    sub_norm,
)
from .part_configs import LinearAttention, Mamba2


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
    kv = kvs_of(cache)[0]
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
    x = embedded(params, tokens, config, dtype=dtype, first=0 if cache is None else cache.length)
    inputs = None if config.per_layer is None else per_layer_inputs(params, tokens, x, config)
    softmax = _softmax(config, tokens.shape[1], cache, kv, length)
    return _through_layers(_block(config, softmax, inputs, length), softmax, x, cache, params["layers"])


def embedded(
    params: Params,
    tokens: Int[Array, "B T"],
    config: DecoderConfig,
    *,
    dtype: DTypeLike = jnp.float32,
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "B T D"]:
    """The residual stream before the first layer.

    Args:
        params: as for `forward`; only `embed` and `position_embed` are read.
        tokens: as for `forward`.
        config: the configuration.
        dtype: as for `forward`.
        first: the position of the first token. One that the embedding of positions does not have makes it NaN.
    """
    table = params["embed"]
    tokens = jnp.where(tokens < 0, table.shape[0], tokens)  # a negative one would count from the end
    x = scaled(jnp.take(table, tokens, axis=0).astype(dtype), config.embed_scale)
    if config.positions:
        rows = first + config.position_offset + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = x + jnp.take(params["position_embed"], rows, axis=0).astype(dtype)[None]
    return x


def per_layer_inputs(
    params: Params, tokens: Int[Array, "B T"], x: Float[Array, "B T D"], config: DecoderConfig
) -> Float[Array, "B T L P"]:
    """The embedding of each token for every layer, plus a normed projection of its own embedding (Gemma 3n and 4).

    Args:
        params: as for `forward`; `per_layer_embed`, `per_layer_projection` and `per_layer_norm` are read.
        tokens: as for `forward`; one that the table does not have makes its inputs NaN.
        x: the residual stream before the first layer.
        config: the configuration.
    """
    assert config.per_layer is not None
    table, width = params["per_layer_embed"], config.per_layer.width
    shape = (*tokens.shape, config.layers, width)
    tokens = jnp.where(tokens < 0, table.shape[0], tokens)
    own = scaled(jnp.take(table, tokens, axis=0).astype(x.dtype), width**0.5).reshape(shape)
    projected = scaled(linear(x, params["per_layer_projection"]), config.width**-0.5).reshape(shape)
    return scaled(rms_norm(projected, params["per_layer_norm"], config) + own, 0.5**0.5)


def first_stream(
    params: Params, tokens: Int[Array, "B T"], config: DecoderConfig, *, dtype: DTypeLike = jnp.float32
) -> Float[Array, "B T W"]:
    """What the first layer reads, for `layer_output`.

    It is the residual stream. Where the configuration has them, inputs per layer and the keys and values that layers share are in
    channels after it.

    Args:
        params: as for `forward`; nothing of the layers, of the last norm and of the head is read.
        tokens: as for `forward`.
        config: the configuration.
        dtype: as for `forward`.

    Raises:
        QuantError: when there are no tokens or more than the context.
    """
    x = embedded(params, tokens, config, dtype=dtype)
    inputs = None if config.per_layer is None else per_layer_inputs(params, tokens, x, config)
    return _stream(x, inputs, _softmax(config, tokens.shape[1]).start(None, len(tokens), x.dtype))


def layer_output(
    layer: Params, stream: Float[Array, "B T W"], config: DecoderConfig, index: Int[Array, ""] | int
) -> Float[Array, "B T W"]:
    """What the next layer reads, for full sequences; after the last one that of `output_logits`.

    Args:
        layer: the parameters of the layer.
        stream: the result of `first_stream` or of the layer before.
        config: the configuration.
        index: the number of the layer, from 0; traced, identical layers share a program.

    Raises:
        QuantError: when there are no tokens or more than the context.
    """
    softmax = _softmax(config, stream.shape[1])
    x, inputs, kvs = _parts(stream, config)
    x, kvs, _ = _block(config, softmax, inputs, None)(x, kvs, None, layer, index)
    return _stream(x, inputs, kvs)


def _stream(x: Array, inputs: Array | None, kvs: KeysValues) -> Array:
    """The residual stream, inputs per layer, and keys and values as channels of one array `[B, T, W]`."""
    heads = [array.swapaxes(1, 2) for pair in kvs.last for array in pair]  # [B, T, K, h]
    others = [array.reshape(*x.shape[:2], -1) for array in ([] if inputs is None else [inputs]) + heads]
    return jnp.concatenate([x, *others], axis=-1) if others else x


def _parts(stream: Array, config: DecoderConfig) -> tuple[Array, Array | None, KeysValues]:
    """What `_stream` joined."""
    B, T, _ = stream.shape
    inputs = 0 if config.per_layer is None else config.layers * config.per_layer.width
    heads = [(kind.kv_heads, kind.head_dim) for kind in config.kinds for _ in "kv"] if config.shared_keys is not None else []
    ends = list(itertools.accumulate([config.width, inputs, *(count * width for count, width in heads)]))
    if len(heads) == inputs == 0:
        return stream, None, KeysValues((), ())
    x, of_layers, *flat = jnp.split(stream, ends[:-1], axis=-1)
    arrays = [part.reshape(B, T, *sizes).swapaxes(1, 2) for part, sizes in zip(flat, heads, strict=True)]
    last = tuple(zip(arrays[0::2], arrays[1::2], strict=True))
    return x, of_layers.reshape(B, T, config.layers, -1) if inputs else None, KeysValues((), last)


def _softmax(
    config: DecoderConfig, T: int, cache: AnyCache | None = None, kv: KVPolicy | None = None, length: Array | None = None
) -> SoftmaxAttention:
    """Softmax attention of every layer. T tokens must fit the context."""
    if T < 1:
        raise QuantError("tokens has no positions; pass at least one token")
    if config.context < T:
        raise QuantError(
            f"tokens has {T} positions, more than the context of the model, {config.context}; cut it into windows"
        )
    return SoftmaxAttention(config, T, cache, kv, length)


_Block = Callable[[Array, KeysValues, LinearState | None, Params, Array | int], tuple[Array, KeysValues, LinearState | None]]


def _block(config: DecoderConfig, softmax: SoftmaxAttention, inputs: Array | None, length: Array | None) -> _Block:
    """The function of one layer.

    Its arguments are the residual stream, keys and values, the state of a layer that has one, the parameters and the layer's number.
    `inputs` are those of `per_layer_inputs`.
    """

    def block(
        x: Array, kvs: KeysValues, state: LinearState | None, layer: Params, index: Array | int
    ) -> tuple[Array, KeysValues, LinearState | None]:
        before, y = x, x
        if "attn" in layer:
            attn, name = layer["attn"], "out" if _is_recurrent(layer) else "o"
            y = _before(x, attn, config)
            if _is_recurrent(layer):
                mixed, state = _mixed_by_state(y, attn, config, state, length)
            else:
                mixed, kvs = softmax(y, attn, kvs, index)
            mixed = sub_norm(mixed, attn, config)
            of_attention = plus_bias(linear(changed_input(mixed, attn, name, config), attn[name]), attn, name)
            x = x + _after(of_attention, attn, config)
        if "mlp" in layer:
            if config.parallel == "none":
                y = _before(x, layer["mlp"], config)
            elif config.parallel == "two_norms":
                y = _before(before, layer["mlp"], config)
            x = x + _after(_transformed(x, y, layer, config), layer["mlp"], config)
        if inputs is not None:
            x = x + _after(_gated_input(x, layer["per_layer"], inputs, index, config), layer["per_layer"], config)
        if config.layer_scale:
            x = (x.astype(jnp.float32) * layer["scale"].astype(jnp.float32)[None, None, :]).astype(x.dtype)
        return x, kvs, state

    return block


def _is_recurrent(layer: Params) -> bool:
    """Whether a layer has a state in place of keys and values."""
    return "out" in layer.get("attn", ())


def _mixed_by_state(
    y: Array, attn: Params, config: DecoderConfig, state: LinearState | None, length: Array | None
) -> tuple[Array, LinearState]:
    """The output of a layer with a state, before its projection, and the state after the tokens."""
    part = config.recurrent
    if isinstance(part, LinearAttention):
        return linear_attention(y, attn, config, part, state, length)
    if isinstance(part, Mamba2):
        return state_space_layer(y, attn, config, part, state, length)
    assert part is not None
    return short_convolution(y, attn, part, state, length)


def _transformed(x: Array, y: Array, layer: Params, config: DecoderConfig) -> Array:
    """The output of the feed-forward block, of experts, or of both, for the normed stream `y`."""
    mlp, experts = layer["mlp"], config.experts
    if experts is not None and "moe" in layer:
        return dense_and_mixture(x, y, layer, config, experts)
    if experts is not None and "experts" in mlp:
        return mixture(y, mlp, config, experts)
    return feed_forward(y, mlp, config)


def _gated_input(x: Array, part: Params, inputs: Array, index: Array | int, config: DecoderConfig) -> Array:
    """The projection of a layer's inputs times a gate of the residual stream."""
    of_layer = lax.dynamic_index_in_dim(inputs, jnp.int32(index), axis=2, keepdims=False)
    return linear(gated(linear(x, part["gate"]), of_layer, config), part["projection"])


def _before(x: Array, part: Params, config: DecoderConfig) -> Array:
    """The input of attention or the feed-forward block, with its norm if it has one."""
    if config.norms == "post":
        return x
    return stream_norm(x, part, config)


def _after(y: Array, part: Params, config: DecoderConfig) -> Array:
    """The scaled output of attention or the feed-forward block. Its norm is applied, if it has one, and then its rotation."""
    if config.norms != "pre":
        y = rms_norm(y, part["post_norm"], config)
    if config.rotated_outputs:
        y = hadamard_transform(y)
    return scaled(y, config.residual_scale)


def _through_layers(
    block: _Block,
    softmax: SoftmaxAttention,
    x: Array,
    cache: AnyCache | None,
    layers: list[Any] | tuple[Any, ...],
) -> tuple[Array, AnyCache | None]:
    """Runs the layers: a list unrolled, stacked segments by `lax.scan`."""
    kvs = softmax.start(cache, x.shape[0], x.dtype)
    states = iter(cache.states if isinstance(cache, HybridCache) else ())
    new_states: list[LinearState] = []
    if isinstance(layers, list):
        for index, layer in enumerate(layers):
            x, kvs, state = block(x, kvs, next(states, None) if _is_recurrent(layer) else None, layer, index)
            new_states += [] if state is None else [state]
        return x, _with(cache, kvs, new_states)
    first = 0
    for segment in layers:
        count = jax.tree.leaves(segment)[0].shape[0]
        indices = jnp.arange(first, first + count, dtype=jnp.int32)
        of_segment = list(itertools.islice(states, count)) if _is_recurrent(segment) else []
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_segment) if of_segment else None

        def step(
            carry: tuple[Array, KeysValues], at: tuple[Any, ...]
        ) -> tuple[tuple[Array, KeysValues], LinearState | None]:
            layer, index, state = at
            x, kvs, new = block(*carry, state, layer, index)
            return (x, kvs), None if state is None else new

        (x, kvs), new = lax.scan(step, (x, kvs), (segment, indices, stacked))
        new_states += [jax.tree.map(lambda leaf, i=i: leaf[i], new) for i in range(len(of_segment))]
        first += count
    return x, _with(cache, kvs, new_states)


def _with(cache: AnyCache | None, kvs: KeysValues, states: list[LinearState]) -> AnyCache | None:
    """The cache with the keys, values and states of more tokens."""
    if isinstance(cache, HybridCache):
        return HybridCache(kvs.caches[0], tuple(states), *kvs.caches[1:])
    return kvs.caches[0] if kvs.caches else None


def output_logits(params: Params, x: Float[Array, "B T _"], config: DecoderConfig) -> Float[Array, "B T V"]:
    """The logits of the residual stream after the last layer, float32.

    Args:
        params: as for `forward`; only `norm` and `head`, or `embed` where they are tied, and their biases are read.
        x: the residual stream, or the result of the last `layer_output`.
        config: the configuration.

    Raises:
        QuantError: when `config.tied` contradicts the pytree's head.
    """
    if x.shape[-1] > config.width:
        x = x[..., : config.width]
    if config.tied and "head" in params:
        raise QuantError("config.tied is True, but params has 'head'; make the two agree")
    if not config.tied and "head" not in params:
        raise QuantError("config.tied is False, but params has no 'head'; make the two agree")
    y = stream_norm(x, params, config)
    head = params["embed"] if config.tied else params["head"]
    logits = scaled(plus_bias(linear(y, head, dtype=jnp.float32), params, "head"), config.logit_scale)
    if config.logit_cap:
        logits = config.logit_cap * jnp.tanh(logits / config.logit_cap)
    return logits

"""Writing on from a prompt: the whole loop runs on the device, in one compiled call."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from ..errors import QuantError
from ..kvcache import KVPolicy
from .cache import AnyCache, empty_cache
from .config import LlamaConfig
from .llama import Params, decode_step, prefill


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """The tokens that were written after each prompt.

    Attributes:
        tokens: the new tokens; 0 after the end of a row.
        counts: how many of a row's tokens count: those before its stop token, or all.
    """

    tokens: Int[Array, "B N"]
    counts: Int[Array, " B"]

    def rows(self) -> list[list[int]]:
        """The new tokens of each prompt as plain lists, without the stop token."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.counts), strict=True)
        return [row[:count].tolist() for row, count in pairs]


def generate(
    params: Params,
    prompt: Int[Array, "B T"],
    config: LlamaConfig,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | None = None,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (),
    dtype: DTypeLike = jnp.float32,
    kv: KVPolicy | None = None,
) -> Generation:
    """Writes up to `max_new_tokens` tokens after each prompt. Traceable, so it runs under jit and `fb.transparent`.

    Args:
        params: as for `forward`.
        prompt: token ids, as many for every row.
        config: the network; prompt and new tokens together must fit its context.
        max_new_tokens: how many tokens at most; the loop ends early when every row has stopped.
        key: a JAX random key, needed to sample and refused otherwise.
        temperature: 0 takes the likeliest token; above 0 samples from `softmax(logits / temperature)`.
        stop_ids: tokens that end a row.
        dtype: as for `forward`.
        kv: how the cache keeps keys and values in few bits; None keeps them in `dtype`.

    Returns:
        The new tokens.

    Raises:
        QuantError: for an empty prompt, a length that does not fit, a negative temperature, a key missing or not used.
    """
    T = prompt.shape[1]
    if T < 1 or max_new_tokens < 1:
        raise QuantError(f"the prompt has {T} tokens and max_new_tokens is {max_new_tokens}; both must be at least 1")
    if T + max_new_tokens > config.context:
        raise QuantError(
            f"a prompt of {T} tokens and {max_new_tokens} new ones exceed the context of the model, {config.context}; "
            "shorten the prompt or lower max_new_tokens"
        )
    if not temperature >= 0:
        raise QuantError(f"temperature is {temperature}, must be 0 (the likeliest token) or above")
    if (temperature > 0) != (key is not None):
        given = "no key" if key is None else "a key"
        raise QuantError(f"temperature is {temperature} and {given} is given; sampling needs both, greedy decoding neither")
    return _generate(
        params,
        prompt,
        key,
        config=config,
        count=max_new_tokens,
        temperature=temperature,
        stop_ids=tuple(stop_ids),
        dtype=dtype,
        kv=kv,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """Where the loop stands: `step` tokens are written, the last of them is not yet read."""

    step: Int[Array, ""]
    cache: AnyCache
    tokens: Int[Array, "B N"]
    counts: Int[Array, " B"]
    has_stopped: Bool[Array, " B"]


@partial(jax.jit, static_argnames=("config", "count", "temperature", "stop_ids", "dtype", "kv"))
def _generate(
    params: Params,
    prompt: Array,
    key: Array | None,
    *,
    config: LlamaConfig,
    count: int,
    temperature: float,
    stop_ids: tuple[int, ...],
    dtype: DTypeLike,
    kv: KVPolicy | None,
) -> Generation:
    """`generate` after its checks."""
    B, T = prompt.shape
    prompt = prompt.astype(jnp.int32)

    def write(state: _State, logits: Array) -> _State:
        token = _sampled(logits, state.step, key, temperature)
        has_stopped = state.has_stopped | _is_any(token, stop_ids)
        kept = jnp.where(has_stopped, jnp.zeros_like(token), token)
        tokens = lax.dynamic_update_slice(state.tokens, kept[:, None], (jnp.int32(0), state.step))
        counts = state.counts + (~has_stopped).astype(jnp.int32)
        return _State(state.step + 1, state.cache, tokens, counts, has_stopped)

    def is_unfinished(state: _State) -> Array:
        return (state.step < count) & ~jnp.all(state.has_stopped)

    def read_and_write(state: _State) -> _State:
        last = lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        logits, cache = decode_step(params, last, state.cache, config, dtype=dtype)
        return write(dataclasses.replace(state, cache=cache), logits)

    empty = empty_cache(config, batch=B, room=T + count, dtype=dtype, kv=kv)
    logits, cache = prefill(params, prompt, empty, config, dtype=dtype)
    nothing = _State(jnp.int32(0), cache, jnp.zeros((B, count), jnp.int32), jnp.zeros(B, jnp.int32), jnp.zeros(B, bool))
    end = lax.while_loop(is_unfinished, read_and_write, write(nothing, logits))
    return Generation(end.tokens, end.counts)


def _sampled(logits: Float[Array, "B V"], step: Int[Array, ""], key: Array | None, temperature: float) -> Int[Array, " B"]:
    """The next token of each row."""
    if key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(jax.random.fold_in(key, step), logits / temperature, axis=-1).astype(jnp.int32)


def _is_any(token: Int[Array, " B"], ids: tuple[int, ...]) -> Bool[Array, " B"]:
    """Whether each token is one of `ids`."""
    return jnp.any(token[:, None] == jnp.asarray(ids, jnp.int32)[None, :], axis=-1)

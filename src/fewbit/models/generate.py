"""Generates tokens: prefill and decode, compiled."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from ..errors import QuantError
from ..kvcache.policy import KVPolicy
from .cache import AnyCache, empty_cache
from .config import DecoderConfig
from .decoder import Params, decode_step, prefill


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """The tokens generated after each prompt.

    Attributes:
        tokens: the new tokens; 0 after the end of a row.
        counts: the valid tokens of a row: those before its stop token, or all.
    """

    tokens: Int[Array, "B N"]
    counts: Int[Array, " B"]

    def rows(self) -> list[list[int]]:
        """The new tokens of each prompt as lists, without the stop token."""
        pairs = zip(np.asarray(self.tokens), np.asarray(self.counts), strict=True)
        return [row[:count].tolist() for row, count in pairs]


def generate(
    params: Params,
    prompt: Int[Array, "B T"],
    config: DecoderConfig,
    *,
    max_new_tokens: int,
    key: Key[Array, ""] | None = None,
    temperature: float = 0.0,
    stop_ids: tuple[int, ...] = (),
    dtype: DTypeLike = jnp.float32,
    kv: KVPolicy | None = None,
) -> Generation:
    """Generates up to `max_new_tokens` tokens after each prompt.

    Traceable: it runs under jit and `fb.transparent`.

    Args:
        params: as for `forward`.
        prompt: token ids, the same number in every row.
        config: the configuration; prompt and new tokens together must fit its context.
        max_new_tokens: the number of tokens at most; the loop ends early when every row has stopped.
        key: a JAX random key, required for sampling and refused otherwise.
        temperature: 0 is greedy decoding; above 0 samples from `softmax(logits / temperature)`.
        stop_ids: tokens that end a row.
        dtype: as for `forward`.
        kv: how the KV cache is quantized; None keeps it in `dtype`.

    Returns:
        The new tokens.

    Raises:
        QuantError: for an empty prompt, a length that does not fit, a negative temperature, a missing or unused key.
    """
    generator = TokenGenerator(config, max_new_tokens, temperature, tuple(stop_ids), jnp.dtype(dtype), kv)
    return _generate(params, prompt, key, generator=generator)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GenerationState:
    """The state between two decode steps, after `step` generated tokens.

    Attributes:
        step: the number of generated tokens.
        cache: the keys and values of all tokens but the last.
        tokens: the new tokens; 0 where none is generated yet, and after the end of a row.
        counts: the valid tokens of a row.
        has_stopped: whether a row has reached a stop token.
    """

    step: Int[Array, ""]
    cache: AnyCache
    tokens: Int[Array, "B S"]
    counts: Int[Array, " B"]
    has_stopped: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class TokenGenerator:
    """Prefill (`start`) and decode (`step`) as separate calls, to stream tokens or time them.

    Attributes:
        config: the configuration.
        max_new_tokens: as for `generate`.
        temperature: as for `generate`.
        stop_ids: as for `generate`.
        dtype: as for `generate`.
        kv: as for `generate`.
        max_length: the number of positions of the KV cache; None: the prompt and the new tokens.
    """

    config: DecoderConfig
    max_new_tokens: int
    temperature: float = 0.0
    stop_ids: tuple[int, ...] = ()
    dtype: DTypeLike = jnp.float32
    kv: KVPolicy | None = None
    max_length: int | None = None

    def start(
        self,
        params: Params,
        prompt: Int[Array, "B T"],
        key: Key[Array, ""] | None = None,
        length: Int[Array, ""] | None = None,
    ) -> GenerationState:
        """Prefills the prompt and generates the first token.

        Args:
            params: as for `forward`.
            prompt: token ids, the same number in every row.
            key: as for `generate`.
            length: as for `prefill`.

        Returns:
            The state after the first token.

        Raises:
            QuantError: as `generate`.
        """
        self.check(prompt.shape[1], key)
        B, max_length = prompt.shape[0], self.max_length or prompt.shape[1] + self.max_new_tokens
        empty = empty_cache(self.config, batch=B, max_length=max_length, dtype=self.dtype, kv=self.kv)
        logits, cache = prefill(params, prompt.astype(jnp.int32), empty, self.config, dtype=self.dtype, length=length)
        tokens, counts = jnp.zeros((B, max_length), jnp.int32), jnp.zeros(B, jnp.int32)
        return self._appended(GenerationState(jnp.int32(0), cache, tokens, counts, jnp.zeros(B, bool)), logits, key)

    def step(self, params: Params, state: GenerationState, key: Key[Array, ""] | None = None) -> GenerationState:
        """Generates one more token.

        Args:
            params: as for `start`.
            state: the result of `start` or of the last step, after fewer than `max_new_tokens` tokens.
            key: as for `start`.

        Returns:
            The state after the token.
        """
        last = lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        logits, cache = decode_step(params, last, state.cache, self.config, dtype=self.dtype)
        return self._appended(dataclasses.replace(state, cache=cache), logits, key)

    def finish(self, params: Params, state: GenerationState, key: Key[Array, ""] | None = None) -> Generation:
        """Generates the other tokens, in a loop on the device.

        Args:
            params: as for `start`.
            state: as for `step`.
            key: as for `start`.

        Returns:
            The new tokens.
        """

        def is_unfinished(state: GenerationState) -> Array:
            return (state.step < self.max_new_tokens) & ~jnp.all(state.has_stopped)

        end = lax.while_loop(is_unfinished, lambda state: self.step(params, state, key), state)
        return Generation(end.tokens[:, : self.max_new_tokens], end.counts)

    def _appended(self, state: GenerationState, logits: Float[Array, "B V"], key: Array | None) -> GenerationState:
        """Appends one token to each row."""
        if key is None:
            token = _likeliest(logits)
        else:
            step_key = jax.random.fold_in(key, state.step)
            below = logits - jnp.max(logits, axis=-1, keepdims=True)  # a small temperature makes them -inf, never +inf
            token = jax.random.categorical(step_key, below / self.temperature, axis=-1).astype(jnp.int32)
        stop_ids = jnp.asarray(self.stop_ids, jnp.int32)
        has_stopped = state.has_stopped | jnp.any(token[:, None] == stop_ids[None, :], axis=-1)
        kept = jnp.where(has_stopped, jnp.zeros_like(token), token)
        tokens = lax.dynamic_update_slice(state.tokens, kept[:, None], (jnp.int32(0), state.step))
        counts = state.counts + (~has_stopped).astype(jnp.int32)
        return GenerationState(state.step + 1, state.cache, tokens, counts, has_stopped)

    def check(self, T: int, key: Key[Array, ""] | None) -> None:
        """Checks lengths, temperature and key, as `start` does.

        Args:
            T: the tokens of the prompt.
            key: as for `generate`.

        Raises:
            QuantError: as `generate`.
        """
        count, context, temperature = self.max_new_tokens, self.config.context, self.temperature
        if T < 1 or count < 1:
            raise QuantError(f"the prompt has {T} tokens and max_new_tokens is {count}; both must be at least 1")
        if T + count > context:
            raise QuantError(
                f"a prompt of {T} tokens and {count} new ones exceed the context of the model, {context}; "
                "shorten the prompt or lower max_new_tokens"
            )
        if self.max_length is not None and T + count > self.max_length:
            raise QuantError(f"a prompt of {T} tokens and {count} new ones exceed max_length, {self.max_length}")
        if not temperature >= 0:
            raise QuantError(f"temperature is {temperature}, must be 0 (greedy decoding) or above")
        if (temperature > 0) != (key is not None):
            given = "no key" if key is None else "a key"
            raise QuantError(
                f"temperature is {temperature} and {given} is given; sampling needs both, greedy decoding neither"
            )


@partial(jax.jit, static_argnames="generator")
def _generate(params: Params, prompt: Array, key: Array | None, *, generator: TokenGenerator) -> Generation:
    """`generate` as one compiled call."""
    return generator.finish(params, generator.start(params, prompt, key), key)


def _likeliest(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """`argmax` (the first of equals or NaNs) as two reductions, which XLA vectorizes on CPUs."""
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    found = jnp.where((logits == largest) | jnp.isnan(logits), ids, logits.shape[1])
    return jnp.min(found, axis=-1)

"""Generates text from a prompt, with a quantized or float model."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..array.qarray import QArray, is_qarray
from ..errors import QuantError, UnsupportedError
from ..kernels.qmatmul.cpu.backend import reads_packed_weights
from ..kvcache.policy import KVPolicy
from ..models.cache import empty_cache
from ..models.generate import Writer
from ..models.tokenizers.tokenizer import Tokenizer
from ..ops.interpret.transparent import transparent
from .activations import Activations, with_int8_activations
from .evaluate import stacked
from .model import Model, decoded


@dataclasses.dataclass(frozen=True)
class Sample:
    """A generated text.

    Attributes:
        prompt: the prompt.
        is_chat: whether the prompt was formatted by the chat template.
        text: the generated text.
        tokens: its number of tokens.
        seconds: total time, with loading, compilation and dequantizing weights.
        decoded: the number of quantized weights that were dequantized before the loop.
        kv: how the KV cache was quantized; None: float32.
        activations: which activations were quantized to int8; None: none but those of the weights' own policies.
        cache_bytes: the bytes of the KV cache for prompt and new tokens.
        prompt_tokens: the tokens of the prompt.
        prefill_seconds: the time of prefill and the first new token, without compilation.
        decode_seconds: the time of all decode steps, without compilation.
        steps: the number of decode steps, the stop token's included.
    """

    prompt: str
    is_chat: bool
    text: str
    tokens: int
    seconds: float
    decoded: int = 0
    kv: str | None = None
    activations: Activations | None = None
    cache_bytes: int = 0
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0

    def speed(self) -> str:
        """The tokens per second of prefill and decode, without compilation."""
        text = f"prefill {self.prompt_tokens} tokens at {self.prompt_tokens / self.prefill_seconds:,.0f} tokens/s"
        if self.steps:
            text += f", decode {self.steps} tokens at {self.steps / self.decode_seconds:,.0f} tokens/s"
        compiled = self.seconds - self.prefill_seconds - self.decode_seconds
        return f"{text}; loading and compiling took {compiled:.1f} s"


def generate_text(
    model: Model,
    prompt: str,
    *,
    params: PyTree = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = None,
    chat: bool | None = None,
    kv: KVPolicy | None = None,
    int8_activations: bool = False,
) -> Sample:
    """Generates text after a prompt.

    Quantized weights stay packed if compiled kernels read them: on one CPU device. Elsewhere weight-only ones are
    dequantized once, before the loop; dequantizing weights with quantized activations would change the result.

    Args:
        model: the model: configuration, tokenizer and parameters.
        prompt: the text; the tokenizer's start tokens, such as a beginning-of-text token, are put before it.
        params: a pytree to use instead of the model's own parameters.
        max_tokens: the number of new tokens at most.
        temperature: 0 is greedy decoding; above 0 samples.
        seed: the seed of sampling; None is 0. Only with a temperature.
        chat: whether to format the prompt by the chat template; None: if the tokenizer has one.
        kv: how the KV cache is quantized; None keeps it in float32.
        int8_activations: whether the activations of quantized weights are quantized, too.

    Returns:
        The text with its timings.

    Raises:
        QuantError: for an empty prompt, lengths that do not fit the context, or a seed without a temperature.
        UnsupportedError: when the model cannot be run, or has no such template.
    """
    if seed is not None and not temperature > 0:
        raise QuantError(
            f"seed is {seed}, but temperature is {temperature}: greedy decoding takes no seed; raise temperature"
        )
    config, tokenizer = model.runnable_config(), model.readable_tokenizer()
    start = time.perf_counter()
    ids, is_chat = _prompt_ids(tokenizer, prompt, chat)
    if params is None:
        params = model.params()
    activations = None
    if int8_activations:
        params, activations = with_int8_activations(params)
    params, count = _decoded_weights(params)
    key = jax.random.key(seed or 0) if temperature > 0 else None
    tokens = jnp.asarray(ids[None, :], jnp.int32)
    writer = Writer(config, max_tokens, temperature, tuple(tokenizer.stop_ids), kv=kv)
    params = stacked(params)
    state, prefill_seconds = _timed(writer.begin, params, tokens, key)
    written, decode_seconds = _timed(writer.finish, params, state, key)
    row = written.rows()[0]
    cache = jax.eval_shape(lambda: jax.tree.leaves(empty_cache(config, batch=1, room=len(ids) + max_tokens, kv=kv)))
    return Sample(
        prompt=prompt,
        is_chat=is_chat,
        text=tokenizer.decode(row),
        tokens=len(row),
        seconds=time.perf_counter() - start,
        decoded=count,
        kv=None if kv is None else str(kv),
        activations=activations,
        cache_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in cache if leaf.ndim),  # all but its length
        prompt_tokens=len(ids),
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        steps=min(len(row) + 1, max_tokens) - 1,
    )


def _timed(fn: Callable[..., Any], *args: PyTree) -> tuple[Any, float]:
    """Compiles and runs a function of pytrees; returns its result and the time of the run."""
    leaves, structure = jax.tree.flatten(args)

    def flat(*leaves: jax.Array) -> PyTree:
        return transparent(fn)(*jax.tree.unflatten(structure, leaves))

    compiled = jax.jit(flat).lower(*leaves).compile()
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*leaves))
    return result, time.perf_counter() - start


def _prompt_ids(tokenizer: Tokenizer, prompt: str, chat: bool | None) -> tuple[np.ndarray, bool]:
    """The tokens of the prompt, and whether the chat template formatted it."""
    if not prompt:
        raise QuantError("the prompt is empty; give some text to continue")
    if chat is False or (chat is None and tokenizer.chat_template is None):
        return tokenizer.encode(prompt, add_start=True), False
    try:
        return tokenizer.chat(prompt), True
    except UnsupportedError:
        if chat:
            raise
        return tokenizer.encode(prompt, add_start=True), False


def _decoded_weights(params: PyTree) -> tuple[PyTree, int]:
    """Dequantizes weight-only leaves, unless kernels read packed ones; also returns how many."""
    if reads_packed_weights():
        return params, 0
    leaves, structure = jax.tree.flatten(params, is_leaf=is_qarray)
    weight_only = [i for i, leaf in enumerate(leaves) if isinstance(leaf, QArray) and leaf.policy is None]
    for i in weight_only:
        leaves[i] = decoded(leaves[i])
    return jax.tree.unflatten(structure, leaves), len(weight_only)

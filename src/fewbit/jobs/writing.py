"""Writing on from a prompt with a model, quantized or not."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import models
from ..array import QArray, is_qarray
from ..errors import QuantError, UnsupportedError
from ..kernels.qmatmul import reads_packed_weights
from ..kvcache import KVPolicy
from ..ops import transparent
from .model import Model, decoded
from .quality import stacked


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model wrote.

    Attributes:
        prompt: the text that it was given.
        is_chat: whether the prompt was put as a question of a chat.
        text: what it wrote.
        tokens: how many tokens that is.
        seconds: how long all took, loading, compilation and the decoding of weights included.
        decoded: how many quantized weights were decoded to float before the loop.
        kv: how the cache kept keys and values; None: in float32.
        cache_bytes: what the cache took, with room for prompt and new tokens.
        prompt_tokens: how many tokens the prompt is.
        reading_seconds: how long the prompt was read, up to the first new token; without compilation.
        writing_seconds: how long all other tokens were written; without compilation.
        steps: how many those are, that of the end among them.
    """

    prompt: str
    is_chat: bool
    text: str
    tokens: int
    seconds: float
    decoded: int = 0
    kv: str | None = None
    cache_bytes: int = 0
    prompt_tokens: int = 0
    reading_seconds: float = 0.0
    writing_seconds: float = 0.0
    steps: int = 0

    def speed(self) -> str:
        """A sentence on the tokens a second, compilation apart."""
        read = f"read {self.prompt_tokens} tokens at {self.prompt_tokens / self.reading_seconds:,.0f} tokens/s"
        wrote = f", wrote {self.steps} more at {self.steps / self.writing_seconds:,.0f} tokens/s" if self.steps else ""
        compiled = self.seconds - self.reading_seconds - self.writing_seconds
        return f"{read}{wrote}; loading and compiling took {compiled:.1f} s"


def write_on(
    model: Model,
    prompt: str,
    *,
    params: Any = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = None,
    chat: bool | None = None,
    kv: KVPolicy | None = None,
) -> Sample:
    """Writes on from a prompt.

    Quantized parameters stay packed where compiled kernels read them so: on one CPU device. Elsewhere weight-only ones are
    decoded once, before the loop; those with quantized activations stay as they are, since decoding them would change the
    result.

    Args:
        model: the model, for its network and tokenizer.
        prompt: the text.
        params: a tree to use in place of the model's own parameters.
        max_tokens: how many tokens at most.
        temperature: 0 takes the likeliest token; above 0 samples.
        seed: draws the samples; None is 0. Only with a temperature.
        chat: whether the prompt is a question to an instruction-tuned model; None: when the tokenizer has a template for it.
        kv: how the cache keeps keys and values in few bits; None keeps them in float32.

    Returns:
        What was written.

    Raises:
        QuantError: for an empty prompt, lengths that do not fit the context, or a seed without a temperature.
        UnsupportedError: when the model cannot be run, or has no such template.
    """
    if seed is not None and not temperature > 0:
        raise QuantError(f"seed is {seed}, but temperature is {temperature}: the likeliest token is taken, nothing is drawn")
    config, tokenizer = model.runnable_config(), model.readable_tokenizer()
    start = time.perf_counter()
    ids, is_chat = _prompt_ids(tokenizer, prompt, chat)
    params, count = _decoded_weights(model.params() if params is None else params)
    key = jax.random.key(seed or 0) if temperature > 0 else None
    tokens = jnp.asarray(ids[None, :], jnp.int32)
    writer = models.Writer(config, max_tokens, temperature, tuple(tokenizer.stop_ids), kv=kv)
    params = stacked(params)
    begun, reading = _timed(writer.begin, params, tokens, key)
    written, writing = _timed(writer.finish, params, begun, key)
    row = written.rows()[0]
    return Sample(
        prompt=prompt,
        is_chat=is_chat,
        text=tokenizer.decode(row),
        tokens=len(row),
        seconds=time.perf_counter() - start,
        decoded=count,
        kv=None if kv is None else str(kv),
        cache_bytes=_cache_bytes(config, len(ids) + max_tokens, kv),
        prompt_tokens=len(ids),
        reading_seconds=reading,
        writing_seconds=writing,
        steps=min(len(row) + 1, max_tokens) - 1,
    )


def _timed(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """What a function of parameters and more gives, compiled as one call, and how long that call took."""
    leaves, structure = jax.tree.flatten(args)

    def flat(*leaves: Any) -> Any:
        return transparent(fn)(*jax.tree.unflatten(structure, leaves))

    compiled = jax.jit(flat).lower(*leaves).compile()
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*leaves))
    return result, time.perf_counter() - start


def _cache_bytes(config: models.LlamaConfig, room: int, kv: KVPolicy | None) -> int:
    """The bytes of a cache for one sequence."""
    leaves = jax.eval_shape(lambda: jax.tree.leaves(models.empty_cache(config, batch=1, room=room, kv=kv)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim)  # all but its length


def _prompt_ids(tokenizer: models.Tokenizer, prompt: str, chat: bool | None) -> tuple[np.ndarray, bool]:
    """The tokens of the prompt, and whether it was put as a question of a chat."""
    if not prompt:
        raise QuantError("the prompt is empty; give some text to write on from")
    if chat is False or (chat is None and tokenizer.chat_template is None):
        return tokenizer.encode(prompt), False
    try:
        return tokenizer.chat(prompt), True
    except UnsupportedError:
        if chat:
            raise
        return tokenizer.encode(prompt), False


def _decoded_weights(params: Any) -> tuple[Any, int]:
    """The parameters with weight-only quantized leaves decoded, and how many those are; none where packed ones are faster."""
    if reads_packed_weights():
        return params, 0
    leaves, structure = jax.tree.flatten(params, is_leaf=is_qarray)
    can = [isinstance(leaf, QArray) and leaf.policy is None for leaf in leaves]
    new = [decoded(leaf) if c else leaf for leaf, c in zip(leaves, can, strict=True)]
    return jax.tree.unflatten(structure, new), sum(can)

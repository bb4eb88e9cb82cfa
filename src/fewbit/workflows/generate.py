"""Generates text from a prompt, token by token, with a quantized or float model."""

import dataclasses
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..array.qarray import QArray, is_qarray
from ..errors import QuantError
from ..kernels.qmatmul.cpu.backend import reads_packed_weights
from ..kvcache.policy import KVPolicy
from ..models.attention.rope_scaling import LongRope
from ..models.cache import empty_cache
from ..models.config import DecoderConfig
from ..models.generate import GenerationState, TokenGenerator
from ..models.tokenizers.text_stream import text_pieces
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
    on_text: Callable[[str], None] | None = None,
) -> Sample:
    """Generates text after a prompt.

    Quantized weights stay packed if compiled kernels read them: on one CPU device. Elsewhere weight-only ones are
    dequantized once, before the loop; dequantizing weights with quantized activations would change the result.

    The prompt is padded and the KV cache rounded up to a few lengths, so that a compiled program serves many prompts: with JAX's
    compilation cache on disk, later calls compile nothing.

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
        on_text: called first with the prompt, unless a chat template formats it, then with each piece of text as soon as it is
            generated.

    Returns:
        The text with its timings.

    Raises:
        QuantError: for an empty prompt, lengths that do not fit the context, or a seed without a temperature.
        UnsupportedError: when the model cannot be run, its chat template fails, or it has none and `chat` is True.
    """
    if seed is not None and not temperature > 0:
        raise QuantError(
            f"seed is {seed}, but temperature is {temperature}: greedy decoding takes no seed; raise temperature"
        )
    config, tokenizer = model.runnable_config(), model.readable_tokenizer()
    start = time.perf_counter()
    ids, is_chat = _prompt_ids(tokenizer, prompt, chat)
    model.check_tokens(ids, config.vocab)
    key = jax.random.key(seed or 0) if temperature > 0 else None
    padded, max_length = _padded_lengths(len(ids), max_tokens, config)
    generator = TokenGenerator(config, max_tokens, temperature, tuple(tokenizer.stop_ids), kv=kv, max_length=max_length)
    generator.check(len(ids), key)
    if params is None:
        params = model.params()
    activations = None
    if int8_activations:
        params, activations = with_int8_activations(params)
    params, count = _decoded_weights(params)
    loop = _TokenLoop(generator, stacked(params), key)
    del params  # which the loop has stacked
    if on_text is not None and not is_chat:
        on_text(prompt)
    text = ""
    for piece in text_pieces(tokenizer, loop.tokens(ids, padded), before=ids):
        text += piece
        if on_text is not None:
            on_text(piece)
    cache = jax.eval_shape(lambda: jax.tree.leaves(empty_cache(config, batch=1, max_length=len(ids) + max_tokens, kv=kv)))
    return Sample(
        prompt=prompt,
        is_chat=is_chat,
        text=text,
        tokens=loop.count,
        seconds=time.perf_counter() - start,
        decoded=count,
        kv=None if kv is None else str(kv),
        activations=activations,
        cache_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in cache if leaf.ndim),  # all but its length
        prompt_tokens=len(ids),
        prefill_seconds=loop.prefill_seconds,
        decode_seconds=loop.decode_seconds,
        steps=loop.steps,
    )


class _TokenLoop:
    """Generates the tokens after one prompt, one by one, by compiled calls.

    Attributes:
        prefill_seconds: the time of prefill and the first new token, without compilation.
        decode_seconds: the time of the decode steps, without compilation.
        steps: the number of decode steps.
        count: the number of tokens.
    """

    def __init__(self, generator: TokenGenerator, params: PyTree, key: jax.Array | None):
        self._generator, self._key = generator, key
        self._leaves, self._structure = jax.tree.flatten(params)
        self.prefill_seconds = self.decode_seconds = 0.0
        self.steps = self.count = 0

    def tokens(self, ids: np.ndarray, padded: int) -> Iterator[int]:
        """The tokens that are generated after a prompt.

        The prompt is padded to a length. Generation ends at a stop token or at the generator's limit.
        """
        prompt = jnp.asarray(np.pad(ids, (0, padded - len(ids)))[None, :], jnp.int32)
        length = jnp.int32(len(ids))
        prefill = self._compiled(self._generator.start, prompt, self._key, length)
        start = time.perf_counter()
        state, found = prefill(self._leaves, [prompt], self._key, length)
        token = int(found)
        self.prefill_seconds = time.perf_counter() - start
        step = None
        while token != _STOPPED:
            self.count += 1
            yield token
            if self.count == self._generator.max_new_tokens:
                return
            if step is None:
                step = self._compiled(self._generator.step, state, self._key, is_donated=True)
            start = time.perf_counter()
            state, found = step(self._leaves, jax.tree.leaves(state), self._key)
            token = int(found)
            self.decode_seconds += time.perf_counter() - start
            self.steps += 1

    def _compiled(
        self, fn: Callable[..., GenerationState], x: PyTree, *arrays: jax.Array | None, is_donated: bool = False
    ) -> Callable[..., tuple[GenerationState, jax.Array]]:
        """Compiles a method of the generator. The program returns the state and its last token.

        It takes the leaves of the parameters, the leaves of `x`, a prompt or a state, and the other arguments. A state is
        donated: the next one is in its memory, so that the KV cache is not copied at each step.
        """
        x_leaves, x_structure = jax.tree.flatten(x)

        def of_leaves(
            leaves: list[jax.Array], x_leaves: list[jax.Array], *arrays: jax.Array | None
        ) -> tuple[GenerationState, jax.Array]:
            params, x = jax.tree.unflatten(self._structure, leaves), jax.tree.unflatten(x_structure, x_leaves)
            state = transparent(fn)(params, x, *arrays)
            return state, jnp.where(state.has_stopped[0], _STOPPED, state.tokens[0, state.step - 1])

        program = jax.jit(of_leaves, donate_argnums=1 if is_donated else ())
        return program.lower(self._leaves, x_leaves, *arrays).compile()


_STOPPED = -1
"""Stands for a stop token."""


def _padded_lengths(prompt: int, max_tokens: int, config: DecoderConfig) -> tuple[int, int]:
    """The lengths of the padded prompt and of the KV cache.

    They are few, so that programs are compiled for few: an eighth or 15 tokens more than the prompt, and multiples of 256.

    >>> from fewbit.models import DecoderConfig
    >>> config = DecoderConfig(vocab=8, layers=1, width=8, heads=1, kv_heads=1, head_dim=8, hidden=8, context=512)
    >>> _padded_lengths(5, 64, config), _padded_lengths(300, 64, config), _padded_lengths(500, 12, config)
    ((16, 256), (320, 512), (500, 512))
    """
    multiple = max(16, 1 << max(prompt.bit_length() - 4, 0))
    padded = -(-prompt // multiple) * multiple
    scaling = config.rope_scaling
    follows_room = isinstance(scaling, LongRope) and scaling.short != scaling.long  # other factors for longer caches
    if padded + max_tokens > config.context or follows_room:
        return prompt, prompt + max_tokens
    return padded, min(-(-(padded + max_tokens) // 256) * 256, config.context)


def _prompt_ids(tokenizer: Tokenizer, prompt: str, chat: bool | None) -> tuple[np.ndarray, bool]:
    """The tokens of the prompt, and whether the chat template formatted it."""
    if not prompt:
        raise QuantError("the prompt is empty; give some text to continue")
    if chat is False or (chat is None and tokenizer.chat_template is None):
        return tokenizer.encode(prompt, add_start=True), False
    return tokenizer.chat(prompt), True


def _decoded_weights(params: PyTree) -> tuple[PyTree, int]:
    """Dequantizes weight-only leaves, unless kernels read packed ones; also returns how many."""
    if reads_packed_weights():
        return params, 0
    leaves, structure = jax.tree.flatten(params, is_leaf=is_qarray)
    weight_only = [i for i, leaf in enumerate(leaves) if isinstance(leaf, QArray) and leaf.policy is None]
    for i in weight_only:
        leaves[i] = decoded(leaves[i])
    return jax.tree.unflatten(structure, leaves), len(weight_only)

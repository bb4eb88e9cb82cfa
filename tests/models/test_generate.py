"""Generation on the device writes what a loop of full forwards would, stops where it should, and samples by the key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.models import TokenGenerator, forward, generate, stack_layers
from fewbit.models.generate import _likeliest
from tests.nets.random_decoder import SMALL, random_params, random_tokens

PARAMS = jax.jit(stack_layers)(random_params(SMALL))
PROMPT = random_tokens(SMALL, 2, 5)
run = jax.jit(forward, static_argnums=2)


@functools.cache
def by_full_forwards(count: int) -> list[list[int]]:
    """The likeliest tokens, each from a forward over all before it (filled up, so that it compiles once)."""
    tokens = np.array(PROMPT)
    for _ in range(count):
        filled = np.zeros((2, SMALL.context), np.int32)
        filled[:, : tokens.shape[1]] = tokens
        logits = run(PARAMS, jnp.asarray(filled), SMALL)[:, tokens.shape[1] - 1]
        tokens = np.concatenate([tokens, np.argmax(logits, axis=-1)[:, None]], axis=1)
    return tokens[:, 5:].tolist()


@pytest.mark.slow
def test_greedy_is_the_repeated_full_forward():
    assert generate(PARAMS, PROMPT, SMALL, max_new_tokens=12).rows() == by_full_forwards(12)


@pytest.mark.slow
def test_a_row_ends_before_its_stop_token():
    expected = by_full_forwards(12)
    stop = expected[0][4]
    ends = [row.index(stop) if stop in row else 12 for row in expected]
    result = generate(PARAMS, PROMPT, SMALL, max_new_tokens=12, stop_ids=(stop, SMALL.vocab - 1))
    assert ends[0] <= 4
    assert np.asarray(result.counts).tolist() == ends
    assert result.rows() == [row[:end] for row, end in zip(expected, ends, strict=True)]
    assert not np.asarray(result.tokens)[0, ends[0] :].any()


@pytest.mark.slow
def test_single_steps_are_the_loop():
    generator = TokenGenerator(SMALL, 12, max_length=24)
    start, step = jax.jit(generator.start), jax.jit(generator.step)
    padded = jnp.pad(PROMPT, ((0, 0), (0, 3)))
    state = start(PARAMS, padded, length=jnp.int32(PROMPT.shape[1]))
    for count in range(1, 13):
        assert int(state.step) == count
        assert state.tokens[:, :count].tolist() == [row[:count] for row in by_full_forwards(12)]
        state = step(PARAMS, state) if count < 12 else state
    assert state.tokens.shape == (2, 24) and not state.tokens[:, 12:].any()


def test_a_cache_too_short_is_refused():
    with pytest.raises(QuantError, match="a prompt of 5 tokens and 12 new ones exceed max_length, 16"):
        TokenGenerator(SMALL, 12, max_length=16).start(PARAMS, PROMPT)


def test_a_prompt_can_fill_the_context_with_its_continuation():
    count = SMALL.context - PROMPT.shape[1]
    assert generate(PARAMS, PROMPT, SMALL, max_new_tokens=count).tokens.shape == (2, count)


def test_samples_follow_the_key():
    def sample(seed: int) -> list[list[int]]:
        return generate(PARAMS, PROMPT, SMALL, max_new_tokens=12, key=jax.random.key(seed), temperature=1.0).rows()

    assert sample(0) == sample(0)
    assert sample(0) != sample(1)


@pytest.mark.slow
def test_every_step_draws_anew():
    greedy = generate(PARAMS, PROMPT, SMALL, max_new_tokens=3)
    nearly = generate(PARAMS, PROMPT, SMALL, max_new_tokens=3, key=jax.random.key(0), temperature=1e-39)
    assert nearly.rows() == greedy.rows()
    # At this temperature all tokens are alike, so the draws alone decide; the same draw would give the same token each step.
    result = generate(PARAMS, PROMPT, SMALL, max_new_tokens=12, key=jax.random.key(0), temperature=1e6)
    assert all(len(set(row)) > 6 for row in result.rows())


@pytest.mark.slow
def test_samples_have_the_probabilities_of_the_model():
    rows = 2000
    prompt = jnp.tile(PROMPT[:1], (rows, 1))
    first = generate(PARAMS, prompt, SMALL, max_new_tokens=1, key=jax.random.key(7), temperature=0.8).tokens[:, 0]
    expected = np.asarray(jax.nn.softmax(run(PARAMS, PROMPT[:1], SMALL)[0, -1] / 0.8), np.float64)
    counts = np.bincount(np.asarray(first), minlength=SMALL.vocab)
    # Pearson's statistic has mean V - 1 and deviation sqrt(2 (V - 1)) when the counts are drawn from `expected`.
    statistic = float(((counts - rows * expected) ** 2 / (rows * expected)).sum())
    assert statistic < SMALL.vocab - 1 + 5 * (2 * (SMALL.vocab - 1)) ** 0.5


@pytest.mark.slow
def test_quantized_leaves_generate_under_transparent():
    quantize = jax.jit(fb.quantize, static_argnames="scheme")
    dequantize = jax.jit(fb.dequantize)
    params = jax.tree.map(lambda a: quantize(a, scheme="int8") if a.ndim == 2 else a, random_params(SMALL))
    plain = jax.tree.map(lambda a: dequantize(a) if fb.is_qarray(a) else a, params, is_leaf=fb.is_qarray)
    write = functools.partial(generate, config=SMALL, max_new_tokens=8)
    result = jax.jit(fb.transparent(write))(stack_layers(params), PROMPT)
    assert result.rows() == write(stack_layers(plain), PROMPT).rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0; both must be at least 1"),
        ({"max_new_tokens": 28}, "5 tokens and 28 new ones exceed the context of the model, 32"),
        ({"temperature": -1.0}, "temperature is -1.0, must be 0"),
        ({"temperature": float("nan")}, "temperature is nan, must be 0"),
        ({"temperature": 0.5}, "temperature is 0.5 and no key is given; sampling needs both, greedy decoding neither"),
        ({"key": jax.random.key(0)}, "temperature is 0.0 and a key is given; sampling needs both"),
    ],
    ids=["no-tokens", "too-long", "negative", "nan", "no-key", "unused-key"],
)
def test_refuses(change: dict, message: str):
    with pytest.raises(QuantError, match=message):
        generate(PARAMS, PROMPT, SMALL, **{"max_new_tokens": 4, **change})


def test_refuses_an_empty_prompt():
    with pytest.raises(QuantError, match="the prompt has 0 tokens"):
        generate(PARAMS, PROMPT[:, :0], SMALL, max_new_tokens=4)


def test_the_likeliest_token_is_that_of_argmax():
    logits = jnp.array([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf], [jnp.inf, jnp.nan, jnp.nan]], jnp.float32)
    assert _likeliest(logits).tolist() == jnp.argmax(logits, axis=-1).tolist() == [1, 0, 1]

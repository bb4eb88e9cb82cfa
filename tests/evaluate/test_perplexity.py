"""Windows predict every token once, and perplexity and comparison are their formulas whatever the batch size."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.evaluate import Comparison, compare_models, kl_divergence, perplexity, token_windows, top1_agreement

VOCAB = 13
RNG = np.random.default_rng(1)
TABLE = jnp.asarray(RNG.normal(size=(VOCAB, VOCAB)) * 2, jnp.float32)
OTHER = TABLE + 0.2 * jnp.asarray(RNG.normal(size=TABLE.shape), jnp.float32)
WINDOWS = token_windows(RNG.integers(VOCAB, size=71), length=10)


def bigram(table: jax.Array) -> Any:
    """A model whose logits depend on the last token alone."""
    return jax.jit(lambda tokens: jnp.take(table, tokens, axis=0))


def losses(table: jax.Array) -> np.ndarray:
    logits = np.asarray(table, np.float64)[WINDOWS[:, :-1]]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(log_p, WINDOWS[:, 1:, None], axis=-1).ravel()


def test_every_token_but_the_first_is_predicted_once():
    tokens = np.arange(31)
    windows = token_windows(tokens, length=10)
    assert windows[:, 1:].ravel().tolist() == list(range(1, 31))
    assert windows[:, :-1].ravel().tolist() == list(range(30))
    assert token_windows(tokens[:30], length=10).shape == (2, 11)  # the last window would lack its last target
    assert token_windows(tokens, length=10, limit=20).shape == (2, 11)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 31}, "the text has 31 tokens, 32 are needed; take a longer text or lower length or limit"),
        ({"length": 10, "limit": 40}, "the text has 31 tokens, 41 are needed"),
        ({"length": 10, "limit": 15}, "limit is 15 tokens, must be a multiple of the window length, 10"),
        ({"length": 0}, "length is 0, must be at least 1"),
    ],
    ids=["short", "limited", "ragged", "zero"],
)
def test_windows_refuse(arguments: dict[str, int], message: str):
    with pytest.raises(QuantError, match=message):
        token_windows(np.arange(31), **arguments)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_perplexity_is_its_formula(batch_size: int):
    each = losses(TABLE)
    got = perplexity(bigram(TABLE), WINDOWS, batch_size=batch_size)
    assert got.tokens == 70
    # float32 losses of about 3 are rounded by 2e-7.
    assert got.value == pytest.approx(math.exp(each.mean()), rel=1e-6)
    assert got.error == pytest.approx(math.exp(each.mean()) * each.std(ddof=1) / math.sqrt(70), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_comparison_is_made_of_the_single_metrics(batch_size: int):
    got = compare_models(bigram(TABLE), bigram(OTHER), WINDOWS, batch_size=batch_size)
    tokens = jnp.asarray(WINDOWS[:, :-1])
    p, q = bigram(TABLE)(tokens), bigram(OTHER)(tokens)
    assert got.reference == perplexity(bigram(TABLE), WINDOWS)
    assert got.candidate == perplexity(bigram(OTHER), WINDOWS)
    assert got.kl.mean.value == pytest.approx(kl_divergence(p, q).mean.value, rel=1e-6)
    assert got.top1 == top1_agreement(p, q)
    paired = losses(OTHER) - losses(TABLE)
    assert got.log_ratio.value == pytest.approx(paired.mean(), abs=1e-6)
    assert got.log_ratio.error == pytest.approx(paired.std(ddof=1) / math.sqrt(70), rel=1e-4)
    assert math.exp(got.log_ratio.value) == pytest.approx(got.candidate.value / got.reference.value, rel=1e-9)


def test_a_model_compared_with_itself():
    got = compare_models(bigram(TABLE), bigram(TABLE), WINDOWS)
    assert isinstance(got, Comparison)
    assert (got.kl.largest, got.top1.value, got.log_ratio.value) == (0.0, 1.0, 0.0)
    assert got.reference == got.candidate


def test_one_batch_shape_and_progress():
    shapes, done = [], []

    def model(tokens: jax.Array) -> jax.Array:
        shapes.append(tokens.shape)
        return jnp.take(TABLE, tokens, axis=0)

    perplexity(model, WINDOWS, batch_size=3, progress=lambda *counts: done.append(counts))
    assert shapes == [(3, 10)] * 3
    assert done == [(3, 7), (6, 7), (7, 7)]


def test_nan_and_infinity_come_through():
    assert math.isnan(perplexity(bigram(TABLE * jnp.nan), WINDOWS).value)
    impossible = jnp.full_like(TABLE, -jnp.inf).at[:, 0].set(0.0)
    assert perplexity(bigram(impossible), WINDOWS).value == math.inf


def test_refuses():
    with pytest.raises(QuantError, match=r"windows has shape \(0, 11\), must be \[N, length \+ 1\]"):
        perplexity(bigram(TABLE), WINDOWS[:0])
    with pytest.raises(QuantError, match=r"windows has shape \(7, 1\)"):
        compare_models(bigram(TABLE), bigram(TABLE), WINDOWS[:, :1])
    with pytest.raises(QuantError, match="batch_size is 0, must be at least 1"):
        perplexity(bigram(TABLE), WINDOWS, batch_size=0)

"""Every metric is its formula in float64 numpy, and says the right thing at its edges."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.evaluate import estimate, kl_divergence, sqnr_db, top1_agreement
from fewbit.evaluate.metrics import token_losses

RNG = np.random.default_rng(0)
P = RNG.normal(size=(40, 5, 97)) * 3
Q = P + RNG.normal(size=P.shape)
P32, Q32 = jnp.asarray(P, jnp.float32), jnp.asarray(Q, jnp.float32)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def test_kl_is_its_formula():
    log_p, log_q = log_softmax(P), log_softmax(Q)
    each = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1).ravel()
    got = kl_divergence(P32, Q32)
    # float32 logits up to 12 are rounded by 1e-6, and each log probability takes that over.
    assert got.mean.value == pytest.approx(each.mean(), abs=2e-6)
    assert got.mean.error == pytest.approx(each.std(ddof=1) / math.sqrt(each.size), abs=2e-6)
    expected = [*np.quantile(each, [0.5, 0.9, 0.99], method="inverted_cdf"), each.max()]
    assert [got.median, got.p90, got.p99, got.largest] == pytest.approx(expected, abs=5e-6)


def test_kl_of_a_distribution_to_itself_is_exactly_zero():
    got = kl_divergence(P32, P32)
    assert (got.mean.value, got.mean.error, got.largest) == (0.0, 0.0, 0.0)


def test_kl_depends_on_the_order_and_ignores_a_shift_of_the_logits():
    assert kl_divergence(P32, Q32).mean.value != pytest.approx(kl_divergence(Q32, P32).mean.value, rel=1e-3)
    assert kl_divergence(P32, P32 + 5.0).largest < 1e-5


def test_tokens_that_are_impossible_in_the_reference_count_nothing():
    p, q = jnp.array([[0.0, -jnp.inf, 0.0]]), jnp.array([[0.0, 1.0, 0.0]])
    assert kl_divergence(p, q).mean.value == pytest.approx(math.log((2 + math.e) / 2), rel=1e-6)
    reverse = kl_divergence(q, p)
    assert (reverse.mean.value, reverse.median, reverse.largest) == (math.inf, math.inf, math.inf)


def test_top1_counts_equal_maxima():
    same = (P.argmax(axis=-1) == Q.argmax(axis=-1)).ravel()
    got = top1_agreement(P32, Q32)
    assert got.value == same.mean()
    assert got.error == pytest.approx(same.std(ddof=1) / math.sqrt(same.size))
    assert 0.3 < got.value < 0.99
    assert top1_agreement(P32, P32).value == 1.0


def test_top1_of_nan_agrees_with_nothing():
    nan = jnp.full((3, 4), jnp.nan)
    assert top1_agreement(nan, nan).value == 0.0


def test_estimate_of_one_sample_has_no_error():
    got = estimate(np.array([2.0]))
    assert got.value == 2.0
    assert math.isnan(got.error)
    with pytest.raises(QuantError, match="estimate got no samples"):
        estimate(np.zeros(0))
    assert str(estimate(np.array([1.0, 2.0]))) == "1.5 ± 0.5"


@pytest.mark.parametrize("shape", [(1000,), (100, 333), (7, 11, 13)], ids=str)
def test_sqnr_is_its_formula(shape: tuple[int, ...]):
    x = RNG.normal(size=shape).astype(np.float32)
    y = (x + 0.01 * RNG.normal(size=shape)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = 10 * math.log10((wide**2).sum() / ((wide - y) ** 2).sum())
    # Row sums of at most 1000 squares in float32 are off by 1e-4 at most: 10 log10(1 + 2e-4) is below 1e-3 dB.
    assert sqnr_db(x, y) == pytest.approx(expected, abs=1e-3)


def test_sqnr_of_a_uniform_quantizer_is_six_decibels_a_bit():
    x = jnp.asarray(RNG.uniform(-1, 1, size=(64, 4096)), jnp.float32)
    # Steps of 2 / 255 over a uniform signal: power 1/3 over step**2 / 12.
    expected = 10 * math.log10((1 / 3) / ((2 / 255) ** 2 / 12))
    assert sqnr_db(x, fb.quantize(x, "int8")) == pytest.approx(expected, abs=0.1)


def test_sqnr_of_numbers():
    numbers = (float, np.float32, np.float64, jnp.float32)
    assert [sqnr_db(of(4), of(3.5)) for of in numbers] == pytest.approx([20 * math.log10(8)] * 4, abs=1e-5)
    assert sqnr_db(np.float64(4e300), np.float64(3.5e300)) == pytest.approx(20 * math.log10(8), abs=1e-5)


def test_sqnr_at_its_edges():
    zero, one = jnp.zeros((2, 3)), jnp.ones((2, 3))
    assert sqnr_db(one, one) == math.inf
    assert sqnr_db(zero, zero) == math.inf
    assert sqnr_db(zero, one) == -math.inf
    assert math.isnan(sqnr_db(one, one * jnp.nan))
    with pytest.raises(QuantError, match=r"reference has shape \(2, 3\) and approx \(3,\); they must be the same"):
        sqnr_db(one, jnp.ones(3))


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (jnp.full(4, 1e-25), jnp.full(4, 5e-26)),
        (jnp.full(4, 1e20), jnp.full(4, 5e19)),
        (jnp.full(4, 3e38), jnp.full(4, -3e38)),
        (np.full(4, 1e300), np.full(4, -1e300)),
        (np.full(4, 1e-300), np.full(4, 2e-300)),
        (np.ones(4), 1 + np.full(4, 1e-9)),
    ],
    ids=["small", "large", "largest", "large float64", "small float64", "near float64"],
)
def test_sqnr_at_extreme_magnitudes(x, y):
    ratio = float(x[0]) / (float(x[0]) / 2 - float(y[0]) / 2) / 2
    assert sqnr_db(x, y) == pytest.approx(20 * math.log10(abs(ratio)), abs=1e-5)


def test_sqnr_of_infinities():
    one, infinite = jnp.ones(2), jnp.full(2, jnp.inf)
    assert sqnr_db(one, infinite) == -math.inf and math.isnan(sqnr_db(infinite, one))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_16_bits_are_computed_in_float32(dtype):
    logits, others = (jnp.asarray(np.random.default_rng(seed).standard_normal((3, 8)), dtype) for seed in range(2))
    wide, wide_others = logits.astype(jnp.float32), others.astype(jnp.float32)
    targets = jnp.array([1, 2, 3])
    np.testing.assert_array_equal(token_losses(logits, targets), token_losses(wide, targets))
    assert kl_divergence(logits, others) == kl_divergence(wide, wide_others)

"""Learned rounding: an independent version in numpy, the best of all roundings by brute force, and every scheme."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import Observation
from fewbit.methods import LearnedRounding
from tests.each_scheme import each_scheme
from tests.methods.test_gptq import inputs, moments, output_error, weight

K, N = 96, 40
FAST = ("int4_g64", "nvfp4")


def seen(x: np.ndarray) -> Observation:
    return Observation(hessian=moments(x), count=jnp.float32(len(x)))


@each_scheme(FAST)
def test_less_error_than_rounding_for_every_scheme(name):
    w, x, scheme = weight(N, K), inputs(), fb.scheme(name)
    q, start = LearnedRounding(rounds=60).quantized(w, scheme, (-1,), seen(x)), fb.quantize(w, scheme)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(q)] == [(a.shape, a.dtype) for a in jax.tree.leaves(start)]
    assert output_error(q, w, x) < 0.9 * output_error(start, w, x)


def descent(w: np.ndarray, hessian: np.ndarray, scale: np.ndarray, rounds: int) -> np.ndarray:
    """The offsets in float64, without clips: the codes of the best round of each row."""
    v, best, codes = np.zeros_like(w), np.full((len(w), 1), np.inf), np.zeros_like(w)
    for i in range(rounds):
        now = np.clip(np.round(w / scale + v), -8, 7)
        gradient = (now * scale - w) @ hessian
        error = np.sum(gradient * (now * scale - w), axis=1, keepdims=True)
        codes, best = np.where(error < best, now, codes), np.minimum(error, best)
        needed = gradient / (np.diagonal(hessian) * scale)
        v = np.clip(v - (1 - i / rounds) / rounds * np.clip(needed, -1, 1), -0.5, 0.5)
    return codes


def test_codes_are_those_of_descent():
    """A code may differ where float32 and float64 fall on two sides of a tie, and what follows from it."""
    w, h = weight(N, K), moments(inputs())
    q = LearnedRounding(rounds=40, lowest=1.0).quantized(w, fb.scheme("int4"), (-1,), Observation(hessian=h))
    scale = np.asarray(q.scale, np.float64)
    expected = descent(np.asarray(w, np.float64), np.asarray(h, np.float64), scale, 40)
    codes = np.asarray(fb.dequantize(q), np.float64) / scale
    assert np.mean(np.abs(codes - expected) < 1e-3) > 0.98


def test_it_comes_near_the_best_of_all_roundings():
    """Rows of eight weights have 256 roundings each; at least half of what rounding loses is won back."""
    w, x = weight(32, 8), inputs(8, rows=64)
    q = LearnedRounding(lowest=1.0).quantized(w, fb.scheme("int4"), (-1,), seen(x))
    scale, h = np.asarray(q.scale, np.float64), np.asarray(moments(x), np.float64)
    below = np.floor(np.asarray(w, np.float64) / scale)
    errors = []
    for up in itertools.product((0, 1), repeat=8):
        e = np.clip(below + up, -8, 7) * scale - np.asarray(w, np.float64)
        errors.append(np.einsum("nk,kl,nl->n", e, h, e))
    best, nearest = np.min(errors, 0).sum(), output_error(fb.quantize(w, "int4"), w, x)
    assert best * (1 - 1e-5) <= output_error(q, w, x) < best + (nearest - best) / 2


def test_clips_help_where_outliers_set_the_scale():
    w, x = weight(N, K).at[:, 5].multiply(8), inputs()
    learned, alone = (
        LearnedRounding(rounds=60, lowest=low).quantized(w, fb.scheme("int3"), (-1,), seen(x)) for low in (0.5, 1.0)
    )
    assert output_error(learned, w, x) < output_error(alone, w, x)
    assert np.any(np.asarray(learned.scale) < np.asarray(alone.scale))


def test_layouts_and_repetition():
    w, x, method = weight(N, K), inputs(), LearnedRounding(rounds=20)
    q = method.quantized(w.astype(jnp.bfloat16), fb.scheme("int4_g64"), (-1,), seen(x))
    again = method.quantized(w.astype(jnp.bfloat16), fb.scheme("int4_g64"), (-1,), seen(x))
    assert q.dtype == jnp.bfloat16 and np.array_equal(q.codes, again.codes)
    experts = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), seen(x))
    both = method.quantized(jnp.stack([w, w]), fb.scheme("int4_g64"), (-1,), experts)
    np.testing.assert_array_equal(fb.dequantize(both)[0], fb.dequantize(both)[1])
    zeros = jax.tree.map(jnp.zeros_like, seen(x))
    unseen = method.quantized(w, fb.scheme("int4_g64"), (-1,), zeros)
    np.testing.assert_array_equal(unseen.codes, fb.quantize(w, "int4_g64").codes)


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_an_empty_weight(shape: tuple[int, int]):
    observation = Observation(hessian=jnp.zeros((shape[1], shape[1])), count=jnp.float32(0))
    q = LearnedRounding().quantized(jnp.zeros(shape), fb.scheme("int4_g64"), (-1,), observation)
    assert q.shape == shape and jax.tree.structure(q) == jax.tree.structure(fb.quantize(jnp.zeros(shape), "int4_g64"))


def test_what_is_refused():
    with pytest.raises(fb.QuantError, match="rounding needs the second moments of the inputs"):
        LearnedRounding().quantized(weight(4, 8), fb.scheme("int4"), (-1,), None)
    with pytest.raises(fb.QuantError, match="rounds is 0 and lowest 2; they must be 1 or more, and above 0 to 1"):
        LearnedRounding(rounds=0, lowest=2)

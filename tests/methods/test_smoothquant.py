"""SmoothQuant's scales against the formula of the paper."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import Observation
from fewbit.methods import ScaledProduct, SmoothQuant

ALL = jnp.arange(6)


def product(weight: np.ndarray, absmax: np.ndarray, axis: int = -1) -> ScaledProduct:
    seen = Observation(absmax=jnp.asarray(absmax))
    return ScaledProduct(jnp.asarray(weight), fb.scheme("int8"), axis, seen)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_formula(alpha):
    absmax, q, k = np.abs(normal(6)), normal(4, 6, seed=1), normal(2, 6, seed=2)
    s = SmoothQuant(alpha).scales([product(q, absmax), product(k, absmax)], ALL, 6)
    weights = np.maximum(np.abs(q).max(0), np.abs(k).max(0))
    np.testing.assert_allclose(s, absmax**alpha / weights ** (1 - alpha), rtol=1e-6)
    assert s.dtype == jnp.float32


def test_half_makes_the_ranges_of_input_and_weight_equal():
    absmax, w = np.abs(normal(6)), normal(4, 6, seed=1)
    s = np.asarray(SmoothQuant().scales([product(w, absmax)], ALL, 6))
    np.testing.assert_allclose(absmax / s, np.abs(w * s).max(0), rtol=1e-6)


def test_channels_that_are_always_zero_are_not_scaled():
    absmax, w = np.float32([0, 1, 2, 3, 4, 5]), normal(4, 6)
    w[:, 2] = 0
    s = np.asarray(SmoothQuant().scales([product(w, absmax)], ALL, 6))
    assert s[0] == s[2] == 1 and np.isfinite(s).all() and (s > 0).all()


def test_experts_and_heads():
    absmax, w = np.abs(normal(3, 6)), normal(3, 6, 4, seed=1)  # experts [in, out]
    s = SmoothQuant().scales([product(w, absmax, axis=-2)], ALL, 6, by_expert=True)
    np.testing.assert_allclose(s, np.sqrt(absmax / np.abs(w).max(2)), rtol=1e-6)
    together = SmoothQuant().scales([product(w, absmax, axis=-2)], ALL, 6)
    np.testing.assert_allclose(together, np.sqrt(absmax.max(0) / np.abs(w).max((0, 2))), rtol=1e-6)
    shared = SmoothQuant().scales([product(w[0].T, absmax[0])], jnp.array([0, 1, 2, 0, 1, 2]), 3)
    pairs = absmax[0].reshape(2, 3).max(0), np.abs(w[0]).max(1).reshape(2, 3).max(0)
    np.testing.assert_allclose(shared, np.sqrt(pairs[0] / pairs[1]), rtol=1e-6)


def test_alpha_is_checked():
    with pytest.raises(fb.QuantError, match=r"alpha is 1.5, must be from 0 to 1"):
        SmoothQuant(1.5)

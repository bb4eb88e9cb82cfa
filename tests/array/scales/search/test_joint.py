"""The joint search of scale and offset: never worse than min-max, near what a fine grid over both finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, MinMax
from fewbit.formats import FORMATS
from tests.array.scales.brute_force import special
from tests.conformance import array_laws as laws

_quantize = jax.jit(fb.quantize, static_argnums=1)


def scheme(calibration, zero_point: object, bits: int = 4) -> fb.Scheme:
    held = FORMATS[f"uint{bits}"] if zero_point == "whole" else "float32"
    return fb.Scheme(FORMATS[f"uint{bits}"], {...: 1, -1: 16}, zero_point=held, calibration=calibration)


def rows(count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    parts = [rng.exponential(1, (count, 16)) - 0.3, rng.standard_t(3, (count, 16)), rng.standard_normal((count, 16)) + 2]
    return np.concatenate(parts).astype(np.float32)


def error_of(q: fb.QArray, x: np.ndarray) -> np.ndarray:
    return ((laws.numpy_dequantize(q).astype(np.float64) - x) ** 2).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("zero_point", ["float", "whole"])
def test_never_worse_than_min_max_and_near_a_fine_grid(zero_point: str):
    x = np.concatenate([rows(40), special(16)[[1, 2, 5, 6]]])
    found, plain = (error_of(_quantize(jnp.asarray(x), scheme(c, zero_point)), x) for c in (MSE(), MinMax()))
    rounding = (x.astype(np.float64) ** 2).sum(1) * 2.0**-40
    # A whole zero point moves by steps, so there is less to gain.
    gain = 0.9 if zero_point == "float" else 0.95
    assert (found <= plain * (1 + 2.0**-14) + rounding).all() and found.sum() < gain * plain.sum()
    low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    best = np.full(len(x), np.inf)
    fractions = np.linspace(1, 0.3, 71)
    for below in fractions:
        for above in fractions:
            scale = (high * above - low * below) / 15
            offset = low * below
            if zero_point == "whole":
                offset = -np.clip(np.rint(-offset / np.where(scale > 0, scale, 1)), 0, 15) * scale
            safe = np.where(scale > 0, scale, 1)[:, None]
            q = np.clip(np.rint((x - offset[:, None]) / safe), 0, 15)
            best = np.minimum(best, ((q * safe + offset[:, None] - x) ** 2).sum(1))
    # A search, not a proof: single tiles may lose to the grid, all together do not.
    assert found.sum() < best.sum() * 1.01 and np.median(found / np.maximum(best, 1e-12)) < 1.01


@pytest.mark.slow
def test_weights_count():
    x = rows(20)
    weights = np.ones_like(x)
    weights[:, ::2] = 0.01
    q = jax.jit(lambda x, w: fb.quantize(x, scheme(MSE(), "float"), error_weights=w))(x, weights)
    plain = _quantize(jnp.asarray(x), scheme(MSE(), "float"))
    weighted, unweighted = (((laws.numpy_dequantize(r) - x) ** 2 * weights).sum() for r in (q, plain))
    assert weighted < 0.9 * unweighted

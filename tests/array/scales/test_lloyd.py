"""Learned codebooks: fixed points of Lloyd's rounds, the same every time, and better than E2M1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, learned_codebook
from fewbit.errors import QuantError
from fewbit.formats import FORMATS, AbstractFormat

W = np.random.default_rng(0).standard_t(4, (128, 64)).astype(np.float32)


def error(x: np.ndarray, fmt: AbstractFormat, weights: np.ndarray | None = None) -> float:
    spec = fb.Scheme(fmt, {...: 1, -1: 16}, scale=FORMATS["e4m3fn"], tensor_scale=True, calibration=MSE())
    q = jax.jit(lambda x, w: fb.dequantize(fb.quantize(x, spec, error_weights=w)))(x, weights)
    squared = (np.asarray(q, np.float64) - x) ** 2
    return float((squared if weights is None else squared * weights).sum())


def test_every_number_is_the_mean_of_what_is_nearest():
    table = learned_codebook(W, tile=16)
    assert len(table.table) == 15 and table.bits == 4 and table.table == tuple(-v for v in reversed(table.table))
    magnitude = np.abs(W.astype(np.float64)).reshape(-1, 16)
    amax = magnitude.max(1, keepdims=True)
    # The table is in units of its largest number, which is the mean magnitude that goes to it.
    numbers = np.array(table.table[7:])
    nearest = np.abs((magnitude / amax)[..., None] - numbers * (top := _top(magnitude / amax, amax**2, numbers))).argmin(-1)
    for code in range(1, 8):
        held = nearest == code
        mean = (magnitude * amax)[held].sum() / np.broadcast_to(amax**2, held.shape)[held].sum()
        assert abs(mean - numbers[code] * top) < 1e-4


def _top(ratio: np.ndarray, weights: np.ndarray, numbers: np.ndarray) -> float:
    """The magnitude of the largest number, from its own condition."""
    top = 1.0
    for _ in range(50):
        held = ratio > (numbers[-1] + numbers[-2]) / 2 * top
        top = (ratio * weights)[held].sum() / np.broadcast_to(weights, held.shape)[held].sum()
    return top


@pytest.mark.slow
def test_it_is_deterministic_and_beats_e2m1():
    table = learned_codebook(W, tile=16)
    assert table == learned_codebook(jnp.asarray(W), tile=16) == learned_codebook(W.T, tile=16, axis=0)
    learned = error(W, table)
    assert learned < error(W, FORMATS["e2m1"])


def test_only_the_ratios_of_weights_count():
    """Also where all weights of a number's magnitudes together are below 1."""
    light = np.full(W.shape, 2.0**-30, np.float32)
    assert learned_codebook(W, tile=16, error_weights=light, rounds=5) == learned_codebook(W, tile=16, rounds=5)


@pytest.mark.slow
def test_weights_shape_it():
    weights = np.where(np.abs(W) < 0.5, 1.0, 0.01).astype(np.float32)
    weighted = learned_codebook(W, tile=16, error_weights=weights)
    assert error(W, weighted, weights) < error(W, learned_codebook(W, tile=16), weights)


@pytest.mark.parametrize(
    ("x", "bits", "message"),
    [
        (W, 9, "bits is 9; a symmetric codebook with zero has 2 to 8"),
        (np.full((2, 16), np.nan), 4, "x is not finite"),
        (np.ones((2, 16)), 4, "x has fewer than 7 different magnitudes"),
        (np.zeros((2, 16)), 2, "x has fewer than 1 different magnitudes"),
    ],
    ids=["bits", "nan", "constant", "zero"],
)
def test_what_is_refused(x: np.ndarray, bits: int, message: str):
    with pytest.raises(QuantError, match=message):
        learned_codebook(x, tile=16, bits=bits)


def test_a_tile_of_nothing_is_refused():
    with pytest.raises(QuantError, match="tile is 0, must be at least 1"):
        learned_codebook(W, tile=0)

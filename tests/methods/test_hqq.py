"""HQQ: an independent version in numpy, the hqq package, and every scheme."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales.minmax import MinMax
from fewbit.methods import HQQ
from tests.each_scheme import each_scheme

K, N, TILE = 96, 40, 32
FAST = ("int4_g64", "q4_1")


def heavy(*shape: int) -> jax.Array:
    """Weights with outliers."""
    rng = np.random.default_rng(3)
    return jnp.asarray(rng.standard_t(3, shape) * 0.3, jnp.float32)


def lp_error(q, w, power: float = 0.7) -> float:
    return float((np.abs(np.asarray(fb.dequantize(q), np.float64) - np.asarray(w, np.float64)) ** power).sum())


def published(w: np.ndarray, bits: int, rounds: int) -> np.ndarray:
    """The decoded weights of `optimize_weights_proximal_legacy` in float64, where each tile keeps its best zero point."""
    power, beta, most = 0.7, 10.0, 2**bits - 1
    low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
    inverse = most / (high - low)
    zero, best, error = -low * inverse, None, np.inf
    for _ in range(rounds + 1):
        codes = np.clip(np.round(w * inverse + zero), 0, most)
        found = (codes - zero) / inverse
        total = (np.abs(w - found) ** power).sum(-1, keepdims=True)
        best = found if best is None else np.where(total < error * (1 - 2.0**-16), found, best)
        error = np.where(total < error * (1 - 2.0**-16), total, error)
        e = w - found
        with np.errstate(divide="ignore"):
            shrunk = np.sign(e) * np.maximum(np.abs(e) - np.abs(e) ** (power - 1) / beta, 0)
        zero, beta = np.mean(codes - (w - shrunk) * inverse, -1, keepdims=True), beta * 1.01
    return best


def test_offsets_are_those_of_the_published_algorithm():
    """A code may differ where float32 and float64 round a tie, and then its tile."""
    scheme = fb.Scheme(fb.FORMATS["uint4"], {...: 1, -1: TILE}, zero_point="float32", calibration=MinMax(1.0, 0))
    w = heavy(N, K)
    q = HQQ().quantized(w, scheme, (-1,), None)
    expected = published(np.asarray(w, np.float64).reshape(N, -1, TILE), 4, 20).reshape(N, K)
    near = np.abs(np.asarray(fb.dequantize(q)) - expected) < 1e-4
    assert near.mean() > 0.97


@each_scheme(FAST)
def test_no_more_error_than_rounding_for_every_scheme(name):
    """In the norm that it minimizes; 2**-10 is for scales that are quantized themselves."""
    w, scheme = heavy(N, K), fb.scheme(name)
    q, start = HQQ().quantized(w, scheme, (-1,), None), fb.quantize(w, scheme)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(q)] == [(a.shape, a.dtype) for a in jax.tree.leaves(start)]
    assert lp_error(q, w) <= lp_error(start, w) * (1 + 2**-10)
    if name in FAST:
        assert lp_error(q, w) < 0.99 * lp_error(start, w)


def test_through_quantize_params_and_tables():
    """It needs no statistics, so that tables are quantized by it, too."""
    params = {"w": heavy(16, 64), "table": heavy(8, 64)}
    recipe = fb.Recipe((fb.Rule(".*", "int4_g64", axis=-1),))
    q = fb.quantize_params(params, recipe, method=HQQ())
    for name, x in params.items():
        alone = HQQ().quantized(x, fb.scheme("int4_g64"), (-1,), None)
        np.testing.assert_array_equal(q[name].codes, alone.codes)
        assert lp_error(q[name], x) < lp_error(fb.quantize(x, "int4_g64"), x)


@pytest.mark.parametrize("scheme", ["affine4", "iq4_nl", "binary"])  # formats with and without a zero
def test_zeros_stay_zero(scheme):
    q = HQQ().quantized(jnp.zeros((2, 64)), fb.scheme(scheme), (-1,), None)
    np.testing.assert_array_equal(fb.dequantize(q), np.zeros((2, 64)))


def test_settings():
    with pytest.raises(fb.QuantError, match=r"power is 1\.5, must be above 0 and at most 1"):
        HQQ(power=1.5)
    with pytest.raises(fb.QuantError, match="rounds 0; they must be above 0, at least 1, at least 1"):
        HQQ(rounds=0)


@pytest.mark.oracle
def test_no_more_error_than_the_hqq_package():
    """Its zero points are float32, one for all its tiles stops the search; ours keep the best of each tile."""
    pytest.importorskip("torch")
    optimize = pytest.importorskip("hqq.core.optimize", reason="hqq is not installed")
    import torch

    w = heavy(N, K)
    tiles = torch.tensor(np.asarray(w)).reshape(-1, TILE)
    low, high = tiles.amin(1, keepdim=True), tiles.amax(1, keepdim=True)
    scale = 15 / (high - low)
    codes, scale, zero = optimize.optimize_weights_proximal_legacy(tiles, scale, -low * scale, [0, 15], axis=1, device="cpu")
    theirs = ((codes - zero) / scale).numpy().reshape(N, K)
    scheme = fb.Scheme(fb.FORMATS["uint4"], {...: 1, -1: TILE}, zero_point="float32", calibration=MinMax(1.0, 0))
    ours = HQQ().quantized(w, scheme, (-1,), None)
    error = float((np.abs(theirs.astype(np.float64) - np.asarray(w, np.float64)) ** 0.7).sum())
    assert 0.9 * error < lp_error(ours, w) <= error * (1 + 1e-4)
    assert lp_error(ours, w) < 0.99 * lp_error(fb.quantize(w, scheme), w)

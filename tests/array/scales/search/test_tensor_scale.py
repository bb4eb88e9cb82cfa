"""The tensor scale of NVFP4 by search: never worse than one level of scales, nor than the tensor scale of the largest element."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE
from fewbit.array.scales.search import tensor_scale
from tests.array.scales.test_mx import SLACK

TWO_LEVELS = fb.scheme("nvfp4")
OF_LARGEST = dataclasses.replace(TWO_LEVELS, calibration=MSE(tensor="amax"))
ONE_LEVEL = dataclasses.replace(OF_LARGEST, tensor_scale=False)

_error = jax.jit(lambda x, scheme: jnp.sum((fb.dequantize(fb.quantize(x, scheme)) - x) ** 2), static_argnums=1)


def weights(name: str) -> np.ndarray:
    draw = np.random.default_rng(0)
    shape = (64, 512)
    x = {
        "gaussian": lambda: draw.standard_normal(shape) * 0.02,
        "gaussian, large": lambda: draw.standard_normal(shape) * 37,
        "student t, 3": lambda: draw.standard_t(3, shape) * 0.02,
        "student t, 1.5": lambda: draw.standard_t(1.5, shape) * 0.02,
        "laplace": lambda: draw.laplace(size=shape) * 0.3,
        "uniform": lambda: draw.uniform(-1, 1, shape),
        "lognormal rows": lambda: draw.standard_normal(shape) * np.exp(draw.standard_normal((64, 1))) * 0.05,
        "lognormal rows, wider": lambda: draw.standard_normal(shape) * np.exp(2 * draw.standard_normal((64, 1))) * 0.05,
    }[name]()
    return x.astype(np.float32)


KINDS = (
    *("gaussian", "gaussian, large", "student t, 3", "student t, 1.5", "laplace", "uniform"),
    *("lognormal rows", "lognormal rows, wider"),
)


@pytest.mark.finding(39)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_never_worse_than_one_level_or_the_largest_element(kind: str):
    x = jnp.asarray(weights(kind))
    found = float(_error(x, TWO_LEVELS))
    assert found <= float(_error(x, OF_LARGEST)) * SLACK
    assert found <= float(_error(x, ONE_LEVEL)) * SLACK


@pytest.mark.finding(39)
def test_uniform_weights_gain_most():
    """No scale above that of the largest element is needed by Gaussian weights, but by uniform ones: a fifth of the error."""
    x = jnp.asarray(weights("uniform"))
    assert float(_error(x, TWO_LEVELS)) < 0.82 * float(_error(x, OF_LARGEST))


@pytest.mark.slow
@pytest.mark.finding(39)
@pytest.mark.parametrize("kind", ["gaussian", "lognormal rows, wider"])
def test_a_sample_decides_for_large_arrays(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_scale, "JUDGED_WHOLE", 2**12)
    monkeypatch.setattr(tensor_scale, "SAMPLE", 2**12)
    x = jnp.asarray(weights(kind)[:, :500])  # with a short last tile
    jax.clear_caches()
    for axis in (-1, 0):
        found, naive = (fb.quantize(jnp.moveaxis(x, -1, axis), scheme, axis=axis) for scheme in (TWO_LEVELS, OF_LARGEST))
        errors = [float(jnp.sum((fb.dequantize(q) - jnp.moveaxis(x, -1, axis)) ** 2)) for q in (found, naive)]
        # The sample has an eighth of the tiles; what it misses is a fraction of what candidates differ by, a percent or two.
        assert errors[0] <= errors[1] * 1.002
    jax.clear_caches()


def test_no_row_of_the_sample_counts_twice(monkeypatch: pytest.MonkeyPatch):
    """The rows of largest magnitude count once, and are not among those that stand for the rest."""
    monkeypatch.setattr(tensor_scale, "JUDGED_WHOLE", 2**9)
    monkeypatch.setattr(tensor_scale, "SAMPLE", 2**9)
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    x[:8] *= 100
    x[0] /= 10  # the last of the eight largest, and one of every eighth
    rows, _, _, counts = tensor_scale._judged(jnp.asarray(x), None, (1, 16), None)
    counted = np.asarray(rows)[np.asarray(counts) > 0]
    assert len(np.unique(counted, axis=0)) == len(counted)
    assert counts.sum() == 64


def test_how_many_rows_a_sample_has(monkeypatch: pytest.MonkeyPatch):
    """None of a small array or of few rows; of long rows eight of each kind, however many elements these are."""
    monkeypatch.setattr(tensor_scale, "JUDGED_WHOLE", 2**12)
    monkeypatch.setattr(tensor_scale, "SAMPLE", 2**10)

    def judged(*shape: int) -> tuple[tuple[int, ...], bool]:
        rows, _, _, counts = tensor_scale._judged(jnp.ones(shape), None, (1, 16), None)
        return rows.shape, counts is not None

    assert judged(128, 32) == ((128, 32), False)
    assert judged(129, 32) == ((32, 32), True)
    assert judged(17, 512) == ((16, 512), True)
    assert judged(16, 512) == ((16, 512), False)


def test_error_weights_count():
    """Rows without a weight have no say, however large they are."""
    x = np.concatenate([weights("lognormal rows")[:32], 100 * weights("uniform")[:32]])
    counted = np.concatenate([np.ones(32), np.zeros(32)])[:, None].astype(np.float32)
    q = fb.quantize(jnp.asarray(x), TWO_LEVELS, error_weights=counted)
    naive = fb.quantize(jnp.asarray(x), OF_LARGEST, error_weights=counted)
    errors = [((np.asarray(fb.dequantize(one)) - x)[:32] ** 2).sum() for one in (q, naive)]
    assert errors[0] <= errors[1] * SLACK


def test_zeros_nan_and_the_ends_of_float32():
    assert fb.quantize(jnp.zeros((2, 32)), TWO_LEVELS).tensor_scale.item() == 1
    x = weights("uniform")[:4, :64]
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    assert np.isnan(np.asarray(fb.dequantize(fb.quantize(jnp.asarray(spoiled), TWO_LEVELS)))).sum() == 16
    for size in (3e38, 1e-30):
        dense = np.asarray(fb.dequantize(fb.quantize(jnp.asarray(x / np.abs(x).max() * np.float32(size)), TWO_LEVELS)))
        assert np.isfinite(dense).all() and np.abs(dense).max() > 0.8 * size


def test_how_it_is_chosen_is_one_of_two_words():
    with pytest.raises(fb.QuantError, match="must be 'search' or 'amax'"):
        MSE(tensor="other")

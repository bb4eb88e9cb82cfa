"""The Hessian objective: exact over every stored scale, never worse than its start, blind to units, bytes as any QArray."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError, UnsupportedError
from fewbit.formats import FORMATS
from tests.array.scales.brute_force import CHUNK, nearest, numbers_of, stored
from tests.conformance import array_laws as laws

SLACK = 1 + 2.0**-12
"""`r^T H r` of correlated activations cancels up to a factor of the condition number, some hundred here."""

_quantize = jax.jit(fb.quantize, static_argnums=1)
_with_hessian = jax.jit(fb.quantize_with_hessian, static_argnums=1, static_argnames=("rounds", "axis"))


def activations(width: int, count: int = 300) -> np.ndarray:
    """Correlated, with columns of very different size."""
    rng = np.random.default_rng(1)
    mixing = np.eye(width) + 0.6 * rng.standard_normal((width, width)) / np.sqrt(width)
    return (rng.standard_normal((count, width)) @ mixing * rng.lognormal(0, 0.7, width)).astype(np.float32)


W = np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32)
X = activations(64)


def products_of_inputs(tile: int) -> np.ndarray:
    """`X^T X` of each block, float64: `[block, k, k]`."""
    x = X.astype(np.float64).reshape(len(X), -1, tile)
    return np.einsum("tbk,tbl->bkl", x, x)


def output_errors(q: fb.QArray, tile: int, w: np.ndarray = W) -> np.ndarray:
    """`|X r|**2` of each block of each row, float64: `[row, block]`."""
    r = (laws.numpy_dequantize(q).astype(np.float64) - w).reshape(len(w), -1, tile)
    return np.einsum("rbk,rbk->rb", np.einsum("rbk,bkl->rbl", r, products_of_inputs(tile), optimize=True), r)


SCHEMES = {
    "nvfp4": (fb.scheme("nvfp4"), 16),
    "mxfp4": (fb.scheme("mxfp4"), 32),
    "nf4": (fb.Scheme(FORMATS["nf4"], {...: 1, -1: 16}), 16),
}


def brute_force(spec: fb.Scheme, tile: int, unit: float, w: np.ndarray) -> np.ndarray:
    """The least error of each block over all stored scales, every element rounded to the nearest."""
    numbers, h = numbers_of(spec.format.name), products_of_inputs(tile)
    w = w.astype(np.float64).reshape(len(w), -1, tile)
    best = np.full(w.shape[:2], np.inf)
    for first in range(0, len(w), CHUNK):
        rows = slice(first, first + CHUNK)
        for scale in stored(spec.scale.name):
            scale = np.float64(np.float32(scale * unit))
            r = nearest(w[rows] / scale, numbers) * scale - w[rows]
            error = np.einsum("rbk,rbk->rb", np.einsum("rbk,bkl->rbl", r, h, optimize=True), r)
            best[rows] = np.minimum(best[rows], error)
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_no_stored_scale_is_better(name: str, block_count: int):
    spec, tile = SCHEMES[name]
    w = np.random.default_rng(3).standard_t(4, (4 * block_count * tile // 64, 64)).astype(np.float32)
    q = _with_hessian(w, spec, fb.hessian_blocks(jnp.asarray(X), tile), rounds=0)
    unit = 1.0 if q.tensor_scale is None else np.asarray(q.tensor_scale).item()
    assert (output_errors(q, tile, w) <= brute_force(spec, tile, unit, w) * SLACK).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_each_stage_is_never_worse(name: str):
    spec, tile = SCHEMES[name]
    hessian = fb.hessian_blocks(jnp.asarray(X), tile)
    stages = [_quantize(jnp.asarray(W), spec), *(_with_hessian(W, spec, hessian, rounds=r) for r in (0, 8))]
    errors = [output_errors(q, tile) for q in stages]
    for before, after in itertools.pairwise(errors):
        assert (after <= before * SLACK).all() and after.sum() < 0.98 * before.sum()
    assert all(jax.tree.structure(q) == jax.tree.structure(stages[0]) for q in stages)
    assert all(a.shape == b.shape for a, b in zip(jax.tree.leaves(stages[0]), jax.tree.leaves(stages[2]), strict=True))


def test_the_magnitude_of_activations_and_weights_does_not_matter():
    spec, tile = SCHEMES["mxfp4"]
    hessian = fb.hessian_blocks(jnp.asarray(X), tile)
    plain = _with_hessian(W, spec, hessian, rounds=2)
    for factor, unit in ((2.0**-40, 1.0), (2.0**30, 2.0**-30)):
        other = _with_hessian(W * np.float32(unit), spec, hessian * np.float32(factor), rounds=2)
        assert np.array_equal(plain.codes, other.codes)
        assert np.array_equal(laws.scale_of(plain) * unit, laws.scale_of(other))


@pytest.mark.slow
def test_other_axes_short_tiles_and_stacks():
    w = np.random.default_rng(2).standard_normal((2, 40, 6)).astype(np.float32)
    x = activations(40)
    spec = fb.scheme("nvfp4")
    hessian = fb.hessian_blocks(jnp.asarray(x), 16)
    assert hessian.shape == (3, 16, 16)
    q = _with_hessian(w, spec, hessian, axis=-2, rounds=2)
    rows = _with_hessian(w.swapaxes(1, 2).reshape(12, 40), spec, hessian, rounds=2)
    assert q.shape == w.shape and q.scale.shape == (2, 3, 6)
    assert np.array_equal(laws.numpy_dequantize(q).swapaxes(1, 2).reshape(12, 40), laws.numpy_dequantize(rows))


def test_an_axis_shorter_than_its_tile():
    w, x = W[:4, :48], X[:, :48]
    q = _with_hessian(w, "nf4", fb.hessian_blocks(jnp.asarray(x), 64), rounds=1)
    plain = _quantize(jnp.asarray(w), "nf4")
    assert jax.tree.structure(q) == jax.tree.structure(plain) and q.scale.shape == plain.scale.shape
    better, error = (np.square((laws.numpy_dequantize(a).astype(np.float64) - w) @ x.T).sum(1) for a in (q, plain))
    assert (better <= error * SLACK).all() and better.sum() < 0.98 * error.sum()


@pytest.mark.slow
def test_special_tiles_stay_what_quantize_makes_of_them():
    w = W.copy()
    w[0], w[1, 3], w[2] = 0, np.nan, 0.002
    q = _with_hessian(w, "nvfp4", fb.hessian_blocks(jnp.asarray(X), 16), rounds=2)
    dense = laws.numpy_dequantize(q)
    assert (dense[0] == 0).all() and np.isnan(dense[1, :16]).all() and np.isnan(dense).sum() == 16
    nothing = _with_hessian(W, "nvfp4", jnp.zeros((4, 16, 16)), rounds=2)
    assert np.array_equal(nothing.codes, _quantize(jnp.asarray(W), fb.scheme("nvfp4")).codes)


@pytest.mark.parametrize(
    ("scheme", "shape", "rounds", "error", "message"),
    [
        ("nvfp4", (4, 16, 16), -1, QuantError, "rounds is -1, must be 0 or more"),
        ("nvfp4", (2, 16, 16), 1, QuantError, r"hessian has shape \(2, 16, 16\), expected \(4, 16, 16\)"),
        ("q4_1", (2, 32, 32), 1, UnsupportedError, "scheme q4_1 has a zero point or quantized scales"),
        ("nvfp4_16x16", (4, 16, 16), 1, UnsupportedError, r"the tiles \(16, 16\) of nvfp4_16x16 are not on axis 1 alone"),
    ],
    ids=["rounds", "shape", "zero-point", "tiles"],
)
def test_what_is_refused(scheme: str, shape: tuple[int, ...], rounds: int, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        fb.quantize_with_hessian(jnp.asarray(W), scheme, jnp.zeros(shape), rounds=rounds)


@pytest.mark.parametrize("shape", [(4, 0), (0, 64)], ids=str)
def test_an_empty_array_is_that_of_quantize(shape: tuple[int, int]):
    q = fb.quantize_with_hessian(jnp.zeros(shape), "int4", fb.hessian_blocks(jnp.ones((3, shape[1])), None))
    assert (q.shape, q.codes.size) == (shape, 0)


def test_long_tiles_of_float_scales_are_refused():
    spec = dataclasses.replace(fb.scheme("int8"), tile={...: 1, -1: None})
    with pytest.raises(UnsupportedError, match="a tile of 1024 elements has 131072 breakpoints in int8"):
        fb.quantize_with_hessian(jnp.ones((1, 1024)), spec, jnp.zeros((1, 1024, 1024)))


def test_x64_changes_no_byte() -> None:
    """Scales are computed in float32: with 64-bit defaults the sweep of E8M0 scales had two dtypes."""
    hessian = products_of_inputs(32).astype(np.float32)
    known = fb.quantize_with_hessian(W, "mxfp4", hessian, rounds=0)
    with jax.enable_x64(True):
        found = fb.quantize_with_hessian(W, "mxfp4", hessian, rounds=0)
    assert np.array_equal(found.codes, known.codes) and np.array_equal(found.scale, known.scale)

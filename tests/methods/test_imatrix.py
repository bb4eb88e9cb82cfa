"""Importance weights: less weighted error than rounding for every scheme, and the best of all scales where few are possible."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales.search.candidates import stored_scales
from fewbit.calibration import Observation
from fewbit.methods import IMatrix
from fewbit.methods.imatrix import channel_weights
from tests.each_scheme import each_scheme
from tests.methods.test_gptq import inputs, output_error, weight

K, N = 96, 40
FAST = ("int4_g64", "nvfp4", "q4_0", "q4_1")


def seen(x: np.ndarray) -> Observation:
    return Observation(squares=jnp.square(jnp.asarray(x)).sum(0), count=jnp.float32(len(x)))


def weighted_error(q, w, squares) -> float:
    """The squared error of the output if inputs were uncorrelated, in float64."""
    error = np.asarray(fb.dequantize(q), np.float64) - np.asarray(w, np.float64)
    return float((np.square(error) * np.asarray(squares, np.float64)).sum())


@pytest.mark.slow_after(1)
@each_scheme(FAST)
def test_no_more_weighted_error_than_rounding_for_every_scheme(name):
    """Each tile keeps its own scale where that is better; 2**-10 is for scales that are quantized themselves."""
    w, x, scheme = weight(N, K), inputs(), fb.scheme(name)
    observation = seen(x)
    q, start = IMatrix(damping=0.0).quantized(w, scheme, (-1,), observation), fb.quantize(w, scheme)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(q)] == [(a.shape, a.dtype) for a in jax.tree.leaves(start)]
    errors = [weighted_error(one, w, observation.squares) for one in (q, start)]
    assert errors[0] <= errors[1] * (1 + 2**-10)
    if scheme.format.bits <= 4:
        assert errors[0] < 0.999 * errors[1]


def test_the_error_of_the_product_falls():
    """`inputs` are correlated, so it need not fall by as much as the weighted error."""
    w, x = weight(N, K), inputs()
    for name in ("int4_g64", "q4_0"):
        q = IMatrix().quantized(w, fb.scheme(name), (-1,), seen(x))
        assert output_error(q, w, x) < 0.95 * output_error(fb.quantize(w, name), w, x), name


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_one_level"])
def test_scales_are_the_best_of_all_that_can_be_stored(name):
    """By brute force in numpy over every number of the scale format."""
    scheme, w, x = fb.scheme(name), weight(12, 64), inputs(64)
    squares = seen(x).squares
    q = IMatrix(damping=0.0).quantized(w, scheme, (-1,), seen(x))
    tile, numbers = scheme.tile[-1], np.unique(scheme.format.values())
    tiles = np.asarray(w, np.float64).reshape(12, -1, tile)
    importance = np.asarray(squares, np.float64).reshape(-1, tile)
    best = np.full(tiles.shape[:2], np.inf)
    for scale in stored_scales(scheme.scale):
        if 2.0**-20 < scale < 2.0**20:
            nearest = numbers[np.abs(tiles[..., None] / scale - numbers).argmin(-1)] * scale
            best = np.minimum(best, (np.square(nearest - tiles) * importance).sum(-1))
    error = (np.asarray(fb.dequantize(q), np.float64).reshape(tiles.shape) - tiles) ** 2
    np.testing.assert_allclose((error * importance).sum(-1), best, rtol=2**-15)


def test_equal_squares_change_nothing_where_the_scheme_searches():
    w = weight(N, K)
    q = IMatrix().quantized(w, fb.scheme("mxfp4"), (-1,), Observation(squares=jnp.full(K, 7.0), count=jnp.float32(7)))
    np.testing.assert_array_equal(q.codes, fb.quantize(w, "mxfp4").codes)
    np.testing.assert_array_equal(q.scale, fb.quantize(w, "mxfp4").scale)


def test_every_layout():
    """`[in, out]`, several contracted axes, experts with squares of their own, all-zero inputs."""
    w, x = weight(N, K), inputs()
    q, method = IMatrix().quantized(w, fb.scheme("int4_g32"), (-1,), seen(x)), IMatrix()
    turned = method.quantized(w.T, fb.scheme("int4_g32"), (-2,), seen(x))
    np.testing.assert_array_equal(fb.dequantize(turned).T, fb.dequantize(q))
    split = method.quantized(w.reshape(N, 3, 32), fb.scheme("int4_g32"), (-2, -1), seen(x))
    np.testing.assert_array_equal(fb.dequantize(split).reshape(N, K), fb.dequantize(q))
    others = seen(inputs(seed=5)).squares
    experts = Observation(squares=jnp.stack([seen(x).squares, others]), count=jnp.array([4.0, 5.0]))
    both = method.quantized(jnp.stack([w, w]), fb.scheme("int4_g32"), (-1,), experts)
    np.testing.assert_array_equal(fb.dequantize(both)[0], fb.dequantize(q))
    assert np.any(fb.dequantize(both)[1] != fb.dequantize(q))
    np.testing.assert_array_equal(channel_weights((2, 3), (-1,), jnp.zeros((2, 3)), 0.5, 1.0), np.ones((2, 3)))


@pytest.mark.parametrize("name", ["int4_g32", "q4_0", "nvfp4_one_level"])
def test_an_expert_without_tokens_is_rounded_to_nearest(name):
    """Also where the calibration of the scheme searches itself, as that of nvfp4_one_level."""
    w, squares = jnp.stack([weight(4, 64)] * 2), jnp.stack([jnp.arange(1, 65, dtype=jnp.float32), jnp.zeros(64)])
    q = IMatrix().quantized(w, fb.scheme(name), (-1,), Observation(squares=squares, count=jnp.array([9.0, 0.0])))
    found, rounded = fb.dequantize(q), fb.dequantize(fb.quantize(w, name))
    np.testing.assert_array_equal(found[1], rounded[1])
    assert not np.array_equal(found[0], rounded[0])


def test_through_quantize_params():
    rng = np.random.default_rng(0)
    params = {"layers": jnp.asarray(rng.standard_normal((2, K, K)), jnp.float32) / 8}

    def net(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]

    x = jnp.asarray(inputs(rows=64))
    plan = fb.plan(net, params, x, recipe="int4_g64")
    stats = fb.observe(net, params, [x], "int4_g64", collect=IMatrix.collect)
    np.testing.assert_allclose(stats["layers"].squares[0], np.square(np.asarray(x)).sum(0), rtol=1e-5)
    q = fb.quantize_params(params, plan, method=IMatrix(), stats=stats)
    nearest = fb.quantize_params(params, plan)
    for layer in range(2):
        errors = [
            weighted_error(one["layers"][layer], params["layers"][layer], stats["layers"].squares[layer][:, None])
            for one in (q, nearest)
        ]
        assert errors[0] < 0.95 * errors[1]


def test_what_is_refused():
    w, method = weight(4, 8), IMatrix()
    with pytest.raises(fb.QuantError, match=r"imatrix needs the squares of the inputs; fb.observe with collect"):
        method.quantized(w, fb.scheme("int4"), (-1,), None)
    with pytest.raises(
        fb.QuantError, match=r"statistics have shape \(9,\), and a weight \(4, 8\) that contracts axes \(1,\) needs \(8,\)"
    ):
        method.quantized(w, fb.scheme("int4"), (-1,), Observation(squares=jnp.ones(9)))
    with pytest.raises(fb.QuantError, match=r"damping is -1, must be 0 or more"):
        dataclasses.replace(method, damping=-1)

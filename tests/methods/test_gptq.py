"""GPTQ: the algorithm of the paper code for code, less output error than rounding, every layout and scheme."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.qarray import QArray
from fewbit.calibration import Observation
from fewbit.methods import GPTQ
from fewbit.methods.gptq import column_order, factored, quantize_columns
from tests.each_scheme import each_scheme

K, N = 96, 40


def inputs(length: int = K, rows: int = 400, seed: int = 0) -> np.ndarray:
    """Correlated inputs whose channels differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, length)) * np.exp(rng.standard_normal(length))
    return (x @ (np.eye(length) + 0.5 * rng.standard_normal((length, length)) / length**0.5)).astype(np.float32)


def weight(*shape: int, seed: int = 1) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def moments(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.T @ x)


gptq = functools.partial(quantize_columns, axis=(-1,), damping=0.01, act_order=True)


def output_error(q: QArray, w: jax.Array, x: np.ndarray) -> float:
    """The squared error of `x @ w.T`, in float64."""
    error = np.asarray(fb.dequantize(q), np.float64) - np.asarray(w, np.float64)
    return float(np.square(x.astype(np.float64) @ error.T).sum())


def published(
    w: np.ndarray, hessian: np.ndarray, damping: float, scale: np.ndarray | None, order: np.ndarray, *, tile: int = 0
) -> np.ndarray:
    """Algorithm 1 of the paper in float64: the inverse of H, its Cholesky factor, and one update a column.

    With a tile its int4 scale is that of the weights as updated so far, and the result is the weights in place of the codes.
    """
    w, hessian = w[:, order].astype(np.float64), hessian[np.ix_(order, order)].astype(np.float64)
    hessian += damping * np.trace(hessian) / len(hessian) * np.eye(len(hessian))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    codes, values = np.zeros(w.shape), np.zeros(w.shape)
    for k in range(w.shape[1]):
        if tile and k % tile == 0:
            scale = np.abs(w[:, k : k + tile]).max(1) / 7.5
        codes[:, k] = np.clip(np.round(w[:, k] / scale), -8, 7)
        error = (w[:, k] - codes[:, k] * scale) / upper[k, k]
        w[:, k + 1 :] -= np.outer(error, upper[k, k + 1 :])
        values[:, k] = codes[:, k] * scale
    return (values if tile else codes)[:, np.argsort(order)]


def test_weights_of_one_shape_share_a_program():
    compiled = []

    def on_event(name: str, _: float, **__: object) -> None:
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    first, *others = [(weight(N, K, seed=seed), moments(inputs(seed=seed))) for seed in range(3)]
    jax.block_until_ready(gptq(first[0], fb.scheme("int3_g32"), first[1], act_order=True))
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        for w, h in others:
            jax.block_until_ready(gptq(w, fb.scheme("int3_g32"), h, act_order=True))
        assert not compiled
        jax.block_until_ready(gptq(others[0][0][:-1], fb.scheme("int3_g32"), others[0][1], act_order=True))
        assert compiled  # another shape
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("act_order", [False, True])
def test_codes_are_those_of_the_published_algorithm(act_order):
    """A code may differ where float32 and float64 fall on two sides of a tie, and the columns after it."""
    w, h = weight(N, K), moments(inputs())
    q = gptq(w, fb.scheme("int4"), h, act_order=act_order)
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(K)
    scale = np.asarray(q.scale)[:, 0].astype(np.float64)
    expected = published(np.asarray(w), np.asarray(h), 0.01, scale, order)
    codes = np.asarray(fb.dequantize(q), np.float64) / scale[:, None]
    assert np.mean(np.abs(codes - expected) < 1e-3) > 0.995


def test_scales_of_tiles_are_those_of_the_published_algorithm():
    """A code may differ as above, and then the scales of that row after it. Other scales of the last two tiles leave a third equal."""
    w, h = weight(N, K), moments(inputs())
    q = gptq(w, fb.scheme("int4_g32"), h, act_order=False)
    expected = published(np.asarray(w), np.asarray(h), 0.01, None, np.arange(K), tile=32)
    difference = np.abs(np.asarray(fb.dequantize(q), np.float64) - expected)
    assert np.mean(difference < 1e-3 * np.abs(expected).max()) > 0.95


FAST = ("int4_g64", "nf4", "nvfp4", "q4_1", "ternary", "nf4_dq", "fp8_tensor")


@pytest.mark.slow_after(1)
@each_scheme(FAST)
def test_less_error_than_rounding_for_every_scheme(name):
    w, x = weight(N, K), inputs()
    scheme = fb.scheme(name)
    q, start = gptq(w, scheme, moments(x)), fb.quantize(w, scheme)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(q)] == [(a.shape, a.dtype) for a in jax.tree.leaves(start)]
    assert output_error(q, w, x) < 0.9 * output_error(start, w, x)


@pytest.mark.slow
def test_every_layout():
    """`[in, out]`, several contracted axes, experts with a Hessian each, a short last tile, tiles of rows."""
    x = inputs()

    def ratio(w, scheme, axis, rows, hessian=None):
        """The output errors of both, for weights of which `rows` gives `[N, K]`."""
        hessian = moments(x) if hessian is None else hessian
        q = gptq(w, fb.scheme(scheme), hessian, axis=axis)
        errors = [
            output_error_of(rows(fb.dequantize(one)), rows(w), hessian) for one in (q, fb.quantize(w, scheme, axis=axis))
        ]
        return errors[0] / errors[1]

    def output_error_of(a, b, hessian):
        error = np.asarray(a - b, np.float64)
        return np.einsum("...nk,...kl,...nl->...", error, np.asarray(hessian, np.float64), error).sum()

    w = weight(N, K)
    assert ratio(w.T, "int4_g32", (-2,), jnp.transpose) < 0.8
    np.testing.assert_array_equal(
        fb.dequantize(gptq(w.T, fb.scheme("nvfp4"), moments(x), axis=(-2,))).T,
        fb.dequantize(gptq(w, fb.scheme("nvfp4"), moments(x))),
    )
    heads = weight(3, 32, N)
    assert ratio(heads, "nvfp4", (-3, -2), lambda w: w.reshape(K, N).T) < 0.8
    assert ratio(heads, "int4", (-3, -2), lambda w: w.reshape(K, N).T) < 0.8
    experts, each = weight(3, N, K), jnp.stack([moments(inputs(seed=i)) for i in range(3)])
    for scheme in ("int4_g32", "nvfp4", "int4"):
        assert ratio(experts, scheme, (-1,), lambda w: w, each) < 0.8
    assert ratio(weight(N, K), "int4_g64", (-1,), lambda w: w) < 0.8  # tiles of 64 and 32
    assert ratio(weight(N, K), "nvfp4_16x16", (-1,), lambda w: w) < 0.8


def test_experts_are_quantized_as_one_by_one():
    experts, each = weight(3, N, K), jnp.stack([moments(inputs(seed=i)) for i in range(3)])
    together = fb.dequantize(gptq(experts, fb.scheme("int4_g32"), each))
    for one, hessian, expected in zip(experts, each, together, strict=True):
        alone, root = (
            fb.dequantize(gptq(one, fb.scheme("int4_g32"), hessian)),
            np.linalg.cholesky(np.asarray(hessian, np.float64)),
        )
        errors = [np.square((np.asarray(q, np.float64) - one) @ root).sum() for q in (alone, expected)]
        assert errors[0] == pytest.approx(
            errors[1], rel=0.1
        )  # a sum of another order may round the other way, and so do the next


def test_inputs_that_are_always_zero_leave_columns_rounded_to_nearest():
    w, x = weight(N, K), inputs()
    x[:, 32:64] = 0
    q = gptq(w, fb.scheme("int4_g32"), moments(x))
    np.testing.assert_array_equal(fb.dequantize(q)[:, 32:64], fb.dequantize(fb.quantize(w, "int4_g32"))[:, 32:64])
    nothing = gptq(w, fb.scheme("int4_g32"), jnp.zeros((K, K)))
    np.testing.assert_array_equal(fb.dequantize(nothing), fb.dequantize(fb.quantize(w, "int4_g32")))


def test_a_singular_hessian_is_damped_more():
    w, x = weight(N, K), inputs(rows=5)
    q = gptq(w, fb.scheme("int4_g32"), moments(x), damping=0.0)
    assert np.isfinite(fb.dequantize(q)).all()
    assert output_error(q, w, x) < 0.1 * output_error(fb.quantize(w, "int4_g32"), w, x)


def test_factors():
    h = moments(inputs())
    upper, diagonal = map(np.asarray, factored(h, 0.0))
    np.testing.assert_array_equal(np.tril(upper, -1), 0)
    np.testing.assert_allclose(np.diag(upper), 1, rtol=1e-6)
    product = upper * diagonal @ upper.T
    # K products of float32 numbers are summed, each rounded by half a step.
    np.testing.assert_allclose(product, h / jnp.trace(h) * K, atol=K * 2.0**-24 * np.abs(product).max())


def test_columns_of_a_tile_stay_together():
    order = np.asarray(column_order(jnp.array([[1.0, 5, 2, 2, 9, 0, 100, 3]]), 3))[0]
    assert order.tolist() == [4, 3, 5, 1, 2, 0, 6, 7]
    assert np.asarray(column_order(jnp.array([[1.0, 3, 2]]), 1))[0].tolist() == [1, 2, 0]


def test_a_power_of_two_of_the_hessian_changes_nothing():
    w, h = weight(N, K), moments(inputs())
    codes = [gptq(w, fb.scheme("nvfp4"), h * factor).codes for factor in (1.0, 2.0**40, 2.0**-40)]
    np.testing.assert_array_equal(codes[0], codes[1])
    np.testing.assert_array_equal(codes[0], codes[2])


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4"])
def test_a_weight_without_rows(name):
    seen = Observation(hessian=jnp.eye(K), count=jnp.float32(1))
    q = GPTQ().quantized(jnp.zeros((0, K)), fb.scheme(name), (-1,), seen)
    assert q.shape == (0, K) and jax.tree.structure(q) == jax.tree.structure(fb.quantize(jnp.zeros((0, K)), name))


def test_what_it_refuses():
    w, h = weight(N, K), moments(inputs())
    with pytest.raises(
        fb.QuantError, match=r"the statistics have shape \(95,\), and a weight \(40, 96\) that contracts axes \(1,\)"
    ):
        gptq(w, fb.scheme("int4"), h[1:, 1:])
    with pytest.raises(fb.UnsupportedError, match="which are no tiles of a matrix"):
        gptq(weight(4, 10, K), fb.scheme("int4").with_tiles((2, 5, 32), -1), h)
    shared = fb.Scheme(fb.FORMATS["int4"], {-1: 32})  # one scale for a column of tiles, of all experts
    with pytest.raises(fb.UnsupportedError, match="has scales that several matrices share"):
        gptq(weight(3, N, K), shared, jnp.stack([h] * 3))
    with pytest.raises(fb.QuantError, match="damping is -1"):
        GPTQ(damping=-1)
    with pytest.raises(fb.QuantError, match="gptq needs the second moments"):
        GPTQ().quantized(w, fb.scheme("int4"), (-1,), None)

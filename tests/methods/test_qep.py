"""QEP: the least-squares weight for the quantized inputs, and less error of the float product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import Observation
from fewbit.methods import GPTQ, HQQ, QEP, RTN
from tests.methods.test_gptq import inputs, weight

K, N = 96, 40
SCHEME = fb.scheme("int4_g64")


def noisy(x: np.ndarray, seed: int = 7) -> np.ndarray:
    """Inputs with the errors of layers before: correlated, since those layers mix channels."""
    rng = np.random.default_rng(seed)
    return (x + x @ (0.1 * rng.standard_normal((K, K)) / K**0.5)).astype(np.float32)


def seen(exact: np.ndarray, x: np.ndarray) -> Observation:
    return Observation(hessian=jnp.asarray(x.T @ x), cross=jnp.asarray(exact.T @ x), count=jnp.float32(len(x)))


def output_error(q, w, exact: np.ndarray, x: np.ndarray) -> float:
    """The squared error of `x @ q.T` against the float product, in float64."""
    wanted = exact.astype(np.float64) @ np.asarray(w, np.float64).T
    return float(np.square(x.astype(np.float64) @ np.asarray(fb.dequantize(q), np.float64).T - wanted).sum())


@pytest.mark.parametrize("method", [RTN(), GPTQ()], ids=["rtn", "gptq"])
def test_less_error_of_the_float_product_than_the_method_alone(method):
    exact, w = inputs(), weight(N, K)
    x = noisy(exact)
    observation = seen(exact, x)
    alone = method.quantized(w, SCHEME, (-1,), observation)
    corrected = QEP(method).quantized(w, SCHEME, (-1,), observation)
    assert jax.tree.structure(corrected) == jax.tree.structure(alone)
    assert output_error(corrected, w, exact, x) < 0.9 * output_error(alone, w, exact, x)


def test_the_weight_is_that_of_least_squares():
    """`float32` codes of 8 bits are fine enough to see it: numpy's solution in float64, the damping as extra tokens."""
    exact, w = inputs(), weight(N, K)
    x, damping = noisy(exact), 0.01
    small = np.eye(K) * (damping * np.trace(x.T.astype(np.float64) @ x) / K) ** 0.5
    y, f = np.vstack([x, small]), np.vstack([exact, small])
    expected = np.linalg.lstsq(y, f.astype(np.float64) @ np.asarray(w, np.float64).T, rcond=None)[0].T
    for strength in (1.0, 0.5):
        method = QEP(RTN(), strength=strength, damping=damping)
        q = method.quantized(w, fb.scheme("int8"), (-1,), seen(exact, x))
        wanted = np.asarray(w) + strength * (expected - np.asarray(w))
        step = np.abs(np.asarray(q.scale)) / 2
        assert np.all(
            np.abs(np.asarray(fb.dequantize(q)) - wanted) <= step * 1.05
        )  # float32 solves within a fiftieth of a step


def test_layouts_and_what_is_not_corrected():
    exact, w = inputs(), weight(N, K)
    observation = seen(exact, noisy(exact))
    q = QEP().quantized(w, SCHEME, (-1,), observation)
    turned = QEP().quantized(w.T, SCHEME, (-2,), observation)
    assert np.mean(np.isclose(fb.dequantize(turned).T, fb.dequantize(q), rtol=1e-5)) > 0.98  # sums in another order
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), observation)
    both = QEP().quantized(jnp.stack([w, w]), SCHEME, (-1,), stacked)
    assert np.mean(np.isclose(fb.dequantize(both)[1], fb.dequantize(q), rtol=1e-5)) > 0.98
    equal = dataclasses.replace(observation, cross=observation.hessian)
    for without in (dataclasses.replace(observation, cross=None), equal):
        plain = QEP().quantized(w, SCHEME, (-1,), without)
        np.testing.assert_array_equal(fb.dequantize(plain), fb.dequantize(GPTQ().quantized(w, SCHEME, (-1,), without)))
    assert QEP().quantized(w.astype(jnp.bfloat16), SCHEME, (-1,), observation).dtype == jnp.bfloat16
    zeros = jax.tree.map(jnp.zeros_like, observation)
    assert np.isfinite(fb.dequantize(QEP().quantized(w, SCHEME, (-1,), zeros))).all()


@pytest.mark.parametrize("shape", [(0, 8), (4, 0)])
def test_an_empty_weight(shape: tuple[int, int]):
    moments = jnp.zeros((shape[1], shape[1]))
    q = QEP().quantized(jnp.zeros(shape), SCHEME, (-1,), Observation(hessian=moments, cross=moments, count=jnp.float32(0)))
    assert q.shape == shape and jax.tree.structure(q) == jax.tree.structure(fb.quantize(jnp.zeros(shape), SCHEME))


def test_what_is_refused():
    with pytest.raises(fb.QuantError, match="qep needs the second moments of quantized inputs"):
        QEP().quantized(weight(4, 8), SCHEME, (-1,), None)
    with pytest.raises(fb.QuantError, match=r"strength is 2 and damping 0.01; they must be 0 to 1, and above 0"):
        QEP(strength=2)
    with pytest.raises(
        fb.QuantError, match="qep takes methods of the Hessian or of no data, such as gptq; imatrix needs other statistics"
    ):
        QEP(fb.methods.IMatrix())
    assert QEP(HQQ()).method == HQQ()
    w = {"w": weight(8, 64)}
    with pytest.raises(fb.QuantError, match="cross compares two models"):
        fb.observe(lambda w, x: x @ w["w"].T, w, [jnp.ones((2, 64))], "int4", collect=QEP.collect)

"""Products with low-bit gradients beside AQT's and Qwix's: the same formulas, so nearly the same numbers.

Scales that are off by an ulp round a few elements at a midpoint the other way, so the numbers cannot be equal. What is asked is
that ours lie much nearer to theirs than either lies to the product of floats.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.formats import FORMATS
from tests.oracles.comparing import lenient_jax

pytestmark = pytest.mark.oracle

NUMBERS = (((2,), (0,)), ((), ()))
SIZES = jnp.array([5, 0, 6, 4], jnp.int32)


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def with_largest(x, *axes, magnitude=6.0):
    """The array with its largest elements positive along each axis: at the negative end of int8, packages round a tie apart."""
    for axis in axes:
        x = x.at[(*(slice(None),) * axis, 0)].set(magnitude)
    return x


def with_gradients(product, lhs, rhs):
    """A product and both its gradients, for a fixed incoming gradient."""

    def both(lhs, rhs):
        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(with_largest(normal(*out.shape, seed=2), 0, out.ndim - 1, magnitude=20.0).astype(out.dtype))

    return jax.jit(both)(lhs, rhs)


def assert_near(ours, theirs, floats):
    for a, b, exact in zip(ours, theirs, floats, strict=True):
        error = jnp.linalg.norm(b - exact)
        assert error > 1e-3 * jnp.linalg.norm(exact), "theirs is quantized"
        assert jnp.linalg.norm(a - b) < 0.1 * error


# --- AQT ---

AQT8 = fb.scheme("int8_aqt")
"""AQT's int8: codes -127 .. 127, the largest element at the edge of the last one."""


def test_aqt_int8_in_all_three_products():
    config = pytest.importorskip("aqt.jax.v2.config")
    theirs = config.fully_quantized(use_fwd_quant=False, use_stochastic_rounding=False)
    arm = fb.Arm(AQT8, operand=AQT8)
    # Gradients of saturated elements are the straight ones in AQT, too.
    policy = fb.Policy(AQT8, AQT8, dlhs=arm, drhs=arm, clips_gradient=False)
    x, w = with_largest(normal(2, 6, 64), 2), with_largest(normal(64, 16, seed=1), 0)
    with lenient_jax():
        other = with_gradients(lambda x, w: theirs(x, w, NUMBERS), x, w)
    ours = with_gradients(lambda x, w: fb.dot_general(x, w, NUMBERS, policy=policy), x, w)
    assert_near(ours, other, with_gradients(lambda x, w: x @ w, x, w))


def test_aqt_quantizes_the_codes_of_the_forward_pass_twice_and_we_do_not():
    config = pytest.importorskip("aqt.jax.v2.config")
    theirs = config.fully_quantized(use_fwd_quant=True, use_stochastic_rounding=False)
    policy = fb.Policy(AQT8, AQT8, dlhs=fb.Arm(AQT8), drhs=fb.Arm(AQT8), clips_gradient=False)
    x, w = with_largest(normal(2, 6, 64), 2), with_largest(normal(64, 16, seed=1), 0)
    with lenient_jax():
        _, other, _ = with_gradients(lambda x, w: theirs(x, w, NUMBERS), x, w)
    _, ours, _ = with_gradients(lambda x, w: fb.dot_general(x, w, NUMBERS, policy=policy), x, w)
    _, exact, _ = with_gradients(lambda x, w: x @ w, x, w)
    assert jnp.linalg.norm(ours - exact) < jnp.linalg.norm(other - exact)
    # Theirs: the codes themselves, as numbers, in int8 along the gradient's contraction.
    q = fb.quantize(w, AQT8, axis=0)
    g = with_largest(normal(2, 6, 16, seed=2), 0, 2, magnitude=20.0)
    folded = fb.fake_quant(g * q.scale[None], AQT8, axis=2)
    twice = fb.fake_quant(fb.dequantize(q) / q.scale, AQT8, axis=1)
    assert_near([folded @ twice.T], [other], [exact])


def test_aqt_config_v3_but_for_its_noise():
    config = pytest.importorskip("aqt.jax.v2.config")
    theirs = config.config_v3()
    config.set_stochastic_rounding(theirs, False, False, "jax.uniform")
    policy = fb.Policy(AQT8, AQT8, dlhs=fb.Arm(AQT8, operand=AQT8), drhs=fb.Arm(operand="original"), clips_gradient=False)
    x, w = with_largest(normal(2, 6, 64), 2), with_largest(normal(64, 16, seed=1), 0)
    with lenient_jax():
        other = with_gradients(lambda x, w: theirs(x, w, NUMBERS), x, w)
    ours = with_gradients(lambda x, w: fb.dot_general(x, w, NUMBERS, policy=policy), x, w)
    exact = with_gradients(lambda x, w: x @ w, x, w)
    assert_near(ours[:2], other[:2], exact[:2])
    np.testing.assert_allclose(ours[2], other[2], rtol=1e-5, atol=1e-5)  # the weight's gradient is that of floats


# --- Qwix ---


@pytest.mark.parametrize("gradient", ["int8", None])
def test_qwix_dot_general(gradient):
    qt = pytest.importorskip("qwix._src.core.dot_general_qt")
    dtype = jnp.int8 if gradient else None
    config = qt.DotGeneralQtConfig(lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, dlhs_grad_qtype=dtype, drhs_grad_qtype=dtype)
    policy = fb.Policy("int8", "int8", dlhs=fb.Arm(gradient), drhs=fb.Arm(gradient))
    # Of several contracted axes, Qwix's gradient has one scale for all, as ours.
    x, w = with_largest(normal(2, 6, 64), 2), with_largest(normal(64, 16, seed=1), 0)
    with lenient_jax():
        other = with_gradients(lambda x, w: qt.dot_general_qt(x, w, NUMBERS, config), x, w)
    ours = with_gradients(lambda x, w: fb.dot_general(x, w, NUMBERS, policy=policy), x, w)
    assert_near(ours, other, with_gradients(lambda x, w: x @ w, x, w))


@pytest.mark.parametrize("gradient", ["int8", None])
def test_qwix_ragged_dot(gradient):
    qt = pytest.importorskip("qwix._src.core.ragged_dot_qt")
    dtype = jnp.int8 if gradient else None
    config = qt.RaggedDotQtConfig(lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, dlhs_grad_qtype=dtype, drhs_grad_qtype=dtype)
    # Its experts share the scale of a column; ours have their own unless the scheme says so.
    shared = fb.Scheme(FORMATS["int8"], {-3: None, -2: 1, -1: None})
    policy = fb.Policy(shared, "int8", dlhs=fb.Arm(gradient), drhs=fb.Arm(gradient))
    x, w = with_largest(normal(15, 32), 1), with_largest(normal(4, 32, 8, seed=1), 1)
    with lenient_jax():
        other = with_gradients(lambda x, w: qt.ragged_dot_qt(x, w, SIZES, config), x, w)
    ours = with_gradients(lambda x, w: fb.ragged_dot(x, w, SIZES, policy=policy), x, w)
    assert_near(ours, other, with_gradients(lambda x, w: jax.lax.ragged_dot(x, w, SIZES), x, w))


@pytest.mark.parametrize("gradient", ["int8", None])
def test_qwix_convolution(gradient):
    qt = pytest.importorskip("qwix._src.core.conv_general_qt")
    dtype = jnp.int8 if gradient else None
    config = qt.ConvGeneralQtConfig(lhs_qtype=jnp.int8, rhs_qtype=jnp.int8, dlhs_grad_qtype=dtype, drhs_grad_qtype=dtype)
    policy = fb.Policy("int8", "int8", dlhs=fb.Arm(gradient), drhs=fb.Arm(gradient))
    settings = {"window_strides": (2, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    x, w = with_largest(normal(2, 6, 5, 4), 3), with_largest(normal(3, 3, 4, 8, seed=1), 2)
    with lenient_jax():
        other = with_gradients(lambda x, w: qt.conv_general_qt(x, w, config, **settings), x, w)
    ours = with_gradients(lambda x, w: fb.conv_general_dilated(x, w, **settings, policy=policy), x, w)
    floats = with_gradients(lambda x, w: jax.lax.conv_general_dilated(x, w, **settings), x, w)
    assert_near(ours, other, floats)

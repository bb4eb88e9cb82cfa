"""Fake quantization: the value of the round trip for every scheme, and a gradient that passes straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import AbsMean, Fixed, Percentile
from fewbit.errors import QuantError
from fewbit.formats import FORMATS
from fewbit.training import fake_quant, is_covered, passed_through
from tests.conformance import array_laws as laws
from tests.conformance.test_schemes import ALL, SIBLINGS, schemes

FEW = ("int8", "uint4", "nf4", "q4_1", "mxfp4", "nvfp4_16x16", "fp8_tensor", "nf4_dq")


def array(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def outside(x: np.ndarray, q: fb.QArray) -> np.ndarray:
    """By the numbers: the error is more than half the outermost step, and the code is an outermost one."""
    values = q.scheme.format.values()
    numbers = np.unique(values[(values >= q.scheme.format.min) & (values <= q.scheme.format.max)])
    taken = values[laws.unpacked(q)]
    scale = np.abs(laws.spread(laws.scale_of(q), q))
    error = np.abs(laws.numpy_dequantize(q).astype(np.float64) - x)
    edge = np.where(taken == numbers[-1], numbers[-1] - numbers[-2], numbers[1] - numbers[0])
    is_outermost = (taken == numbers[-1]) | (taken == numbers[0])
    return is_outermost & (error > edge / 2 * scale * (1 + 1e-6) + 1e-6 * np.abs(x))


@schemes(ALL, ("int8", "nf4", "nvfp4_16x16"), long=SIBLINGS)
def test_the_value_is_that_of_the_round_trip_and_the_gradient_that_of_the_identity(name: str):
    x = jnp.asarray(laws.case("outlier"))
    cotangent = array(*x.shape, seed=1)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        value, back = jax.vjp(lambda x: fake_quant(x, name), x)
        clipped, clipped_back = jax.vjp(lambda x: fake_quant(x, name, gradient="clipped"), x)
        return value, back(cotangent)[0], clipped, clipped_back(cotangent)[0]

    value, gradient, clipped, clipped_gradient = both(x)
    expected = laws.results(name)[1]["outlier"]
    if name == "nf4_dq" or isinstance(fb.SCHEMES[name].calibration, AbsMean):  # their mean is summed in another order
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(clipped, value)
    np.testing.assert_array_equal(gradient, cotangent)
    is_out = outside(np.asarray(x), laws.results(name)[2]["outlier"])
    np.testing.assert_array_equal(clipped_gradient, np.where(is_out, 0, cotangent))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("int8", "bfloat16"), ("fp8_tensor", "bfloat16"), ("q4_1", "float16")),
        *(pytest.param(name, "float32", marks=[pytest.mark.slow]) for name in FEW if name != "nf4_dq"),
    ],
)
def test_eager_and_compiled_are_equal_also_when_widened_at_once(name: str, dtype: str):
    x = array(6, 40, dtype=dtype)
    eager = fake_quant(x, name)
    assert eager.dtype == x.dtype
    compiled = jax.jit(lambda x: fake_quant(x, name).astype(jnp.float32))(x)
    trip = fb.dequantize(fb.quantize(x, name))
    np.testing.assert_array_equal(eager.astype(jnp.float32), trip.astype(jnp.float32))
    np.testing.assert_array_equal(compiled, trip.astype(jnp.float32))


def test_the_round_trip_is_not_compiled_away():
    text = jax.jit(lambda x: fake_quant(x, "fp8").astype(jnp.float32)).lower(array(4, 8, dtype="bfloat16")).as_text()
    assert "optimization_barrier" in text


@schemes(list(FEW), ("int8",))
def test_forward_and_reverse_mode_agree_to_second_order(name: str):
    x, v, u = array(4, 40), array(4, 40, seed=1), array(4, 40, seed=2)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(fake_quant(3 * x, name, gradient="clipped")) * u)

    @jax.jit
    def derivatives(x: jax.Array) -> tuple[jax.Array, ...]:
        forward = jax.jvp(loss, (x,), (v,))[1]
        gradient, over_reverse = jax.jvp(jax.grad(loss), (x,), (v,))
        reverse_over_forward = jax.grad(lambda x: jax.jvp(loss, (x,), (v,))[1])(x)
        y = fake_quant(3 * x, name, gradient="clipped")
        return forward, jnp.vdot(gradient, v), over_reverse, reverse_over_forward, gradient, y

    forward, reverse, hvp, other_hvp, gradient, y = derivatives(x)
    np.testing.assert_allclose(forward, reverse, atol=160 * 2.0**-20)  # 160 products below 8, in two orders
    np.testing.assert_allclose(hvp, other_hvp, rtol=1e-5, atol=1e-6)
    passed = np.asarray(is_covered(3 * x, fb.quantize(3 * x, name)))
    np.testing.assert_allclose(gradient, np.where(passed, 3 * np.cos(y) * u, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(hvp, np.where(passed, -9 * np.sin(y) * u * v, 0), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_the_slope_of_the_smoothed_function():
    # The mean of stochastic rounding over many keys is the clipped identity, whose slope finite differences see.
    x = jnp.array([[-2.4, -0.9, 0.33, 1.1, 2.7, 0.0]])
    keys = jax.random.split(jax.random.key(0), 1024)
    scheme = fb.Scheme(FORMATS["int4_narrow"], {}, calibration=Fixed(-1.75, 1.75))

    @jax.jit
    def mean(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda key: fake_quant(x, scheme, key=key))(keys).mean(0)

    slope = (mean(x + 0.05) - mean(x - 0.05)) / 0.1
    gradient = jax.grad(lambda x: fake_quant(x, scheme, gradient="clipped").sum())(x)
    # Each mean is off by at most half a step of 0.25 over 32; six standard deviations.
    np.testing.assert_allclose(slope, gradient, atol=6 * np.sqrt(2) * 0.125 / 32 / 0.1)
    assert gradient.tolist() == [[0, 1, 1, 1, 0, 1]]


def test_static_ranges_by_calibration_and_by_scale_are_the_same():
    x = array(4, 32) * 3
    fixed = fb.Scheme(FORMATS["int8"], {...: 1, -1: None}, calibration=Fixed(-2.0, 2.0))
    by_range = jax.value_and_grad(lambda x: fake_quant(x, fixed, gradient="clipped").sum())(x)
    by_scale = jax.value_and_grad(lambda x: fake_quant(x, "int8", scale=2 / 127.5, gradient="clipped").sum())(x)
    jax.tree.map(np.testing.assert_array_equal, by_range, by_scale)
    np.testing.assert_array_equal(by_range[1], np.abs(x) <= 2)


def test_an_asymmetric_range_is_masked_at_both_ends():
    x = jnp.array([[-1.13, -1.12, 2.87, 2.88, 9.0]])
    # Codes 0 and 15 around the zero point 4 stand for -1 and 2.75; the range ends half a step beyond.
    gradient = jax.grad(lambda x: fake_quant(x, "uint4", scale=0.25, offset=-1.0, gradient="clipped").sum())(x)
    assert gradient.tolist() == [[0, 1, 1, 0, 0]]


def test_the_scale_is_a_constant():
    x = array(4, 32)
    assert jax.grad(lambda s: fake_quant(x, "int8", scale=s).sum())(jnp.float32(0.01)) == 0
    percentile = fb.Scheme(FORMATS["int4"], {}, calibration=Percentile(90.0))
    gradient = jax.grad(lambda x: fake_quant(x, percentile).sum())(x)
    assert (gradient == 1).all()


def test_under_vmap_scan_and_remat():
    x = array(3, 4, 40)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(fake_quant(x, "int4_g32", gradient="clipped") ** 2)

    def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return total + jax.checkpoint(loss)(x), None

    gradient = jax.jit(jax.grad(loss))
    each = jnp.stack([gradient(part) for part in x])
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.grad(loss)))(x), each)
    scanned = jax.jit(jax.grad(lambda x: jax.lax.scan(step, jnp.float32(0), x)[0]))
    np.testing.assert_array_equal(scanned(x), each)


def test_a_nan_passes_its_gradient_and_zeros_do():
    x = jnp.array([[jnp.nan, 1.0], [0.0, 0.0]])

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, back = jax.vjp(lambda x: fake_quant(x, "int8", gradient="clipped"), x)
        return value, back(jnp.ones_like(x))[0]

    value, gradient = both(x)
    np.testing.assert_array_equal(value, [[jnp.nan, jnp.nan], [0, 0]])
    np.testing.assert_array_equal(gradient, np.ones((2, 2)))


def test_axis_and_key_are_those_of_quantize():
    x, key = array(40, 6), jax.random.key(3)

    @jax.jit
    def three(x: jax.Array) -> tuple[jax.Array, ...]:
        trip = fb.dequantize(fb.quantize(x, "int4_g32", axis=-2, key=key))
        return trip, fake_quant(x, "int4_g32", axis=-2, key=key), fake_quant(x, "int4_g32", axis=-2)

    trip, by_chance, nearest = three(x)
    np.testing.assert_array_equal(by_chance, trip)
    assert not np.array_equal(nearest, trip)


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
    with pytest.raises(QuantError, match="gradient is 'ste', must be one of identity, clipped"):
        fake_quant(jnp.ones(4), "int8", gradient="ste")  # type: ignore[arg-type]
    with pytest.raises(QuantError, match="x is int32; only floating arrays are quantized"):
        fake_quant(jnp.ones(4, jnp.int32), "int8")
    with pytest.raises(QuantError, match=r"x is quantized already; fb\.dequantize it first"):
        fake_quant(fb.quantize(jnp.ones((1, 4)), "int8"), "int4")  # type: ignore[arg-type]


def test_passed_through_is_linear_in_both_modes():
    x, mask = array(8), jnp.arange(8) % 2 == 0
    value, tangent = jax.jvp(lambda x: passed_through(x, jnp.round(x), mask), (x,), (2 * x,))
    np.testing.assert_array_equal(value, jnp.round(x))
    np.testing.assert_array_equal(tangent, jnp.where(mask, 2 * x, 0))

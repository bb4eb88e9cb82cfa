"""The pieces that formats share: exact powers of two, exponents, division, rounding by chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.formats import FORMATS
from fewbit.formats.format import exponent_of, power_of_two, quotient, rounded, settled, widened


def test_power_of_two_is_exact_over_the_whole_range():
    exponents = np.arange(-126, 128)
    assert np.array_equal(power_of_two(jnp.asarray(exponents)), np.ldexp(np.float32(1), exponents))


def test_exponent_of_powers_and_their_neighbours():
    powers = np.ldexp(np.float32(1), np.arange(-125, 128))
    assert np.array_equal(exponent_of(jnp.asarray(powers)), np.arange(-125, 128))
    assert np.array_equal(exponent_of(jnp.asarray(-powers)), np.arange(-125, 128))
    assert np.array_equal(exponent_of(jnp.asarray(np.nextafter(powers, np.float32(0)))), np.arange(-126, 127))
    special = jnp.array([0.0, -0.0, 1e-40, jnp.inf, jnp.nan])
    assert exponent_of(special).tolist() == [-127, -127, -127, 128, 128]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("divisor_shape", [(64, 1), (1, 1), (64, 64)], ids=str)
def test_quotient_is_ieee_division(compiled: bool, divisor_shape: tuple[int, int]):
    # XLA would multiply by the reciprocal where the divisor is broadcast: wrong in about a quarter of these.
    rng = np.random.default_rng(0)
    divisor = rng.uniform(0.1, 1e38, divisor_shape).astype(np.float32)
    x = (divisor * rng.uniform(-3, 3, (64, 64))).astype(np.float32)
    divide = jax.jit(quotient) if compiled else quotient
    assert np.array_equal(divide(jnp.asarray(x), jnp.asarray(divisor)), x / divisor)


def test_quotient_by_a_constant_is_ieee_division_under_jit():
    x = np.random.default_rng(0).standard_normal((1, 4096)).astype(np.float32)
    for constant in (127.5, 7.0, 3136.0):
        by_constant = jax.jit(lambda x, c=constant: quotient(x, jnp.float32(c)))
        assert np.array_equal(by_constant(x), x / np.float32(constant))
        assert np.array_equal(by_constant(x[:, :1]), x[:, :1] / np.float32(constant))


def test_quotient_of_nan_zero_and_infinity():
    x = jnp.array([jnp.nan, 0.0, -0.0, jnp.inf])
    got = np.asarray(quotient(x, jnp.float32(2)))
    np.testing.assert_array_equal(got, np.float32([np.nan, 0, 0, np.nan]))
    assert np.signbit(got[2])


def test_settled_product_is_rounded_before_the_sum():
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 64, 64)).astype(np.float32)
    compiled = jax.jit(lambda x, scale, offset: settled(x * scale) + offset)
    assert np.array_equal(compiled(x, scale, np.float32(0.37)), x * scale + np.float32(0.37))
    assert np.isnan(settled(jnp.array([jnp.nan]))).all()


def test_rounded_is_half_to_even_without_a_key():
    x = np.arange(-4, 4.5, 0.5, dtype=np.float32)
    assert np.array_equal(rounded(jnp.asarray(x), None), np.rint(x))


def test_widened_is_float32():
    assert widened(jnp.ones(2, jnp.float16)).dtype == jnp.float32


def test_facts_of_a_format():
    fmt = FORMATS["e4m3fn"]
    assert (fmt.bits, fmt.max, fmt.min, fmt.bound, fmt.smallest) == (8, 448.0, -448.0, 448.0, 2.0**-9)
    assert fmt.has_nan and fmt.is_signed
    assert not FORMATS["ue4m4"].is_signed and not FORMATS["e2m1"].has_nan

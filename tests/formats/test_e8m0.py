"""E8M0 against ml_dtypes over every bfloat16, and its exponent arithmetic at every power of two."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fewbit.formats import e8m0
from tests.conformance import format_laws as laws


def test_values_are_those_of_ml_dtypes():
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    laws.assert_same_numbers(e8m0.values(), expected)


def test_codes_are_those_of_ml_dtypes_where_it_has_a_number():
    # ml_dtypes gives NaN for zero, negative numbers and 1.5 * 2**127 and above; we saturate, see the next test.
    x = laws.ALL_NUMBERS
    x = x[(x >= 2.0**-126) & (x < 1.5 * 2.0**127)]
    theirs = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    # Its ties, at 1.5 times a power of two, go up; ours go to the even code.
    is_tie = np.frexp(x)[0] == 0.75
    assert np.array_equal(e8m0.encode(jnp.asarray(x)), np.where(is_tie, theirs - theirs % 2, theirs))
    assert np.array_equal(theirs[is_tie], np.frexp(x[is_tie])[1] + 127)


def test_saturates_and_flushes():
    x = jnp.array([0.0, -0.0, -1.0, -jnp.inf, 1e-40, 3.4e38, jnp.inf, jnp.nan, 2.0**-126])
    assert e8m0.encode(x).tolist() == [0, 0, 0, 0, 0, 254, 254, 255, 1]


def test_every_power_of_two_and_its_neighbours_are_exact():
    powers = np.ldexp(np.float32(1), np.arange(-126, 128))
    codes = np.arange(1, 255)
    assert np.array_equal(e8m0.encode(jnp.asarray(powers)), codes)
    assert np.array_equal(e8m0.encode(jnp.asarray(np.nextafter(powers, np.float32(np.inf)))), codes)
    assert np.array_equal(e8m0.encode(jnp.asarray(np.nextafter(powers, np.float32(0))[1:])), codes[1:])
    assert np.array_equal(np.asarray(e8m0.decode(jnp.asarray(codes, jnp.uint8))), powers)


def test_code_zero_decodes_to_the_subnormal_itself():
    assert np.asarray(e8m0.decode(jnp.uint8([0]))).view(np.uint32).tolist() == [1 << 22]

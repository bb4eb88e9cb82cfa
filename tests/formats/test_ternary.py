"""Binary and ternary: signs, zeros, ties, chances."""

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.formats import FORMATS
from tests.conformance import format_laws as laws

binary, ternary = FORMATS["binary"], FORMATS["ternary"]


def test_binary_is_the_sign_with_zero_and_nan_positive():
    x = jnp.array([-2.0, -0.1, -0.0, 0.0, 0.1, jnp.nan, -jnp.inf])
    assert binary.encode(x).tolist() == [0, 0, 1, 1, 1, 1, 0]


def test_binary_by_chance_is_certain_at_and_beyond_the_ends():
    x = jnp.tile(jnp.array([-3.0, -1.0, 1.0, 3.0]), (500, 1))
    assert np.array_equal(binary.encode(x, key=jax.random.key(0)), np.tile([0, 0, 1, 1], (500, 1)))


def test_ternary_is_bitnets_rule():
    x = laws.ALL_NUMBERS
    assert np.array_equal(ternary.decode(ternary.encode(jnp.asarray(x))), np.clip(np.rint(x), -1, 1))
    assert ternary.encode(jnp.array([0.5, -0.5, jnp.nan])).tolist() == [1, 1, 1]


def test_ternary_decodes_its_unused_code_to_two():
    assert ternary.decode(jnp.uint8([3])).tolist() == [2.0]

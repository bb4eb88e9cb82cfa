"""Hadamard matrices of any length, and the transform that multiplies by them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops import hadamard_transform
from fewbit.ops.hadamard import hadamard

LENGTHS = (1, 2, 3, 4, 7, 12, 15, 20, 36, 52, 60, 64, 96, 160, 576, 688, 1536)
FLAT = (1, 2, 4, 12, 20, 36, 60, 64, 96, 160, 576, 1536)
"""Those with entries of one magnitude."""


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(sum(shape)), shape)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_an_orthogonal_matrix(length):
    matrix = hadamard(length).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(length), atol=2.0**-22)
    most = np.abs(matrix).max() * math.sqrt(length)
    assert most < (1 + 2.0**-22 if length in FLAT else math.sqrt(2))
    x = normal(3, length)
    bound = 2.0**-22 * math.sqrt(length) * float(jnp.abs(x).max())
    np.testing.assert_allclose(hadamard_transform(x), np.asarray(x, np.float64) @ matrix, atol=bound)


def test_a_power_of_two_is_sylvesters():
    expected = [[(-1) ** (i & j).bit_count() for j in range(64)] for i in range(64)]
    np.testing.assert_array_equal(hadamard(64) * 8, expected)


def test_axes_dtypes_and_transformations():
    x = normal(4, 24, 5)
    there = hadamard_transform(x, axis=1)
    np.testing.assert_allclose(there, jnp.einsum("akb,kl->alb", x, hadamard(24)), atol=1e-6)
    for found in (jax.jit(lambda x: hadamard_transform(x, axis=1))(x), jax.vmap(lambda x: hadamard_transform(x, axis=0))(x)):
        np.testing.assert_allclose(found, there, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(hadamard_transform(x) ** 2))(x), 2 * x, atol=1e-5)
    half = x.astype(jnp.bfloat16)
    exact = hadamard_transform(half.astype(jnp.float32), axis=1)
    np.testing.assert_array_equal(hadamard_transform(half, axis=1), exact.astype(jnp.bfloat16))
    with pytest.raises(fb.QuantError, match="vectors of length 0 cannot be rotated"):
        hadamard_transform(jnp.ones((2, 0)))


def test_the_number_of_multiplications():
    """`n log n`: 16 for each element and power of 16, and one for each row of the factor."""
    for length, each in ((4096, 3 * 16), (1536, 12 + 16 + 8), (688, 43 + 16)):
        jaxpr = jax.make_jaxpr(hadamard_transform)(jnp.ones((1, length)))
        counts = [
            math.prod(eqn.outvars[0].aval.shape) * eqn.invars[1].aval.shape[0]
            for eqn in jaxpr.eqns
            if eqn.primitive.name == "dot_general"
        ]
        assert sum(counts) == length * each


def test_outliers_of_an_input_are_spread_before_it_is_quantized():
    """The input of a feed-forward block's second weight, one channel of it large."""
    length = 192
    x, w = normal(32, length).at[:, 5].mul(50.0), normal(length, 16)

    def error(x, w):
        y = fb.dot_general(x, w, (((1,), (0,)), ((), ())), policy=fb.Policy("int8_g64", "int8_g192"))
        return jnp.linalg.norm(y - exact)

    exact = x @ w
    rotated = hadamard_transform(x), hadamard_transform(w, axis=0)
    np.testing.assert_allclose(rotated[0] @ rotated[1], exact, atol=1e-3)
    # The amax falls from 50 times a normal number's to 50 / sqrt(192) = 3.6 times, and with it the step: a factor of 14 at most.
    activations = [fb.dequantize(fb.quantize(x, "int8_g192")) - x for x in (x, rotated[0])]
    assert jnp.linalg.norm(activations[1]) < 0.3 * jnp.linalg.norm(activations[0])
    assert error(*rotated) < 0.5 * error(x, w)

"""Every registered scheme in every product, beside JAX's own product of the decoded array; a scheme that is added is tested by that alone."""

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from tests.each_scheme import each_scheme

N, K = 64, 64  # tiles of 32 and blocks of 16 x 16 fit, a tile of 128 is a short one
ROWS, GROUPS = jnp.array([3, 60]), jnp.array([3, 1], jnp.int32)


def products(ops, x, w):
    """The products of `ops`, of x and a weight whose last axis is contracted; an einsum of two operands is a `dot_general`."""
    image = x.reshape(1, 2, 2, K)
    kernel = w.T.reshape(1, 1, K, N)
    return {
        "dot_general": ops.dot_general(x, w, (((1,), (1,)), ((), ()))),
        "conv": ops.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        "ragged_dot": ops.ragged_dot(x, w.reshape(2, N // 2, K).swapaxes(-1, -2), GROUPS),
        "take": ops.take(w, ROWS, axis=0),
    }


class Plain:
    """JAX's own products, under the names of ours."""

    dot_general, take = jax.lax.dot_general, jnp.take
    conv_general_dilated, ragged_dot = jax.lax.conv_general_dilated, jax.lax.ragged_dot


@each_scheme(("int8", "nf4", "nvfp4"))
def test_products_are_those_of_the_decoded_array(name):
    random = np.random.default_rng(0)
    x, w = (jnp.asarray(random.normal(size=size), jnp.float32) for size in ((4, K), (N, K)))
    q = fb.quantize(w, name)
    found = jax.jit(lambda x, q: products(fb, x, q))(x, q)
    expected = products(Plain, x, fb.dequantize(q))
    for product, want in expected.items():
        # A sum of K float32 products in another order: K * 2**-24 of the sum of their magnitudes, which is below 200.
        np.testing.assert_allclose(found[product], want, rtol=0, atol=1e-3, err_msg=product)
        assert found[product].dtype == want.dtype

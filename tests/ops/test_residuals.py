"""What the backward pass keeps of a quantized operand: its codes, never the array that they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.training import lora

W = (64, 48)


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


def largest_kept(f, *args):
    """The sizes of the largest floating and of the largest whole array that the pullback of `f` holds."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], *args))
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    return tuple(
        max((x.size for x, f in zip(leaves, is_float, strict=True) if f == kind), default=0) for kind in (True, False)
    )


def kernel(x, q):
    return fb.conv_general_dilated(x, q, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


PRODUCTS = {
    "x @ q": (lambda x, q: x @ q, (4, 64), W, -2),
    "q @ x": (lambda x, q: q.T @ x, (64, 4), W, -2),
    "einsum": (lambda x, q: fb.einsum("bi,io->bo", x, q), (4, 64), W, -2),
    "transparent": (fb.transparent(lambda x, w: jnp.tanh(x) @ w), (4, 64), W, -2),
    "ragged": (lambda x, q: fb.ragged_dot(x, q, jnp.array([3, 1], jnp.int32)), (4, 32), (2, 32, 48), -2),
    "conv": (kernel, (1, 4, 4, 16), (3, 3, 16, 32), (0, 1, 2)),
}


@pytest.mark.parametrize("scheme", ["nf4", "int8", pytest.param("mxfp4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_no_decoded_weight_is_kept(name, scheme):
    product, left, right, axis = PRODUCTS[name]
    q = fb.quantize(normal(*right, seed=1), scheme, axis=axis)
    for f, args in ((lambda x: product(x, q), ()), (lambda x, q: product(jnp.sin(x), q), (q,))):
        floats, codes = largest_kept(f, normal(*left), *args)
        assert floats < q.size
        assert codes == q.codes.size


def test_a_policy_keeps_codes_too():
    x, w = normal(4, 64), normal(*W, seed=1)
    policy = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
    numbers = (((1,), (0,)), ((), ()))
    assert largest_kept(lambda x, w: fb.dot_general(x, w, numbers, policy=policy), x, w)[0] < w.size
    q = dataclasses.replace(fb.quantize(w, "int8", axis=0), policy=policy)
    assert largest_kept(lambda x: x @ q, x)[0] < w.size


def test_every_derivative_is_that_of_the_decoded_product():
    """What is decoded again is the same; forward mode and second derivatives work, which a custom gradient would refuse."""
    x, q = normal(4, 64), fb.quantize(normal(*W, seed=1), "nf4", axis=0)
    w, v = fb.dequantize(q), normal(4, 64, seed=2)

    @jax.jit
    def derivatives(x, w):
        def f(x):
            return jnp.sum(jnp.sin(x @ w))

        gradient, second = jax.jvp(jax.grad(f), (x,), (v,))
        return gradient, second, jax.jvp(f, (x,), (v,))[1], jax.vmap(lambda row: row @ w)(x)

    for got, want in zip(derivatives(x, q), derivatives(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_the_base_under_an_adapter_is_kept_as_codes():
    q = fb.quantize(normal(*W, seed=1), "nf4", axis=0)
    x, params = normal(4, 64), {"w": q}

    def fn(params, x):
        return jnp.tanh(x) @ params["w"]

    adapters = lora.init(jax.random.key(0), fn, params, x, match="w", rank=2)
    assert largest_kept(lambda x, adapters: lora.apply(fn)(params, adapters, x), x, adapters)[0] < q.size

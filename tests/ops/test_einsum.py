"""Einsums of quantized operands against those of the arrays they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("bi,oi->bo", [(3, 32), (8, 32)]),
        ("bli,io->blo", [(2, 3, 32), (32, 8)]),
        ("oi,bi->ob", [(8, 32), (3, 32)]),
        ("bld,hkd->blhk", [(2, 3, 32), (4, 8, 32)]),
        ("ij,jk,kl->il", [(4, 32), (32, 16), (16, 8)]),
        ("ab,bc->c", [(5, 32), (32, 3)]),
        ("bnd,bmd->bnm", [(2, 3, 32), (2, 4, 32)]),
        ("ii,i->i", [(16, 16), (16,)]),
    ],
)
def test_einsum_is_that_of_what_the_operands_stand_for(subscripts, shapes):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    for place in range(len(arrays)):
        if arrays[place].ndim < 2:
            continue
        q = fb.quantize(arrays[place], "nf4_g16")
        quantized, decoded = list(arrays), list(arrays)
        quantized[place], decoded[place] = q, fb.dequantize(q)
        expected = jnp.einsum(subscripts, *decoded)
        np.testing.assert_allclose(fb.einsum(subscripts, *quantized), expected, rtol=1e-5, atol=1e-5)


def test_two_operands():
    q = fb.quantize(jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32), "nf4_g16")
    x = jnp.ones((3, 32))
    np.testing.assert_allclose(fb.einsum("bi,oi->bo", x, q), x @ fb.dequantize(q).T, rtol=1e-5, atol=1e-5)


def test_preferred_type_and_messages():
    q = fb.quantize(jnp.ones((8, 32), jnp.bfloat16), "int8")
    x = jnp.ones((2, 32), jnp.bfloat16)
    assert fb.einsum("bi,oi->bo", x, q, preferred_element_type=jnp.float32).dtype == jnp.float32
    assert fb.einsum("bi,oi->bo", x, q).dtype == jnp.bfloat16


def test_a_policy_of_another_type_is_refused(unchecked):
    x, w = jnp.ones((2, 32)), jnp.ones((8, 32))
    for wrong in ("int4", {"weight": "int4"}, fb.Recipe((fb.Rule(".*", "int4"),))):
        with pytest.raises(fb.QuantError, match=r"policy is .*; pass a Policy"):
            fb.einsum("bi,oi->bo", x, w, policy=wrong)


@pytest.mark.parametrize(
    ("subscripts", "shapes", "reason"),
    [
        ("bi,oij->bo", [(2, 32), (8, 32, 3)], r"summed or repeated within it before the product \(reduce_sum\)"),
        ("bi,ii->bi", [(2, 32), (32, 32)], "summed or repeated within it before the product"),
        ("oi->io", [(8, 32)], "'oi->io' has no product"),
    ],
)
def test_a_policy_that_no_product_of_the_weight_could_follow_is_refused(subscripts, shapes, reason):
    with pytest.raises(fb.QuantError, match=reason):
        fb.einsum(subscripts, *map(jnp.ones, shapes), policy=fb.Policy("int8", "int8"))


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [("...i,oi->...o", [(2, 32), (8, 32)]), ("bi,bi->bi", [(2, 32), (2, 32)]), ("i,->i", [(32,), ()])],
)
def test_a_policy_reaches_the_product(subscripts, shapes):
    x, w = (jnp.linspace(0.3, 1, np.prod(shape, dtype=int)).reshape(shape) for shape in shapes)
    found = fb.einsum(subscripts, x, w, policy=fb.Policy("int2", "int2"))
    assert not jnp.array_equal(found, jnp.einsum(subscripts, x, w))


def test_the_key_reaches_a_policy_that_a_qarray_carries():
    """Bit for bit as in `dot_general`, through a transpose and in both operands' gradients."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 32), (32, 8)))
    policy = fb.Policy("int8", "int8", dlhs=fb.Arm("int8", rounding="stochastic"), drhs="int8")
    q, key = dataclasses.replace(fb.quantize(w, "int8", axis=0), policy=policy), jax.random.key(3)

    def squared(product):
        return jax.value_and_grad(lambda x, scale: jnp.sum(product(x, dataclasses.replace(q, scale=scale)) ** 2), (0, 1))

    want = squared(lambda x, q: fb.dot_general(x, q, (((1,), (0,)), ((), ())), key=key))(x, q.scale)
    got = squared(lambda x, q: fb.einsum("bi,oi->bo", x, q.T, key=key))(x, q.scale)
    jax.tree.map(np.testing.assert_array_equal, got, want)

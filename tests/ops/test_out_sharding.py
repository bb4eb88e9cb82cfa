"""Products on an explicit mesh whose contracted axis is sharded: `out_sharding` says where the result lies, as in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import fewbit as fb

NUMBERS = (((1,), (0,)), ((), ()))


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def operands(scheme):
    """Both sharded along the contraction."""
    x = jax.device_put(normal(8, 64), NamedSharding(mesh(), P("data", "model")))
    return x, fb.quantize(normal(64, 16, seed=1), scheme, axis=0).with_sharding((mesh(), P("model", None)))


def alone(x):
    return jnp.asarray(jax.device_get(x))


CASES = {
    "weight-only": ("int4_g16", None),
    "codes": ("int8", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),
    "zero points": ("uint8", fb.Policy("uint8", "uint8")),
}


@pytest.mark.parametrize("spec", [P("data", None), P("data", "model")], ids=["rows", "both"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_lies_where_it_is_asked_to(name, spec):
    scheme, policy = CASES[name]
    x, q = operands(scheme)

    def product(x, q, sharding=None):
        return fb.dot_general(x, q, NUMBERS, policy=policy, out_sharding=sharding)

    def both(x, q, sharding=None):
        return product(x, q, sharding), jax.grad(lambda x: jnp.sum(product(x, q, sharding)))(x)

    out, gradient = jax.jit(functools.partial(both, sharding=NamedSharding(mesh(), spec)))(x, q)
    assert out.sharding.spec == spec
    assert gradient.sharding.spec == P("data", "model")
    wanted = both(alone(x), jax.tree.map(alone, q))
    # The same 64 products of magnitudes below 10, added up in another order.
    for got, want in zip((out, gradient), wanted, strict=True):
        np.testing.assert_allclose(alone(got), want, rtol=1e-5, atol=1e-4)


def test_it_is_needed_and_unchanged_code_can_ask_for_it():
    x, q = operands("int8")
    with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
        jax.eval_shape(lambda x, q: fb.dot_general(x, q, NUMBERS), x, q)

    def unchanged(x, w):
        return jax.lax.dot_general(x, w, NUMBERS, out_sharding=NamedSharding(mesh(), P("data", None)))

    out = jax.jit(fb.transparent(unchanged))(x, q)
    assert out.sharding.spec == P("data", None)
    np.testing.assert_allclose(alone(out), alone(x) @ fb.dequantize(jax.tree.map(alone, q)), rtol=1e-5, atol=1e-4)

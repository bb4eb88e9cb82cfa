"""Delayed scaling of products without a parameter: the numbers of the explicit step, and what is seen in every kind of body."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fewbit as fb
from tests.training.test_delayed_state import POLICY, amax, explicit_step, normal

RECIPE = fb.Recipe((fb.Rule(".*", None, optional=True),), products=(fb.Rule("mix.*", POLICY),))


def mix(x, y):
    with jax.named_scope("mix"):
        return x @ y


def seen_by(fn, x):
    """What a step of `sum(sin(fn))` saw of the product `mix`: right operand, left operand, gradient."""
    state = fb.delayed_state(fn, {}, x, recipe=RECIPE)
    trained = fb.train(fn, RECIPE)
    seen = jax.jit(jax.grad(lambda s: jnp.sum(jnp.sin(trained({}, x, delayed=s)))))(state)
    (product,) = seen.weightless.values()
    return [np.asarray(part.scale) for part in (product.weight, product.activation, product.gradient)]


def test_a_product_has_the_numbers_of_the_explicit_step():
    def fn(params, x, y):
        return mix(x, y)

    state = fb.delayed_state(fn, {}, normal(4, 16), normal(16, 8), recipe=RECIPE)
    assert list(state.weightless) == ["mix"] and not state.products
    trained = fb.train(fn, RECIPE)
    states = {name: getattr(state.weightless["mix"], name) for name in ("activation", "weight", "gradient")}

    @jax.jit
    def step(w, x, g, state):
        out, back = jax.vjp(lambda w, x, s: trained({}, x, w, delayed=s), w, x, state)
        dw, dx, seen = back(g)
        return out, dw, dx, state.advance(seen)

    explicit = jax.jit(explicit_step)
    for i in range(3):
        w, x, g = normal(16, 8, seed=i), (7.0 - i) * normal(4, 16, seed=10 + i), normal(4, 8, seed=20 + i) / (i + 1)
        *got, state = step(w, x, g, state)
        *want, states = explicit(w, x, g, states)
        for a, b in zip(got, want, strict=True):  # both multiply the codes; the two scales may round in either order
            np.testing.assert_allclose(a, b, rtol=2.0**-22)
        for name, scale in states.items():
            jax.tree.map(np.testing.assert_array_equal, getattr(state.weightless["mix"], name), scale)


X = 4 * normal(8, 8) / amax(normal(8, 8))


def turned(params, x):
    """The first turn meets the largest left operand and, as gradients come back, the smallest gradient."""
    return jax.lax.scan(lambda y, x: (y / 100 + mix(x, jnp.eye(8)), None), jnp.zeros((2, 8)), x.reshape(4, 2, 8))[0]


def nested(params, x):
    def outer(y, x):
        body = jax.checkpoint(jax.jit(lambda y, x: (jnp.tanh(y) + mix(x, jnp.tanh(x.T)), None)))
        return jax.lax.scan(body, y, jnp.stack([x, x / 2]))[0], None

    return jax.lax.scan(outer, jnp.zeros((4, 4)), x.reshape(2, 4, 8))[0]


def branching(params, x):
    return jax.lax.cond(x[0, 0] < 9, lambda x: mix(x, jnp.tanh(x)), lambda x: x, x)


def sharded(params, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda x: mix(x, jnp.tanh(x.T)), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@pytest.mark.parametrize(
    ("fn", "right"),
    [
        (turned, 1.0),
        pytest.param(nested, np.tanh(4.0), marks=pytest.mark.slow),
        (branching, np.tanh(4.0)),
        pytest.param(sharded, np.tanh(4.0), marks=pytest.mark.slow),
    ],
)
def test_what_is_seen_in_a_body_joins_by_maximum(fn, right):
    """A sum over turns or shards would be more than the largest element."""
    weight, activation, gradient = seen_by(fn, X)
    np.testing.assert_allclose(weight, right, rtol=1e-6)
    assert activation == amax(X)
    assert 0 < gradient <= 1.0  # the cosine, once


def test_parameters_and_products_have_histories_beside_each_other():
    params, x = {"mix": normal(8, 8)}, normal(4, 8, seed=1)
    rules = fb.Recipe((fb.Rule("mix", POLICY),), products=(fb.Rule("mix", POLICY),))

    def fn(params, x):
        return mix(x @ params["mix"], x.T)

    state = fb.delayed_state(fn, params, x, recipe=rules)
    seen = jax.jit(jax.grad(lambda s: fb.train(fn, rules)(params, x, delayed=s).sum()))(state)
    assert seen.products["mix"].weight.scale == amax(params["mix"]) and seen.weightless["mix"].weight.scale == amax(x)
    stepped = state.advance(seen.merge(jax.tree.map(jnp.zeros_like, seen)))
    assert stepped.weightless["mix"].weight.scale == np.float32(amax(x)) / np.float32(448)
    with pytest.raises(fb.QuantError, match=r"the scales of \['mix', 'product mix'\] .* delayed= has them for \['mix'\]"):
        fb.train(fn, rules)(params, x, delayed=fb.DelayedState(state.products))
    with pytest.raises(fb.QuantError, match=r"the scales of \['mix', 'product mix'\] .* there is no delayed="):
        fb.train(fn, rules)(params, x)

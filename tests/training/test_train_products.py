"""Products without a parameter in `fb.train`: they follow the recipe's rules for products, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
FP8 = fb.Policy("fp8", "fp8", dlhs="fp8_e5m2", drhs="fp8_e5m2")
SCORES, MIX = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


PARAMS, X = {"q": normal(8, 8) / 2, "v": normal(8, 8, seed=1) / 2}, normal(6, 8, seed=2)


def attention(params, x, scores=None, mix=None):
    """One head; `scores` and `mix` are what its two products follow when they are written by hand."""
    with jax.named_scope("scores"):
        logits = fb.dot_general(x @ params["q"], x, SCORES, policy=scores) if scores else (x @ params["q"]) @ x.T
    weights = jax.nn.softmax(logits)
    with jax.named_scope("mix"):
        return fb.dot_general(weights, x @ params["v"], MIX, policy=mix) if mix else weights @ (x @ params["v"])


NOTHING = (fb.Rule(".*", None),)


def recipe(*products, rules=NOTHING):
    return fb.Recipe(rules, products=products)


def value_and_gradients(fn, x=X):
    return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(fn(p, x))), argnums=(0, 1)))(PARAMS, x)


def agree(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@pytest.mark.slow
def test_attention_has_the_numbers_of_products_with_the_policies():
    trained = fb.train(attention, recipe(fb.Rule("scores", INT8), fb.Rule("mix", FP8)))
    agree(value_and_gradients(trained), value_and_gradients(lambda p, x: attention(p, x, INT8, FP8)))
    alone = fb.train(attention, recipe(fb.Rule("mix", FP8)))
    agree(value_and_gradients(alone), value_and_gradients(lambda p, x: attention(p, x, mix=FP8)))


def test_parameters_and_products_follow_their_own_rules():
    rules = (fb.Rule("q", INT8), fb.Rule("v", None))
    trained = fb.train(attention, recipe(fb.Rule("mix", FP8), rules=rules))

    def by_hand(params, x):
        return fb.train(lambda p, x: attention(p, x, mix=FP8), fb.Recipe(rules))(params, x)

    agree(value_and_gradients(trained), value_and_gradients(by_hand))


def test_a_function_that_is_called_twice_may_follow_two_rules():
    layer = jax.jit(lambda x, y: jnp.tanh(x @ y))

    def twice(params, x):
        return layer(layer(x, jnp.sin(x)), x[:8, :8])

    x = normal(8, 8, seed=3)
    found = fb.plan(twice, PARAMS, x, recipe=recipe(fb.Rule(".*", None))).products
    names = [row.name for row in found]
    assert len(set(names)) == 2
    one, both = (
        jax.jit(fb.train(twice, recipe(*(fb.Rule(n, INT8) for n in some))))(PARAMS, x) for some in (names[:1], names)
    )
    numbers = (((1,), (0,)), ((), ()))

    @jax.jit
    def by_hand(x):
        first = jnp.tanh(fb.dot_general(x, jnp.sin(x), numbers, policy=INT8))
        return jnp.tanh(first @ x), jnp.tanh(fb.dot_general(first, x, numbers, policy=INT8))

    agree((one, both), by_hand(x))


WRAPPED = {
    "scan": lambda p, x: jax.lax.scan(lambda x, _: (attention(p, x), None), x, None, length=2)[0],
    "remat": lambda p, x: jax.checkpoint(attention)(p, attention(p, x)),
    "vmap": lambda p, x: jax.vmap(lambda x: attention(p, x))(x.reshape(2, 3, 8)),
    "cond": lambda p, x: jax.lax.cond(x[0, 0] < 9, lambda x: attention(p, x), lambda x: x, x),
}


@pytest.mark.parametrize(
    "wrap", ["scan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("remat", "vmap", "cond"))]
)
def test_a_policy_follows_its_product_into_bodies(wrap):
    trained = fb.train(WRAPPED[wrap], recipe(fb.Rule(".*(mix|scores).*", INT8)))
    text = str(jax.make_jaxpr(trained)(PARAMS, X))
    assert "preferred_element_type=int32" in text
    (value, got), (wanted, want) = (value_and_gradients(fn) for fn in (trained, WRAPPED[wrap]))
    # Every operand of the products is off by at most half of 1/127 of its largest element.
    assert 0 < abs(value - wanted) < 0.1 * abs(wanted) + 0.5
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def test_keys():
    policy = fb.Policy("int8", "int8", dlhs=fb.Arm("int8", rounding="stochastic"))
    trained = fb.train(attention, recipe(fb.Rule("mix", policy)))
    gradient = jax.jit(jax.grad(lambda x, key: jnp.sum(jnp.sin(trained(PARAMS, x, key=key)))))
    one, other = (gradient(X, jax.random.key(i)) for i in (0, 1))
    assert not np.array_equal(one, other) and np.array_equal(one, gradient(X, jax.random.key(0)))


def test_quantized_parameters_serve_with_the_products_policies():
    both = recipe(fb.Rule("mix", INT8), rules=(fb.Rule(".*", "int8"),))
    plan = fb.plan(attention, PARAMS, X, recipe=fb.Recipe(both.rules))
    served = jax.jit(fb.train(attention, both))(fb.quantize_params(PARAMS, plan), X)
    assert np.array_equal(served, jax.jit(fb.train(attention, both))(PARAMS, X))


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(
        fb.QuantError, match=r"product rule 1 .* matches nothing; the products without a parameter are scores, mix\."
    ):
        fb.train(attention, recipe(fb.Rule("scoers", INT8)))(PARAMS, X)

    @jax.custom_vjp
    def square(x):
        return x @ x.T

    square.defvjp(lambda x: (x @ x.T, x), lambda x, g: (g @ x,))
    with pytest.raises(
        fb.UnsupportedError, match=r"cannot follow a policy.*\n?.*inside custom_vjp_call, whose derivative rule"
    ):
        fb.train(lambda p, x: square(x @ p["q"]), recipe(fb.Rule(".*", INT8)))(PARAMS, X)

"""`fb.observe` of products without a parameter: ranges of both operands, and recipes in which both are static."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import Fixed
from fewbit.calibration import MinMaxRange, PercentileRange

INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
SCORES, MIX = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


PARAMS = {"q": normal(8, 8) / 2, "v": normal(8, 8, seed=1) / 2}
BATCHES = [normal(6, 8, seed=2), normal(6, 8, seed=3)]


def attention(params, x, policies=None):
    """One head; with policies, its two products follow them by hand."""
    with jax.named_scope("scores"):
        q = x @ params["q"]
        logits = fb.dot_general(q, x, SCORES, policy=policies[0]) if policies else q @ x.T
    with jax.named_scope("mix"):
        weights, v = jax.nn.softmax(logits), x @ params["v"]
        return fb.dot_general(weights, v, MIX, policy=policies[1]) if policies else weights @ v


NOTHING = (fb.Rule(".*", None),)


def recipe(*products, rules=NOTHING):
    return fb.Recipe(rules, products=products)


def static(policy, stats, name):
    """The policy with the ranges that a product's operands were seen in."""
    ranges = (stats.products[name].left, stats.products[name].right)
    left, right = (Fixed(float(state.low), float(state.high)) for state in ranges)
    return dataclasses.replace(
        policy,
        weight=dataclasses.replace(policy.weight, calibration=right),
        activation=dataclasses.replace(policy.activation, calibration=left),
    )


@pytest.mark.slow
def test_ranges_and_recipe_are_those_computed_by_hand():
    plain = recipe(fb.Rule("scores", INT8), fb.Rule("mix", fb.Policy("int8")))
    stats = fb.observe(attention, PARAMS, BATCHES, plain)
    seen = stats.products["scores"]
    np.testing.assert_allclose(
        seen.left.high, max(np.abs(x @ PARAMS["q"]).max() for x in map(np.asarray, BATCHES)), rtol=1e-6
    )
    assert float(seen.right.high) == np.abs(BATCHES).max() and seen.right.count == 2
    assert not stats.observations

    ranged = stats.recipe(plain)
    assert [rule.path for rule in ranged.products] == ["scores", "mix", "scores", "mix"]
    assert [rule.optional for rule in ranged.products] == [False, False, True, True]
    assert ranged.products[0].policy == static(INT8, stats, "scores") and ranged.products[1].policy.activation is None
    assert isinstance(ranged.products[1].policy.weight.calibration, Fixed)
    assert fb.Recipe.from_json(ranged.to_json()) == ranged

    policies = [rule.policy for rule in ranged.products[:2]]
    x = 2 * BATCHES[0][:5]  # another length, and beyond the ranges
    trained = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(fb.train(attention, ranged)(p, x)))))
    by_hand = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(attention(p, x, policies)))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trained(PARAMS, x), by_hand(PARAMS, x))


def looped(params, x):
    """Products without a parameter in a loop around a branch, in a rematerialized call and twice in a jitted function."""

    def step(x, _):
        return jax.lax.cond(x[0, 0] < 9, lambda x: jnp.tanh(attention(params, x)), lambda x: x, x), None

    x, _ = jax.lax.scan(step, x, None, length=2)
    square = jax.jit(lambda x: x @ x.T)
    with jax.named_scope("last"):
        return jax.checkpoint(lambda x: 3 * square(square(x)) @ params["v"][:6])(x)


def test_calls_loops_and_branches():
    every = recipe(fb.Rule(".*", INT8), rules=(fb.Rule(".*", INT8),))
    stats = fb.observe(looped, PARAMS, BATCHES[:1], every, rule=MinMaxRange())
    names = [row.name for row in fb.plan(looped, PARAMS, BATCHES[0], recipe=every).products]
    assert list(stats.products) == names and len(names) == 4 and {"q", "v"} == set(stats.observations)
    x = hidden = BATCHES[0]
    mixed = []
    for _ in range(2):
        mixed.append(np.asarray(jax.nn.softmax((hidden @ PARAMS["q"]) @ hidden.T)))
        hidden = jnp.tanh(mixed[-1] @ (hidden @ PARAMS["v"]))
    scores, mix, first, second = stats.products.values()
    np.testing.assert_allclose(scores.right.low, np.min([x, hidden]), rtol=1e-5)
    np.testing.assert_allclose(mix.left.high, np.max(mixed), rtol=1e-5)
    assert mix.left.low == 0 and mix.left.count == scores.right.count == 2
    gram = np.asarray(hidden) @ np.asarray(hidden).T
    np.testing.assert_allclose(first.left.high, np.max(hidden), rtol=1e-5)
    np.testing.assert_allclose([second.left.high, second.right.low], [gram.max(), min(gram.min(), 0)], rtol=1e-4, atol=1e-6)
    assert stats.observations["v"].range.count == 3


def test_what_is_not_asked_for_is_not_measured():
    both = recipe(fb.Rule("scores", INT8), fb.Rule("mix", None), rules=(fb.Rule("q", INT8), fb.Rule("v", None)))
    assert set(fb.observe(attention, PARAMS, BATCHES[:1], both).products) == {"scores"}
    assert not fb.observe(attention, PARAMS, BATCHES[:1], both, collect=("absmax",)).products


def test_what_cannot_be_observed_is_refused():
    def looping(params, x):
        return jax.lax.while_loop(lambda x: x[0, 0] > 9, lambda x: x @ x, x) @ params["q"]

    every, x = recipe(fb.Rule(".*", INT8)), normal(8, 8)
    with pytest.raises(fb.UnsupportedError, match=r"product #1: it is inside a while loop or a shard_map, from which"):
        fb.observe(looping, PARAMS, [x], every)
    with pytest.raises(fb.QuantError, match=r"product rule 1 .* matches nothing"):
        fb.observe(attention, PARAMS, BATCHES, recipe(fb.Rule("scoers", INT8)))
    with pytest.raises(fb.QuantError, match=r"product scores, right operand: .* have axes \(-1,\)"):
        fb.observe(attention, PARAMS, BATCHES, every, rule=PercentileRange(99.0, axes=(-1,))).recipe(every)

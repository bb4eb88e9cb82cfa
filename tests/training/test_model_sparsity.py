"""Sparsity of whole models: `fb.train` computes with the masks of its state, on schedule, and they are what is served."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import nm_mask

INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
SPARSE = fb.Sparsity(2, 4, start_step=1, update_step=2)
RECIPE = fb.Recipe((fb.Rule("stack", INT8, sparsity=SPARSE), fb.Rule("out", None, sparsity=fb.Sparsity(1, 2))))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


PARAMS = {"stack": normal(3, 16, 16) / 4, "out": normal(8, 16, seed=1), "bias": jnp.zeros(8)}
X = normal(4, 16, seed=2)


def net(p, x):
    """Scanned and rematerialized layers, and a matrix that is used transposed."""
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["stack"])
    return x @ p["out"].T + p["bias"][None]


def loss(p, x, fn=net, **kwargs):
    return jnp.mean(fn(p, x, **kwargs) ** 2)


def by_hand(masks):
    return PARAMS | {path: jnp.where(mask, PARAMS[path], 0) for path, mask in masks.items()}


@pytest.mark.slow
def test_a_training_step_computes_with_the_masks_and_they_are_served():
    state = fb.sparsity_state(net, PARAMS, X, recipe=RECIPE)
    assert {path: rule.axis for path, rule in state.rules} == {"stack": (-2,), "out": (-1,)}
    trained = fb.train(net, RECIPE)

    @jax.jit
    def step(params, state):
        state = state.update(params)
        value, gradient = jax.value_and_grad(loss)(params, X, trained, sparsity=state)
        return state, value, gradient, trained(params, X, sparsity=state)

    plain = fb.Recipe((fb.Rule("stack", INT8), fb.Rule("out", None)))
    wanted = jax.jit(jax.value_and_grad(lambda p: loss(p, X, fb.train(net, plain))))
    out = nm_mask(PARAMS["out"], 1, 2, axis=1)
    stack = jnp.ones((3, 16, 16), bool)
    for number in range(2):  # the stack starts a step later
        state, value, gradient, outputs = step(PARAMS, state)
        stack = nm_mask(PARAMS["stack"], 2, 4, axis=1) if number == 1 else stack
        np.testing.assert_array_equal(state.masks["stack"], stack)
        np.testing.assert_array_equal(state.masks["out"], out)
        want, passed = wanted(by_hand({"stack": stack, "out": out}))
        np.testing.assert_allclose(value, want, rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient, passed)
    assert (gradient["out"][~out] != 0).any()  # straight through
    assert state.step == 2

    other = {**PARAMS, "stack": PARAMS["stack"][:, ::-1] * 2}
    state, *_, outputs = step(other, state)  # nothing is due: the masks are those of the step before
    np.testing.assert_array_equal(state.masks["stack"], stack)
    served = fb.quantize_params(state.apply(other), fb.plan(net, PARAMS, X, recipe=RECIPE))
    np.testing.assert_array_equal(jax.jit(fb.transparent(net))(served, X), outputs)
    assert not np.array_equal(served["out"], fb.quantize_params(other, fb.plan(net, PARAMS, X, recipe=plain))["out"])


def test_the_step_that_is_named_counts_and_penalties_add_up():
    state = fb.sparsity_state(net, PARAMS, X, recipe=RECIPE)
    assert not state.update(PARAMS, 0).masks["stack"].sum() < PARAMS["stack"].size
    later = state.update(PARAMS, 5)
    assert later.masks["stack"].sum() == PARAMS["stack"].size // 2 and later.step == 6
    pruned = sum(float(np.sum(np.where(mask, 0, PARAMS[path]) ** 2)) for path, mask in later.masks.items())
    np.testing.assert_allclose(later.penalty(PARAMS), pruned / 2, rtol=1e-6)


def test_what_does_not_go_together_is_refused():
    state = fb.sparsity_state(net, PARAMS, X, recipe=RECIPE)
    trained = fb.train(net, RECIPE)
    with pytest.raises(
        fb.QuantError, match=r"makes parameters sparse, \[.out .*stack .*there is no sparsity=; start with spars"
    ):
        trained(PARAMS, X)
    twice = fb.Recipe((fb.Rule("stack", INT8, sparsity=fb.Sparsity(1, 4)), fb.Rule("out", None)))
    with pytest.raises(fb.QuantError, match=r"\[\"stack \{'n': 1, 'm': 4, .*and sparsity= has \[.*'n': 2"):
        fb.train(net, twice)(PARAMS, X, sparsity=state)
    with pytest.raises(fb.QuantError, match=r"sparse, \[\], and sparsity= has"):
        fb.train(net, fb.Recipe((fb.Rule(".*", None),)))(PARAMS, X, sparsity=state)
    with pytest.raises(fb.QuantError, match=r"a mask of shape \(8, 16\) for out, whose shape is \(4, 16\)"):
        state.update(PARAMS | {"out": PARAMS["out"][:4]})
    with pytest.raises(
        fb.QuantError, match=r"a mask of shape \(8, 16\) for out, which is not among the parameters \['bias', 'stack'\]"
    ):
        state.apply({key: PARAMS[key] for key in ("stack", "bias")})


def test_masks_lie_where_their_parameters_lie():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    here = jax.NamedSharding(mesh, jax.P(None, None, "model"))
    params = PARAMS | {"stack": jax.device_put(PARAMS["stack"], here)}
    state = fb.sparsity_state(net, params, X, recipe=RECIPE)
    renewed = jax.jit(lambda state, params: state.update(params, 1))(state, params)
    assert all(some.masks["stack"].sharding.is_equivalent_to(here, 3) for some in (state, renewed))
    shapes = jax.eval_shape(lambda: params)
    assert fb.sparsity_state(net, shapes, X, recipe=RECIPE).masks["out"].shape == (8, 16)


def test_a_model_without_sparse_rules_has_an_empty_state():
    recipe = fb.Recipe((fb.Rule("stack", INT8), fb.Rule(".*", None)))
    state = fb.sparsity_state(net, PARAMS, X, recipe=recipe)
    assert not state.masks and state.apply(PARAMS)["out"] is PARAMS["out"]
    assert jnp.array_equal(fb.train(net, recipe)(PARAMS, X, sparsity=state.update(PARAMS)), fb.train(net, recipe)(PARAMS, X))


def test_static_ranges_keep_the_sparsity_of_their_rule():
    static = fb.observe(net, PARAMS, [X], RECIPE).recipe(RECIPE)
    assert static.rules[0].path == "stack" and static.rules[0].sparsity == SPARSE

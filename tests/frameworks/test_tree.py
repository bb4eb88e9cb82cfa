"""Plain trees and Equinox modules: leaves that are no arrays among the others, sources freed one at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.frameworks import tree
from fewbit.methods import GPTQ, correct_biases

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)


def fn(params, x):
    for w in params["layers"]:
        x = params["activation"](x @ w)
    return x * params["gain"]


def params():
    layers = [jnp.asarray(np.random.default_rng(i).standard_normal((16, 16)), jnp.float32) for i in range(3)]
    return {"layers": layers, "activation": jnp.tanh, "gain": 0.5}


def test_leaves_that_are_no_arrays_pass():
    plan = fb.plan(fn, params(), X, recipe="int8")
    assert [row.path for row in plan] == ["layers/0", "layers/1", "layers/2"]
    quantized = tree.quantize(fn, params(), X, recipe="int8")
    assert quantized["activation"] is jnp.tanh and quantized["gain"] == 0.5
    got, want = fb.transparent(fn)(quantized, X), fn(params(), X)
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)
    assert fb.train(fn, "w8a8")(params(), X).shape == X.shape


def test_a_donated_tree_is_freed_parameter_by_parameter(monkeypatch):
    source = params()
    original, alive = tree.quantize_row, []

    def counted(leaf, row, *learned):
        alive.append(sum(not w.is_deleted() for w in source["layers"]))
        return original(leaf, row, *learned)

    monkeypatch.setattr(tree, "quantize_row", counted)
    quantized = tree.quantize(fn, source, X, recipe="int8", donate=True)
    assert alive == [3, 2, 1] and all(w.is_deleted() for w in source["layers"])
    assert all(map(fb.is_qarray, quantized["layers"]))


def test_an_array_at_two_places_is_not_freed():
    source = params()
    source["layers"] = [source["layers"][0]] * 2
    quantized = tree.quantize(fn, source, X, recipe="int8", donate=True)
    assert not source["layers"][0].is_deleted() and all(map(fb.is_qarray, quantized["layers"]))


def test_a_buffer_of_two_arrays_is_not_freed():
    source = params()
    w = source["layers"][0]
    source["layers"][1] = jax.device_put(w, w.device)
    assert source["layers"][1] is not w
    tree.quantize(fn, source, X, recipe="int8", donate=True)
    assert [w.is_deleted() for w in source["layers"]] == [False, False, True]


def test_an_array_of_the_inputs_is_not_freed():
    source = params()
    tree.quantize(fn, source, source["layers"][0], recipe="int8", donate=True)
    assert [w.is_deleted() for w in source["layers"]] == [False, True, True]


def test_without_donation_the_tree_stays():
    source = params()
    tree.quantize(fn, source, X, recipe="int8")
    assert not any(w.is_deleted() for w in source["layers"])


def test_a_plan_for_another_tree_frees_nothing():
    source, plan = params(), fb.plan(fn, {**params(), "layers": params()["layers"][:2]}, X, recipe="int8")
    with pytest.raises(fb.QuantError, match=r"another tree: it has no row for \['layers/2'\]"):
        tree.quantize(fn, source, X, recipe=plan, donate=True)
    assert not any(w.is_deleted() for w in source["layers"])


@pytest.mark.parametrize(
    ("last", "recipe", "error"),
    [
        (lambda w: w.at[0, 0].set(jnp.nan), "int8", "NaN or infinite values in layers/"),
        (lambda w: fb.quantize(w, "int8", axis=0), "int8", "is quantized already"),
    ],
    ids=["NaN", "quantized"],
)
def test_a_refused_parameter_frees_nothing(last, recipe, error):
    source, plan = params(), fb.plan(fn, params(), X, recipe=recipe)
    source["layers"][-1] = last(source["layers"][-1])
    with pytest.raises(fb.QuantError, match=error):
        tree.quantize(fn, source, X, recipe=plan, donate=True)
    assert not any(w.is_deleted() for w in source["layers"][:-1])


@pytest.fixture(scope="module")
def eqx():
    return pytest.importorskip("equinox")


def batched(model, x):
    return jax.vmap(model)(x)


@pytest.mark.slow
def test_an_equinox_module_is_quantized_and_called(eqx):
    model = eqx.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))
    quantized = tree.quantize(batched, model, X, recipe="int8")
    assert isinstance(quantized, eqx.nn.MLP) and fb.is_qarray(quantized.layers[0].weight)
    got, want = eqx.filter_jit(fb.transparent(batched))(quantized, X), batched(model, X)
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)
    assert quantized.activation is model.activation


@pytest.mark.slow
def test_an_equinox_module_is_trained_by_an_unchanged_optimizer(eqx):
    optax = pytest.importorskip("optax")
    model = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    run = fb.train(batched, fb.Recipe((fb.Rule(".*weight", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),)))
    optimizer = optax.adamw(1e-2)

    @eqx.filter_jit
    def step(model, state):
        value, gradient = eqx.filter_value_and_grad(lambda model: jnp.mean((run(model, X) - X) ** 2))(model)
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    structure = jax.tree.structure(model)
    state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
    with jax.numpy_dtype_promotion("standard"):  # optax divides by integers
        for _ in range(8):
            model, state, value = step(model, state)
            losses.append(value)
    assert losses[-1] < losses[0] and jax.tree.structure(model) == structure


@pytest.mark.slow
def test_an_equinox_module_is_served_as_it_was_trained(eqx):
    """Paths are those of the fields; an optax step on the float module changes none of that."""
    optax = pytest.importorskip("optax")
    model = eqx.nn.MLP(16, 4, 32, 1, key=jax.random.key(0))
    recipe = fb.Recipe((fb.Rule("layers/[01]/weight", fb.Policy("int8", "int8")),))
    plan = fb.plan(batched, model, X, recipe=recipe)
    assert {row.path: row.axis for row in plan if row.policy} == {"layers/0/weight": (-1,), "layers/1/weight": (-1,)}
    optimizer, trained = optax.sgd(0.1), fb.train(batched, recipe)

    @eqx.filter_jit
    def step(model):
        gradient = eqx.filter_grad(lambda model: jnp.sum(trained(model, X) ** 2))(model)
        return eqx.apply_updates(model, optimizer.update(gradient, optimizer.init(gradient))[0])

    model = step(model)
    quantized = fb.quantize_params(model, plan)
    assert fb.is_qarray(quantized.layers[0].weight) and quantized.layers[0].bias is model.layers[0].bias
    served, expected = eqx.filter_jit(fb.transparent(batched))(quantized, X), eqx.filter_jit(trained)(model, X)
    np.testing.assert_array_equal(served, expected)


def inputs(*shape):
    """Inputs whose channels are correlated."""
    rng = np.random.default_rng(1)
    return jax.device_put(np.float32(rng.standard_normal(shape) @ rng.standard_normal((shape[-1], shape[-1]))))


def scanned(layers, x):
    """Equinox layers that `filter_vmap` made, one after another."""
    return jax.lax.scan(lambda x, layer: (jnp.tanh(jax.vmap(layer)(x)), None), x, layers)[0]


@pytest.mark.slow
def test_methods_learn_from_the_inputs_of_vmapped_equinox_layers(eqx):
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))(jax.random.split(jax.random.key(0), 3))
    x = inputs(64, 16)
    plan, stats = (
        fb.plan(scanned, layers, x, recipe="int4"),
        fb.observe(scanned, layers, [x[:32], x[32:]], "int4", collect=("hessian", "sum")),
    )
    assert plan["weight"].stacked == (-3,)
    rounded = tree.quantize(scanned, layers, recipe=plan)
    quantized = tree.quantize(scanned, layers, x, recipe="int4", method=GPTQ(), stats=stats)
    params = {"weight": layers.weight, "bias": layers.bias}
    expected = fb.quantize_params(params, plan, method=GPTQ(), stats=stats)["weight"]
    jax.tree.map(np.testing.assert_array_equal, quantized.weight, expected)
    exact, run = scanned(layers, x), jax.jit(fb.transparent(scanned))
    lost, lost_by_rounding = (exact - run(q, x) for q in (quantized, rounded))
    assert jnp.linalg.norm(lost) < 0.8 * jnp.linalg.norm(lost_by_rounding)
    first = correct_biases(layers, rounded, plan, stats).bias[0] - layers.bias[0]
    mean_error = (layers.weight - fb.dequantize(rounded.weight))[0] @ x.mean(0)
    np.testing.assert_allclose(first, mean_error, atol=16 * 2.0**-24 * 16)  # float32 sums of 16 products below 16
    with pytest.raises(fb.QuantError, match=r"gptq needs statistics of weight, and there are none; pass stats=fb.observe"):
        tree.quantize(scanned, layers, x, recipe="int4", method=GPTQ())

"""Sequential quantization: the statistics of each group are those of the model as it is quantized so far."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fewbit as fb
from fewbit import workflows
from fewbit.methods import GPTQ, HQQ, QEP, quantize_sequentially
from fewbit.methods.sequential import input_groups
from fewbit.models import forward, params_from_paths
from fewbit.workflows.methods.calibrated import calibrated_weights
from tests.nets.random_decoder import SMALL
from tests.workflows.methods.test_calibrated import data_of, model_of

D = 64


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng((seed, *shape)).standard_normal(shape)))


def weights(*names: str, shape: tuple[int, ...] = (D, D)) -> dict[str, jax.Array]:
    return {name: normal(*shape, seed=i) / 8 for i, name in enumerate(names)}


# Channels of unlike size that depend on each other, as the activations of networks are.
MIXED = normal(D, D, seed=9) / 8 * jnp.linspace(0.05, 2, D)[None]
BATCHES = [normal(96, D, seed=i) @ MIXED for i in range(2)]


def chain(params, x):
    gated = jnp.tanh(x @ params["gate"]) * (x @ params["up"])
    return jnp.tanh(x + gated @ params["down"]) @ params["out"]


CHAIN = weights("gate", "up", "down", "out")


def test_parameters_of_one_input_go_together_in_the_order_of_their_use():
    with jax.checking_leaks():
        assert input_groups(chain, CHAIN, (BATCHES[0],), sorted(CHAIN)) == [["gate", "up"], ["down"], ["out"]]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", [GPTQ(), QEP()], ids=lambda method: method.name)
def test_each_group_sees_the_model_as_it_is_quantized_so_far(method):
    """What a user would do by hand: observe, quantize one group, observe again."""
    plan = fb.plan(chain, CHAIN, BATCHES[0], recipe="w4")
    by_hand = dict(CHAIN)
    for group in (("gate", "up"), ("down",), ("out",)):
        stats = fb.observe(chain, CHAIN, BATCHES, "w4", collect=method.collect, quantized=by_hand)
        now = fb.quantize_params(CHAIN, plan, method=method, stats=stats)
        by_hand |= {path: now[path] for path in group}
    found = quantize_sequentially(chain, CHAIN, BATCHES, "w4", method=method)
    for path, q in found.items():
        np.testing.assert_array_equal(q.codes, by_hand[path].codes, err_msg=path)


def test_statistics_of_a_quantized_model_are_those_of_its_decoded_weights():
    plan = fb.plan(chain, CHAIN, BATCHES[0], recipe="w4")
    quantized = fb.quantize_params(CHAIN, plan)
    decoded = jax.tree.map(fb.dequantize, quantized, is_leaf=lambda x: isinstance(x, fb.QArray))
    stats = fb.observe(chain, CHAIN, BATCHES, "w4", collect=("hessian", "cross", "sum"), quantized=quantized)
    expected = fb.observe(chain, decoded, BATCHES, "w4", collect=("hessian", "sum"))
    for path in CHAIN:
        np.testing.assert_array_equal(stats[path].hessian, expected[path].hessian)
        np.testing.assert_array_equal(stats[path].sum, expected[path].sum)
    x = np.concatenate(BATCHES).astype(np.float64)

    def inputs_of_down(params):
        gate, up = (np.asarray(params[name], np.float64) for name in ("gate", "up"))
        return np.tanh(x @ gate) * (x @ up)

    cross = inputs_of_down(CHAIN).T @ inputs_of_down(decoded)
    # float32 products of 64 and sums of 192 terms: each within 256 roundings of half a unit in the last place
    np.testing.assert_allclose(stats["down"].cross, cross, rtol=0, atol=256 * 2.0**-24 * np.abs(cross).max())


def error(fn, params, quantized, x) -> float:
    exact = fn(params, x)
    return float(jnp.linalg.norm(fb.transparent(fn)(quantized, x) - exact) / jnp.linalg.norm(exact))


def scanned(params, x):
    return lax.scan(lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None), x, params["layers"])[0] @ params["out"]


def repeated(params, x):
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ params["w"]), x) @ params["out"]


def twice(params, x):
    return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"]) @ params["out"]


def experts(params, x):
    sizes = jnp.array([30, 40, 26])
    hidden = jnp.tanh(lax.ragged_dot(x, params["up"], sizes))
    return lax.ragged_dot(hidden, params["down"], sizes) @ params["out"]


def batched(params, x):
    return jnp.einsum("bk,ekn->ebn", x, params["w"]).sum(0) @ params["out"]


STACKED = functools.partial(weights, shape=(3, D, D))
MODELS = {
    "chain": (chain, CHAIN),
    "scan": (scanned, {"layers": STACKED("a", "b"), **weights("out")}),
    "loop": (repeated, weights("w", "out")),
    "twice": (twice, weights("w", "out")),
    "experts": (experts, {**STACKED("up", "down"), **weights("out")}),
    "batched": (batched, {**STACKED("w"), **weights("out")}),
}


@pytest.mark.parametrize(
    "name", [name if name == "chain" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_correcting_inputs_beats_what_ignores_their_errors(name):
    fn, params = MODELS[name]
    recipe = fb.Recipe((fb.Rule(".*", "int3", roles=("matmul", "experts")),))
    plan = fb.plan(fn, params, BATCHES[0], recipe=recipe)
    stats = fb.observe(fn, params, BATCHES, recipe, collect=GPTQ.collect)
    alone = fb.quantize_params(params, plan, method=GPTQ(), stats=stats)
    found = quantize_sequentially(fn, params, BATCHES, recipe, method=QEP())
    assert jax.tree.structure(found) == jax.tree.structure(alone)
    other = normal(96, D, seed=7) @ MIXED
    assert error(fn, params, found, other) < error(fn, params, alone, other)


@pytest.mark.slow
def biased(params, x):
    """Two layers with biases, and a product without one between them."""
    x = jnp.tanh(x @ params["a"]["kernel"] + params["a"]["bias"][None])
    x = jnp.tanh(x @ params["b"]["kernel"])
    return x @ params["c"]["kernel"] + params["c"]["bias"][None]


BIASED = {
    name: {"kernel": normal(D, D, seed=i) / 8} | ({} if name == "b" else {"bias": normal(D, seed=i)})
    for i, name in enumerate("abc")
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["rtn", "gptq", "qep"])
def test_a_corrected_bias_leaves_the_mean_of_the_outputs_as_it_was(name):
    """That of the quantized model's own inputs: mean outputs over the calibration are the float ones, after any nonlinearity."""
    batches = [x + 0.5 for x in BATCHES]

    def means(fn, params):
        return np.mean(np.concatenate([fn(params, x) for x in batches]), axis=0)

    recipe, run = fb.Recipe((fb.Rule(".*/kernel", "int3_g32"),)), fb.transparent(biased)
    found = quantize_sequentially(biased, BIASED, batches, recipe, method=fb.methods.method(name), correct_biases=True)
    plain = quantize_sequentially(biased, BIASED, batches, recipe, method=fb.methods.method(name))
    wanted = means(biased, BIASED)
    # an output of about 1 is a sum of 64 products, and the mean one of 192 outputs: 256 roundings of 2**-24 would be 1.5e-5
    np.testing.assert_allclose(means(run, found), wanted, atol=1e-5)
    assert np.abs(means(run, plain) - wanted).max() > 1e-3
    assert found["b"].keys() == {"kernel"}
    if name != "rtn":  # what follows has seen the new biases
        assert (found["c"]["kernel"].codes != plain["c"]["kernel"].codes).any()


@pytest.mark.slow
def test_a_decoder_gets_the_weights_of_the_layer_by_layer_run(tmp_path):
    config = dataclasses.replace(SMALL, layers=2)
    model, data = model_of(config, tmp_path), data_of(config)
    plan = workflows.plan_model(model, recipe="int4")
    streamed = calibrated_weights(model, plan, QEP(), data, fused={})
    params = {path: jnp.asarray(model.load(path)) for path in model.info}

    def logits(params, tokens):
        return forward(params_from_paths(params, config), tokens, config)

    found = quantize_sequentially(logits, params, [jnp.asarray(data.windows)], plan, method=QEP())
    same = [np.asarray(found[path].codes) == np.asarray(q.codes) for path, q in streamed.items() if path != "embed"]
    assert len(same) == 7 * config.layers
    assert all(isinstance(found[path], fb.QArray) == (plan[path].policy is not None) for path in model.info)
    # Sums in another order move a code at the edge, and QEP carries that to the codes after it.
    assert np.mean(np.concatenate([one.ravel() for one in same])) > 0.97


def test_what_no_product_multiplies_is_rounded():
    def fn(params, i):
        return jnp.tanh(params["table"][i]) @ params["w"]

    params = {"table": normal(32, D), **weights("w")}
    recipe = fb.Recipe((fb.Rule(".*", "int8"),))
    found = quantize_sequentially(fn, params, [(jnp.arange(32),)], recipe, method=GPTQ())
    nearest = fb.quantize_params(params, fb.plan(fn, params, jnp.arange(32), recipe=recipe))
    np.testing.assert_array_equal(found["table"].codes, nearest["table"].codes)
    assert isinstance(found["w"], fb.QArray)
    plain = quantize_sequentially(fn, params, [(jnp.arange(32),)], recipe, method=HQQ())  # needs no statistics
    assert plain["w"].scheme == found["w"].scheme


def test_what_is_refused():
    with pytest.raises(fb.QuantError, match="batches is empty"):
        quantize_sequentially(chain, CHAIN, [], "w4", method=GPTQ())
    plan = fb.plan(chain, CHAIN, BATCHES[0], recipe="w4")
    with pytest.raises(fb.QuantError, match="the plan is for another tree"):
        quantize_sequentially(chain, {**CHAIN, "more": CHAIN["up"]}, BATCHES, plan, method=GPTQ())
    with pytest.raises(fb.QuantError, match="cross compares two models; pass quantized="):
        fb.observe(chain, CHAIN, BATCHES, "w4", collect=QEP.collect)

    def unknown(params, x):
        return lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ params["w"] + 1, x)

    with pytest.raises(fb.UnsupportedError, match="observe cannot collect statistics of every product"):
        quantize_sequentially(unknown, weights("w"), BATCHES, "w4", method=GPTQ())

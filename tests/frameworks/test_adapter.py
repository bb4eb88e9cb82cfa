"""A split model has the functions of `fb`, each with the result that it has for the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration.range_rules import AbsMaxRange
from fewbit.frameworks.adapter import SplitFunction, SplitModel
from fewbit.methods import AWQ, GPTQ, HQQ, RTN, IMatrix, LearnedRounding

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
KEY = jax.random.key(0)


def split(model):
    return SplitModel({"w": model["w"]}, model["offset"], lambda params, rest: {"w": params["w"], "offset": rest})


def fn(model, x, *, factor=1.0):
    return factor * (x @ model["w"]) + model["offset"]


def tied(model, x, *, factor=1.0):
    return factor * (x @ model["w"] @ model["w"].T)


MODEL = {"w": jax.random.normal(KEY, (64, 32)), "offset": jnp.ones((1, 32))}
PARAMS = {"w": MODEL["w"]}
SPARSE = fb.Recipe((fb.Rule("w", "int8", sparsity=fb.Sparsity(2, 4)),))
ADAPTER = {"match": "w", "rank": 2, "alpha": 4.0, "dtype": jnp.bfloat16, "without_product": "skip", "axis": -2}
OBSERVE = {"rule": AbsMaxRange(), "collect": ("range", "absmax")}
ROUNDED = {"method": RTN(), "stats": None, "donate": False}


def pure(params, x, *, factor=1.0):
    return fn({**params, "offset": MODEL["offset"]}, x, factor=factor)


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("of_model", "of_params"),
    [
        pytest.param(
            lambda model: model.plan(fn, X, recipe="int8", factor=2.0).rows,
            lambda: fb.plan(pure, PARAMS, X, recipe="int8").rows,
            id="plan",
        ),
        pytest.param(
            lambda model: model.observe(fn, [X, 2 * X], "w8a8", **OBSERVE, factor=2.0)["w"],
            lambda: fb.observe(pure, PARAMS, [X, 2 * X], "w8a8", **OBSERVE)["w"],
            id="observe",
        ),
        pytest.param(
            lambda model: model.delayed_state(fn, X, recipe="te_fp8_delayedscaling", factor=2.0),
            lambda: fb.delayed_state(pure, PARAMS, X, recipe="te_fp8_delayedscaling"),
            id="delayed_state",
        ),
        pytest.param(
            lambda model: model.update_sparsity(model.sparsity_state(fn, X, recipe=SPARSE, factor=2.0), 3),
            lambda: fb.sparsity_state(pure, PARAMS, X, recipe=SPARSE).update(PARAMS, 3),
            id="sparsity",
        ),
        pytest.param(
            lambda model: model.lora_init(KEY, tied, X, **ADAPTER, factor=2.0),
            lambda: fb.lora.init(KEY, tied, PARAMS, X, **ADAPTER),
            id="lora_init",
        ),
    ],
)
def test_what_is_said_of_a_model_is_what_is_said_of_its_parameters(of_model, of_params):
    equal(of_model(split(MODEL)), of_params())


@pytest.mark.parametrize("is_planned", [False, True])
def test_the_rebuilt_model_has_the_quantized_parameters_and_its_other_values(is_planned):
    recipe = fb.plan(*split(MODEL).call(fn), X, recipe="int8") if is_planned else "int8"
    quantized = split(MODEL).quantize(fn, X, recipe=recipe, **ROUNDED)
    equal(quantized["w"], fb.quantize_params(PARAMS, fb.plan(pure, PARAMS, X, recipe="int8"))["w"])
    assert quantized["offset"] is MODEL["offset"]


@pytest.mark.parametrize(
    "method", [GPTQ(), AWQ(), HQQ(), IMatrix(), LearnedRounding(rounds=4)], ids=lambda method: method.name
)
@pytest.mark.parametrize("donate", [False, True])
def test_every_method_gives_the_codes_that_it_gives_for_the_parameters(method, donate):
    stats = fb.observe(pure, PARAMS, [X], "int4", collect=method.collect) if method.collect else None
    plan, model = fb.plan(pure, PARAMS, X, recipe="int4"), jax.tree.map(jnp.copy, MODEL)
    quantized = split(model).quantize(fn, X, recipe="int4", method=method, stats=stats, donate=donate)
    equal(quantized["w"], fb.quantize_params(PARAMS, plan, method=method, stats=stats)["w"])
    assert model["w"].is_deleted() == donate and quantized["offset"] is model["offset"]


@pytest.mark.parametrize("donate", [False, True])
def test_missing_statistics_are_those_of_the_parameters(donate):
    missing = r"gptq needs statistics of w, and there are none; pass stats=fb.observe\(.*collect=\('hessian',\)"
    for stats in (None, fb.observe(lambda params, x: x @ params["v"], {"v": MODEL["w"]}, [X], "int4")):
        with pytest.raises(fb.QuantError, match=missing):
            split(MODEL).quantize(fn, X, recipe="int4", method=GPTQ(), stats=stats, donate=donate)
    with pytest.raises(fb.QuantError, match="stats is given, and method rtn uses none"):
        split(MODEL).quantize(fn, X, recipe="int4", method=RTN(), stats=stats, donate=donate)
    assert not MODEL["w"].is_deleted()


def test_corrected_biases_are_those_of_the_parameters():
    def split_all(model):
        return SplitModel(model, None, lambda params, rest: params)

    def dense(params, x):
        return x @ params["w"] + params["offset"][None]

    model = MODEL | {"offset": jnp.ones(32)}
    plan, stats = fb.plan(dense, model, X, recipe="int4"), fb.observe(dense, model, [X], "int4", collect=("sum",))
    quantized, named = fb.quantize_params(model, plan), {"w": "offset"}
    corrected = split_all(quantized).correct_biases(model, plan, stats, biases=named)
    equal(corrected, fb.methods.correct_biases(model, quantized, plan, stats, biases=named))


def test_a_change_of_the_parameters_keeps_the_rest():
    changed = split(MODEL).replaced(lambda params: {"w": -params["w"]})
    assert (changed["w"] == -MODEL["w"]).all() and changed["offset"] is MODEL["offset"]


def test_a_pruned_model_and_a_merged_one_keep_the_rest():
    state = fb.sparsity_state(pure, PARAMS, X, recipe=SPARSE).update(PARAMS)
    adapters = jax.tree.map(jnp.ones_like, fb.lora.init(KEY, pure, PARAMS, X, match="w", rank=2))
    sparse, merged = split(MODEL).pruned(state), split(MODEL).lora_merge(adapters, scheme="int8")
    equal(sparse["w"], state.apply(PARAMS)["w"])
    equal(merged["w"], fb.lora.merge(PARAMS, adapters, scheme="int8")["w"])
    assert sparse["offset"] is merged["offset"] is MODEL["offset"]


def test_a_function_of_a_model_is_transformed_as_one_of_its_parameters():
    split_fn, reported = SplitFunction(fn, split), []
    quantized = split(MODEL).quantize(fn, X, recipe="int8", **ROUNDED)
    run = split_fn.transparent(fallback="error", report=None)
    equal(run(quantized, X, factor=2.0), fb.transparent(pure)({"w": quantized["w"]}, X, factor=2.0))

    decoding = SplitFunction(lambda model: jnp.sin(model["w"]), split).transparent(
        fallback="dequantize", report=reported.append
    )
    assert decoding(quantized).shape == (64, 32) and reported[0].primitive == "sin"

    state = fb.sparsity_state(pure, PARAMS, X, recipe=SPARSE).update(PARAMS)
    trained = split_fn.train(SPARSE, report=None)
    equal(trained(MODEL, X, factor=2.0, sparsity=state), fb.train(pure, SPARSE)(PARAMS, X, factor=2.0, sparsity=state))

    adapters = jax.tree.map(jnp.ones_like, fb.lora.init(KEY, pure, PARAMS, X, match="w", rank=2))
    adapted = split_fn.lora_apply(dropout=0.5, fallback="error", report=None)(
        quantized, adapters, X, factor=2.0, dropout_key=KEY
    )
    want = fb.lora.apply(pure, dropout=0.5)({"w": quantized["w"]}, adapters, X, factor=2.0, dropout_key=KEY)
    equal(adapted, want)


def test_the_function_may_name_its_arguments_as_the_adapter_does():
    def named(model, x, *, fn, params, rest, rebuild):
        return x @ model["w"] * fn * params * rest * rebuild

    named_like_ours = {"fn": 2.0, "params": 3.0, "rest": 0.5, "rebuild": 1.0}
    quantized = split(MODEL).quantize(named, X, recipe="int8", **ROUNDED, **named_like_ours)
    run = SplitFunction(named, split).transparent(fallback="error", report=None)
    equal(run(quantized, X, **named_like_ours), 3 * (X @ quantized["w"]))

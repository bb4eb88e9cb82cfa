"""A split model: planned, quantized and rebuilt as a framework's adapter needs it."""

import jax.numpy as jnp
import pytest

import fewbit as fb
from fewbit.frameworks.adapter import SplitModel

X = jnp.ones((1, 64))


def split(model):
    return SplitModel({"w": model["w"]}, model["offset"], lambda params, rest: {"w": params["w"], "offset": rest})


def fn(model, x, *, factor=1.0):
    return factor * (x @ model["w"]) + model["offset"]


MODEL = {"w": jnp.full((64, 32), 0.5), "offset": jnp.ones((1, 32))}


def test_rules_match_the_parameters_only():
    plan = fb.plan(*split(MODEL).call(fn, factor=2.0), X, recipe="int8")
    assert [row.path for row in plan] == ["w"] and plan["w"].axis == (-2,)


@pytest.mark.parametrize("is_planned", [False, True])
def test_the_rebuilt_model_has_the_quantized_parameters_and_its_other_values(is_planned):
    recipe = fb.plan(*split(MODEL).call(fn), X, recipe="int8") if is_planned else "int8"
    quantized = split(MODEL).quantize(fn, X, recipe=recipe, donate=False)
    assert fb.is_qarray(quantized["w"]) and quantized["offset"] is MODEL["offset"]
    assert jnp.allclose(fb.transparent(fn)(quantized, X), fn(MODEL, X), rtol=0.01)


def test_a_change_of_the_parameters_keeps_the_rest():
    changed = split(MODEL).replaced(lambda params: {"w": -params["w"]})
    assert (changed["w"] == -MODEL["w"]).all() and changed["offset"] is MODEL["offset"]

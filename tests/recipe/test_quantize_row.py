"""One parameter and its row of a plan: checked, then quantized; identical layers compile once."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.ops.policy import Policy
from fewbit.recipe.quantize_row import observation_of, quantize_finite, quantize_row, quantized_leaf
from fewbit.recipe.rows import PlanRow

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
ROW = PlanRow("layers/0/w", (4, 32), "float32", Policy("int8"), (-1,), (), (), 512, 144)


def test_a_row_with_a_policy_quantizes():
    np.testing.assert_array_equal(quantize_row(X, ROW).codes, fb.quantize(X, "int8").codes)
    assert quantize_row(X, dataclasses.replace(ROW, policy=None)) is X


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (X[:2], r"layers/0/w has shape \(2, 32\), but the plan was made for \(4, 32\)"),
        (fb.quantize(X, "nf4"), "layers/0/w is quantized already, as nf4"),
        (X.at[1, 2].set(jnp.nan), r"NaN or infinite values in layers/0/w \(1 of 128\); repair the checkpoint, or exclude"),
    ],
    ids=["shape", "quantized", "NaN"],
)
def test_what_the_row_is_not_for_is_refused(leaf, message):
    with pytest.raises(QuantError, match=message):
        quantize_row(leaf, ROW)


def test_identical_layers_compile_once(monkeypatch):
    traced = []

    def counted(x, row, *method):
        traced.append(row.path)
        return quantized_leaf(x, row, *method)

    monkeypatch.setattr(sys.modules["fewbit.recipe.quantize_row"], "quantized_leaf", counted)
    for layer in range(3):
        quantize_finite(X, dataclasses.replace(ROW, path=f"layers/{layer}/w", reason=f"reason {layer}"))
    assert traced == ["layers/*/w"]


def test_statistics_of_two_models_are_not_advised_of_observe():
    with pytest.raises(
        QuantError, match=r"qep needs statistics of layers/0/w.*quantize_sequentially.*`fewbit quantize --method qep`"
    ):
        observation_of(dataclasses.replace(ROW, ops=("dot_general",)), fb.methods.QEP(), None)


def test_layers_of_a_slice_have_no_statistics_of_their_own():
    def some(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"][:2])[0]

    stack, x = {"w": jnp.stack([X.T @ X] * 3)}, jnp.ones((2, 32))
    stats = fb.observe(some, stack, [x], "int4", collect=("hessian",))
    with pytest.raises(QuantError, match=r"w has \(3,\) layers.*those of all layers together.*Scan over the layers"):
        fb.quantize_params(stack, fb.plan(some, stack, x, recipe="int4"), method=fb.methods.GPTQ(), stats=stats)


@pytest.mark.parametrize("method", [fb.methods.GPTQ(), fb.methods.AWQ()], ids=["gptq", "awq"])
def test_methods_with_statistics_quantize_on_an_explicit_mesh(method):
    mesh, spec = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4]), jax.P("a", "b")
    w, x = X.T @ X, X

    def fn(p, x):
        return x @ p["w"]

    stats = fb.observe(fn, {"w": w}, [(x,)], "int4_g16", collect=method.collect)
    plan = fb.plan(fn, {"w": w}, x, recipe="int4_g16")
    wanted = fb.quantize_params({"w": w}, plan, method=method, stats=stats)["w"]
    there = {"w": jax.device_put(w, jax.NamedSharding(mesh, spec))}
    q = fb.quantize_params(there, plan, method=method, stats=stats)["w"]
    assert q.sharding.spec == spec
    np.testing.assert_allclose(jax.device_get(fb.dequantize(q)), fb.dequantize(wanted), rtol=1e-5)


def test_a_table_that_is_also_the_head_is_not_corrected_for_the_errors_of_its_inputs():
    """The embeddings that are looked up in it have no errors."""
    w, x = X.T @ X, np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)

    def fn(p, tokens):
        return jnp.tanh(p["embed"][tokens] @ p["w"]) @ p["embed"].T

    plan = fb.plan(fn, {"embed": w, "w": w}, jnp.arange(8), recipe={"rules": [{"path": ".*", "policy": "int4_g16"}]})
    seen = fb.calibration.Observation(hessian=x.T @ x, cross=1.3 * x.T @ x, count=jnp.float32(64))
    codes = {
        (path, method.name): quantize_row(w, plan[path], method, seen).codes
        for path in ("embed", "w")
        for method in (fb.methods.GPTQ(), fb.methods.QEP())
    }
    np.testing.assert_array_equal(codes["embed", "qep"], codes["embed", "gptq"])
    assert np.any(codes["w", "qep"] != codes["w", "gptq"])

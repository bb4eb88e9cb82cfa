"""Methods for trees of parameters: `fb.quantize_params(..., method=)`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import GPTQ, RTN
from fewbit.recipe import quantize_row

RNG = np.random.default_rng(0)
PARAMS = {
    "table": jnp.asarray(RNG.standard_normal((20, 32)), jnp.float32),
    "layers": jnp.asarray(RNG.standard_normal((3, 32, 32)) / 6, jnp.float32),
    "out": jnp.asarray(RNG.standard_normal((4, 8, 32)), jnp.float32),
}
BATCHES = [jnp.asarray(RNG.integers(20, size=64), jnp.int32) for _ in range(3)]
RECIPE = fb.Recipe((fb.Rule(".*", "int4_g32"),))


def network(params, tokens):
    x = jnp.take(params["table"], tokens, axis=0)
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jnp.einsum("thd,hdk->tk", x.reshape(-1, 4, 8), params["out"])


PLAN = fb.plan(network, PARAMS, BATCHES[0], recipe=RECIPE)
STATS = fb.observe(network, PARAMS, BATCHES, RECIPE, collect=GPTQ.collect)


def test_every_product_has_less_error_and_tables_are_rounded():
    q, nearest = (fb.quantize_params(PARAMS, PLAN, method=m, stats=s) for m, s in ((GPTQ(), STATS), (RTN(), None)))
    assert jax.tree.structure(q) == jax.tree.structure(nearest)
    np.testing.assert_array_equal(q["table"].codes, nearest["table"].codes)
    for name, shape in (("layers", (3, 32, 32)), ("out", (1, 32, 32))):
        hessian = np.asarray(STATS[name].hessian, np.float64).reshape(shape)
        errors = []
        for one in (q, nearest):
            error = np.asarray(fb.dequantize(one[name]) - PARAMS[name], np.float64).reshape(shape)
            errors.append(np.einsum("lkn,lkm,lmn->l", error, hessian, error))
        assert np.all(errors[0] < 0.9 * errors[1]), name


def test_layers_of_a_loop_are_quantized_each_with_its_own_statistics():
    stacked = fb.quantize_params(PARAMS, PLAN, method=GPTQ(), stats=STATS)["layers"]
    seen = STATS["layers"].hessian
    for layer in range(3):
        row = dataclasses.replace(PLAN["layers"], shape=(32, 32), stacked=())
        observation = dataclasses.replace(STATS["layers"], hessian=seen[layer], count=STATS["layers"].count[layer])
        one = quantize_row(PARAMS["layers"][layer], row, GPTQ(), observation)
        np.testing.assert_array_equal(fb.dequantize(one), fb.dequantize(stacked)[layer])


def test_the_policy_and_the_dtype_stay():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    recipe = fb.Recipe((fb.Rule("layers", fb.Policy("int8", "int8")),))
    stats = fb.observe(network, params, BATCHES, recipe, collect=("hessian",))
    plan = fb.plan(network, params, BATCHES[0], recipe=recipe)
    q = fb.quantize_params(params, plan, method=GPTQ(), stats=stats)["layers"]
    assert (q.dtype, q.policy) == (jnp.bfloat16, fb.Policy("int8", "int8"))


def test_what_is_refused():
    with pytest.raises(fb.QuantError, match=r"gptq needs statistics of layers, and there are none; pass stats=fb.observe"):
        fb.quantize_params(PARAMS, PLAN, method=GPTQ())
    with pytest.raises(fb.QuantError, match="stats is given, and method rtn uses none"):
        fb.quantize_params(PARAMS, PLAN, stats=STATS)
    ranges = fb.observe(network, PARAMS, BATCHES, RECIPE)
    with pytest.raises(
        fb.QuantError, match=r"gptq needs hessian of layers; pass stats=fb.observe\(.*collect=\('hessian',\)"
    ):
        fb.quantize_params(PARAMS, PLAN, method=GPTQ(), stats=ranges)
    overflowing = jax.tree.map(lambda leaf: leaf.at[..., 0].set(jnp.inf), STATS["layers"])
    broken = dataclasses.replace(STATS, observations={**STATS.observations, "layers": overflowing})
    with pytest.raises(
        fb.QuantError,
        match=r"NaN or infinite values in the statistics of layers \(\d+ of [\d,]+\); the activations overflow",
    ):
        fb.quantize_params(PARAMS, PLAN, method=GPTQ(), stats=broken)
    sparse = fb.Recipe((fb.Rule("layers", "int4_g32", sparsity=fb.Sparsity(2, 4)),))
    plan = fb.plan(network, PARAMS, BATCHES[0], recipe=sparse)
    with pytest.raises(fb.UnsupportedError, match="layers: gptq would move pruned weights away from zero"):
        fb.quantize_params(PARAMS, plan, method=GPTQ(), stats=STATS)
    wrong = dataclasses.replace(STATS, observations={**STATS.observations, "layers": STATS["out"]})
    with pytest.raises(fb.QuantError, match="layers"):
        fb.quantize_params(PARAMS, PLAN, method=GPTQ(), stats=wrong)

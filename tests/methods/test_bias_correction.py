"""Bias correction: the mean of what a layer's output loses is gone, whatever the weight's layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import GPTQ, correct_biases

ROWS, K, N = 64, 32, 24


def normal(*shape: int, mean: float = 0.0) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng(sum(shape)).normal(mean, 1, shape)))


def dense(params, x):
    return x @ params["dense"]["kernel"] + params["dense"]["bias"][None]


def outputs_in_front(params, x):
    return x @ params["weight"].T + params["b"][None]


def heads(params, x):
    queries = jnp.einsum("tk,khd->thd", x, params["q"]) + params["q_bias"][None]
    return jnp.einsum("thd,hdk->tk", queries, params["o"]) + params["o_bias"][None]


def scanned(params, x):
    return jax.lax.scan(lambda x, layer: (jnp.sin(x) @ layer["kernel"] + layer["bias"][None], None), x, params)[0]


def experts(params, x):
    return jnp.einsum("etk,ekn->etn", x, params["w"]) + params["b"][:, None]


def ragged(params, x):
    biases = [jnp.broadcast_to(params["b"][i], (rows, N)) for i, rows in enumerate((40, 24, 0))]
    return jax.lax.ragged_dot(x, params["w"], jnp.array([40, 24, 0])) + jnp.concatenate(biases)


X = normal(ROWS, K, mean=2.0)
LAYERS = {
    "dense": (dense, {"dense": {"kernel": normal(K, N), "bias": normal(N)}}, X),
    "outputs in front": (outputs_in_front, {"weight": normal(N, K), "b": normal(N)}, X),
    "experts": (experts, {"w": normal(3, K, N), "b": normal(3, N)}, normal(3, ROWS, K, mean=1.0)),
    "ragged": (ragged, {"w": normal(3, K, N), "b": normal(3, N)}, X),
}


def corrected(fn, params, x, recipe="int4", method=None, **options):
    """The quantized parameters without and with the correction."""
    method = method or fb.methods.RTN()
    plan = fb.plan(fn, params, x, recipe=recipe)
    stats = fb.observe(fn, params, [x], recipe, collect=("sum", *method.collect))
    quantized = fb.quantize_params(params, plan, method=method, stats=stats if method.collect else None)
    return quantized, correct_biases(params, quantized, plan, stats, **options)


@pytest.mark.parametrize("method", [None, pytest.param(GPTQ(), marks=pytest.mark.slow)], ids=["rtn", "gptq"])
@pytest.mark.parametrize(("fn", "params", "x"), LAYERS.values(), ids=LAYERS)
def test_the_mean_of_every_output_is_that_of_the_float_layer(fn, params, x, method):
    before, after = corrected(fn, params, x, method=method)
    exact, run = fn(params, x), fb.transparent(fn)
    size = float(jnp.abs(exact).mean())
    assert jnp.abs((exact - run(before, x)).mean(-2)).max() > 1e-3 * size
    means = exact - run(after, x)
    if fn is ragged:
        means = jnp.stack([means[:40].mean(0), means[40:].mean(0)])
        np.testing.assert_array_equal(after["b"][2], params["b"][2])  # an expert without tokens
    else:
        means = means.mean(-2)
    # Float32 sums of K products and of ROWS outputs: 2**-24 (K + ROWS) = 6e-6 of their magnitudes.
    np.testing.assert_allclose(means, 0, atol=1e-5 * size)


def test_blocks_along_another_axis_than_the_contracted_one():
    params, rule = {"w": normal(K, K), "b": normal(K)}, fb.Rule("w", "int4", axis=-1)

    def layer(params, x):
        return x @ params["w"] + params["b"][None]

    quantized, after = corrected(layer, params, X, fb.Recipe((rule,)))
    exact, run = layer(params, X), fb.transparent(layer)
    assert jnp.abs((exact - run(quantized, X)).mean(0)).max() > 1e-2
    np.testing.assert_allclose((exact - run(after, X)).mean(0), 0, atol=1e-5 * float(jnp.abs(exact).mean()))
    with pytest.raises(
        fb.UnsupportedError, match=r"w: gptq takes blocks along the axes that products contract, \(-2,\), and"
    ):
        corrected(layer, params, X, fb.Recipe((rule,)), GPTQ())


def test_several_axes_and_several_products():
    params = {"q": normal(K, 4, 8), "q_bias": normal(4, 8), "o": normal(4, 8, K), "o_bias": normal(K)}
    before, after = corrected(heads, params, X)
    error = params["q"] - fb.dequantize(before["q"])
    expected = params["q_bias"] + jnp.einsum("k,khd->hd", X.mean(0), error)
    np.testing.assert_allclose(after["q_bias"], expected, rtol=1e-5, atol=1e-5)
    queries = (jnp.einsum("tk,khd->thd", X, params["q"]) + params["q_bias"][None]).mean(0)  # of the float model
    expected = params["o_bias"] + jnp.einsum("hd,hdk->k", queries, params["o"] - fb.dequantize(before["o"]))
    np.testing.assert_allclose(after["o_bias"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_of_a_scan_have_a_correction_each(axis):
    def layers_first(params):
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), params)

    layers = {"kernel": normal(3, K, K), "bias": normal(3, K)}
    params = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, axis), layers)
    before, after = corrected(lambda params, x: scanned(layers_first(params), x), params, X)
    decoded, moved, x = layers_first(fb.dequantize(before["kernel"])), layers_first(after["bias"]), X
    for i in range(3):
        mean, error = jnp.sin(x).mean(0), layers["kernel"][i] - decoded[i]
        np.testing.assert_allclose(moved[i], layers["bias"][i] + mean @ error, rtol=1e-4, atol=1e-4)
        x = jnp.sin(x) @ layers["kernel"][i] + layers["bias"][i][None]


def test_biases_by_other_names_and_none():
    def layer(params, x):
        return x @ params["up"] + params["offset"].astype(x.dtype)[None]

    params = {"up": normal(K, N), "offset": jnp.zeros(N, jnp.bfloat16)}
    before, after = corrected(layer, params, X)
    assert after is not before and not after["offset"].any(), "no parameter is named up_bias"
    _, after = corrected(layer, params, X, biases={"up": "offset"})
    assert after["offset"].any() and after["offset"].dtype == jnp.bfloat16
    params = {"dense": {"kernel": normal(K, N), "bias": normal(N)}}
    _, after = corrected(dense, params, X, biases={"dense/kernel": None})
    np.testing.assert_array_equal(after["dense"]["bias"], params["dense"]["bias"])


def test_a_bias_of_two_products_gets_both_corrections():
    def layer(params, x):
        return x @ params["a"] + x @ params["b"] + params["bias"][None]

    params = {"a": normal(K, N), "b": normal(K, N), "bias": normal(N)}
    single = [corrected(layer, params, X, biases={name: "bias"})[1]["bias"] - params["bias"] for name in ("a", "b")]
    _, after = corrected(layer, params, X, biases={"a": "bias", "b": "bias"})
    np.testing.assert_allclose(after["bias"] - params["bias"], sum(single), rtol=1e-5, atol=1e-6)


def test_what_is_refused():
    fn, params, x = LAYERS["dense"]
    plan = fb.plan(fn, params, x, recipe="int4")
    quantized = fb.quantize_params(params, plan)
    with pytest.raises(fb.QuantError, match=r'dense/kernel has no sums of its inputs; .*collect=\("sum",\)'):
        correct_biases(params, quantized, plan, fb.observe(fn, params, [x], "int4", collect=("squares",)))
    stats = fb.observe(fn, params, [x], "int4", collect=("sum",))
    for biases, said in (
        ({"dense/kernel": "dense/offset"}, "the bias 'dense/offset' of dense/kernel is not among the parameters"),
        ({"dense/bias": "dense/bias"}, "biases names 'dense/bias', which is not quantized by the plan"),
        ({"dense/kernel": "dense/kernel"}, r"is QArray\(int4.*it must be a float array of shape \(24,\)"),
    ):
        with pytest.raises(fb.QuantError, match=said):
            correct_biases(params, quantized, plan, stats, biases=biases)
    with pytest.raises(fb.QuantError, match="different parameters: "):
        correct_biases(params["dense"], quantized, plan, stats)


def test_inputs_that_overflow_are_refused():
    params = {"dense": {"kernel": normal(K, N), "bias": jnp.zeros(N)}}
    with pytest.raises(fb.QuantError, match=r"sums of inputs of dense/kernel \(1 of 32\); the activations overflow"):
        corrected(dense, params, X.at[0, 0].set(jnp.inf))


def test_batch_axes_that_are_not_first_are_refused():
    def last(params, x):
        return jnp.einsum("etk,nke->etn", x, params["w"]) + params["b"][:, None]

    params, x = {"w": normal(3, K, 3), "b": normal(3, 3)}, normal(3, ROWS, K)
    with pytest.raises(fb.UnsupportedError, match=r"w has the batch axes \(-1,\).*store them first and in this order"):
        corrected(last, params, x)
    corrected(last, params, x, biases={"w": None})

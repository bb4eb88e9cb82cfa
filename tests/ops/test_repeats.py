"""Layers that repeat are evaluated once; what differs is never taken for the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb


def mlp(params, x, scales=None):
    for i, w in enumerate(params):
        x = jnp.tanh(x @ w.T) + x * (1.0 if scales is None else scales[i])
    return x


@pytest.fixture(scope="module")
def layers():
    random = np.random.default_rng(0)
    quantized = [fb.quantize(jnp.asarray(random.normal(size=(32, 32)) / 6, jnp.float32), "int8") for _ in range(6)]
    return quantized, [fb.dequantize(w) for w in quantized]


def inner_jits(fn, *args):
    return [e.params["jaxpr"] for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive.name in ("jit", "pjit")]


X = jnp.ones((2, 32))


def test_each_layer_is_one_equation_with_one_body(layers):
    jaxpr = jax.make_jaxpr(fb.transparent(mlp))(layers[0], X)
    bodies = inner_jits(fb.transparent(mlp), layers[0], X)
    assert len(jaxpr.eqns) <= 8 < len(jax.make_jaxpr(mlp)(layers[1], X).eqns)
    assert len({id(body) for body in bodies[:5]}) == 1
    found = jax.jit(fb.transparent(mlp))(layers[0], X)
    np.testing.assert_allclose(found, mlp(layers[1], X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scales", [(0.0, -0.0, 0.5, 1.0, 2.0, 0.0), (1.0,) * 5 + (float("nan"),)], ids=["signs", "nan"])
def test_literals_that_differ_make_layers_that_differ(layers, scales):
    """-0.0 is not 0.0: dividing by it tells."""

    def net(params, x):
        return 1 / mlp(params, 0 * x, scales) * 0 + mlp(params, x, scales)

    found, expected = jax.jit(fb.transparent(net))(layers[0], X), jax.jit(net)(layers[1], X)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layers_of_other_shapes_and_schemes(layers):
    mixed = [fb.quantize(w, name) for w, name in zip(layers[1], ["nf4", "int8", "nf4", "int4", "nvfp4", "nf4"], strict=True)]
    found = jax.jit(fb.transparent(mlp))(mixed, X)
    np.testing.assert_allclose(found, mlp([fb.dequantize(w) for w in mixed], X), rtol=1e-5, atol=1e-6)


def test_the_fallback_is_reported_for_every_layer(layers):
    def net(params, x):
        for w in params:
            x = jnp.tanh(x @ w.T) + w.sum()
        return x

    places = []
    jax.eval_shape(fb.transparent(net, fallback="dequantize", report=places.append), layers[0], X)
    assert [place.primitive for place in places] == ["reduce_sum"] * 6


def test_gradients_and_custom_rules_in_repeated_layers(layers):
    def net(params, x):
        for w in params:
            x = jax.nn.silu(jnp.maximum(x @ w.T, -1.0)) + jax.nn.relu(x)
        return (x**2).sum()

    run = fb.transparent(net)
    found = jax.jit(jax.grad(lambda x: run(layers[0], x)))(X)
    np.testing.assert_allclose(found, jax.grad(lambda x: net(layers[1], x))(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: run(layers[0], x))(X), found, rtol=1e-4, atol=1e-5)


def test_the_trace_grows_with_the_layers_not_with_their_length(layers):
    """What the bench measures as time, in equations: one for each layer past the first."""
    run = fb.transparent(mlp)
    counts = [len(jax.make_jaxpr(lambda p, x: run(p, x))(layers[0][:n], X).eqns) for n in (3, 4, 5)]
    assert counts[2] - counts[1] == counts[1] - counts[0] == 1


def test_layers_that_differ_by_name_keep_their_names(layers):
    def net(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w.T)
        return x

    text = jax.jit(fb.transparent(net)).lower(layers[0], X).as_text(debug_info=True)
    assert all(f"layer_{i}" in text for i in range(6))
    found = jax.jit(fb.transparent(net))(layers[0], X)
    np.testing.assert_allclose(found, net(layers[1], X), rtol=1e-5, atol=1e-6)

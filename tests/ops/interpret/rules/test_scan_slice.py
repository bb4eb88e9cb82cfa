"""Loops over stacked quantized arrays, whose products read each array where it lies in the stack."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fewbit as fb
from fewbit.kernels.extension import extension
from fewbit.ops.interpret.rules.scan_slice import ScanSlice

pytestmark = pytest.mark.skipif(
    extension("fewbit.kernels.qmatmul.cpu._dequant_gemm").missing is not None, reason="the CPU kernels are not built"
)
LAYERS, WIDTH = 3, 96


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """As on one CPU device, where compiled kernels are chosen by themselves."""
    monkeypatch.setattr("fewbit.kernels.qmatmul.cpu.backend.device_refusal", lambda: None)


def through(weights, x):
    """A loop that multiplies by each layer's matrix, whose columns are contracted, and gives what every layer made."""

    def layer(x, w):
        y = lax.dot_general(x, w.astype(x.dtype), (((1,), (1,)), ((), ())))
        return jnp.tanh(y), y

    return lax.scan(layer, x, weights, reverse=True)


def stack(scheme: str) -> fb.QArray:
    return fb.quantize(jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) * 0.1, scheme)


def copies(fn, *args) -> int:
    """How many slices of bytes the compiled loop copies."""
    return sum("dynamic_slice" in line and "xui8>" in line for line in jax.jit(fn).lower(*args).as_text().splitlines())


def through_transposes(weights, x):
    """The same with each matrix transposed, as `x @ w.T` is written."""

    def layer(x, w):
        y = x @ w.astype(x.dtype).T
        return jnp.tanh(y), y

    return lax.scan(layer, x, weights, reverse=True)


@pytest.mark.parametrize("model", [through, through_transposes])
@pytest.mark.parametrize("scheme", [pytest.param("q4_1", marks=pytest.mark.slow), "nvfp4", "int8"])
def test_a_loop_reads_its_weights_where_they_lie(scheme, model):
    q, x = stack(scheme), jax.random.normal(jax.random.key(1), (2, WIDTH))
    fn = fb.transparent(model)
    assert copies(fn, q, x) == 0
    got, expected = jax.jit(fn)(q, x), through(fb.dequantize(q), x)
    # Sums of 96 products in another order, three times over; |x w| stays below 10.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=96 * 10 * 2.0**-23), got, expected)


@pytest.mark.parametrize("scheme", ["q4_1", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_policy_reads_its_weights_where_they_lie(scheme):
    q, x = stack(scheme), jax.random.normal(jax.random.key(1), (2, WIDTH))
    policy = fb.Policy(q.scheme, "int8" if scheme == "int8" else "int8_g32")
    policed = dataclasses.replace(q, policy=policy)
    fn = jax.jit(fb.transparent(through))
    last, every = fn(policed, x)
    if scheme == "q4_1":
        compiled = fn.lower(policed, x).compile().as_text()  # XLA drops the slices that only a gradient would read
        assert not any("dynamic-slice" in line and "= u8" in line for line in compiled.splitlines())

    def product(x, w):
        return fb.dot_general(x, w, (((1,), (1,)), ((), ())), policy=policy)

    def loss(fn, weights, x):
        return jnp.sum(fn(weights, x)[0] ** 2)

    layers = [jax.tree.map(lambda leaf: leaf[i], q) for i in range(LAYERS)]  # noqa: B023

    def unrolled(weights, x):
        made = []
        for w in reversed(weights):
            made.append(product(x, w))
            x = jnp.tanh(made[-1])
        return x, jnp.stack(made[::-1])

    expected, of_layers = jax.jit(unrolled)(layers, x)
    np.testing.assert_array_equal(last, expected)
    np.testing.assert_array_equal(every, of_layers)
    got = jax.jit(jax.grad(lambda x: loss(fn, policed, x)))(x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(lambda x: loss(unrolled, layers, x)))(x), atol=1e-4)


def test_gradients_and_vmap_are_those_of_slices():
    q, x = stack("q4_1"), jax.random.normal(jax.random.key(1), (2, WIDTH))
    fn = fb.transparent(through)

    def loss(fn, weights, x):
        return jnp.sum(fn(weights, x)[0] ** 2)

    got = jax.jit(jax.vmap(jax.grad(lambda x: loss(fn, q, x))))(x[:, None])
    expected = jax.vmap(jax.grad(lambda x: loss(through, fb.dequantize(q), x)))(x[:, None])
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_what_is_no_product_takes_the_array_by_itself():
    def rows(weights, x):
        def layer(x, w):
            return x + jnp.take(w, jnp.array([3]), axis=0), w.T

        return lax.scan(layer, x, weights)

    q = stack("int8")
    x, turned = jax.jit(fb.transparent(rows))(q, jnp.zeros((1, WIDTH)))
    np.testing.assert_allclose(x, fb.dequantize(q)[:, 3].sum(0, keepdims=True), atol=1e-6)
    assert fb.is_qarray(turned) and not isinstance(turned, ScanSlice)
    np.testing.assert_array_equal(fb.dequantize(turned), fb.dequantize(q).swapaxes(1, 2))


def test_a_trained_parameter_beside_the_stack_computes_as_with_layers_one_by_one():
    q, w, x = stack("int8"), jax.random.normal(jax.random.key(1), (WIDTH, WIDTH)) / 10, jnp.ones((2, WIDTH)) / 10
    layers = [jax.tree.map(lambda leaf: leaf[i], q) for i in range(LAYERS)]  # noqa: B023

    def layer(w, x, s):
        scores = jax.checkpoint(lambda x, s: jnp.tanh(x @ s) @ x.T)(x, s)  # the second product has no parameter
        rows, _ = lax.scan(lambda total, row: (total + row @ w.T, None), jnp.zeros(WIDTH), s)  # it slices s again
        return jnp.tanh(x @ (w @ s)) + rows[None] + scores.sum()

    def looped(p, x):
        return lax.scan(lambda x, s: (layer(p["w"], x, s), None), x, p["s"])[0]

    def unrolled(p, x):
        for s in p["s"]:
            x = layer(p["w"], x, s)
        return x

    recipe = fb.Recipe((fb.Rule("w", "int4"),), products=(fb.Rule(".*", fb.Policy("int2", "int2")),))
    got = jax.jit(fb.train(looped, recipe))({"w": w, "s": q}, x)
    expected = jax.jit(fb.train(unrolled, recipe))({"w": w, "s": layers}, x)
    np.testing.assert_allclose(got, expected, atol=1e-5)

"""Loops whose carries and rows are quantized arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fewbit as fb

DRAW = np.random.default_rng(0).normal
W = fb.quantize(DRAW(size=(2, 8, 8)).astype(np.float32), "int8")
ZEROS = jnp.zeros((8, 8))

LOOPS = {
    "fori_loop": lambda w: lax.fori_loop(0, 2, lambda i, c: w[1], ZEROS),
    "while_loop": lambda w: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, w[1]), (0, ZEROS))[1],
    "scan": lambda w: lax.scan(lambda c, row: (row, c.sum()), ZEROS, w)[0],
    "next to a quantized carry": lambda w: lax.fori_loop(0, 2, lambda i, c: (c[0], c[0]), (w[1], ZEROS))[1],
}


@pytest.mark.parametrize("piece", LOOPS.values(), ids=LOOPS)
def test_a_carry_that_starts_as_an_array_stays_one(piece):
    with pytest.raises(fb.UnsupportedError, match=r"(while|scan) decodes .*the loop carries it as an array"):
        fb.transparent(piece)(W)
    found = fb.transparent(piece, fallback="dequantize")(W)
    np.testing.assert_array_equal(found, piece(fb.dequantize(W)))


def test_a_loop_of_no_iterations_returns_its_carry():
    def loop(layers, w, x):
        return lax.scan(lambda c, row: ((c[0], c[1] @ row), (x.sum(), row)), (w, x), layers)

    none, x = jax.tree.map(lambda leaf: leaf[:0], W), jnp.ones((2, 8))
    for layers, fn in ((none, fb.transparent(loop)), (fb.dequantize(none), fb.train(loop, "int8"))):
        (w, same), (sums, rows) = fn(layers, W[0], x)
        np.testing.assert_array_equal(fb.dequantize(w) if fb.is_qarray(w) else w, fb.dequantize(W[0]))
        np.testing.assert_array_equal(same, x)
        assert (sums.shape, rows.shape) == ((0,), (0, 8, 8))


def product(w, x):
    return jnp.tanh(x @ w[0])


def layer(x, row):
    return jnp.tanh(x @ row), None


def below_two(c):
    return c[0] < 2


def one_more(c):
    return c[0] + 1, product(c[2], c[1]), c[2]


ONCE = {  # whose bodies are the same functions in each call
    "scan": lambda w, x: lax.scan(layer, x, w)[0],
    "while": lambda w, x: lax.while_loop(below_two, one_more, (0, x, w))[1],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, product, product, w, x),
}


@pytest.mark.parametrize(
    ("wrap", "w"), [(fb.transparent, W), (lambda fn: fb.train(fn, "int8"), fb.dequantize(W))], ids=["transparent", "train"]
)
@pytest.mark.parametrize("piece", ONCE.values(), ids=ONCE)
def test_calls_without_jit_compile_once_for_each_shape(piece, wrap, w, caplog):
    fn, x = wrap(piece), jnp.ones((2, 8))
    first = fn(w, x)
    with jax.log_compiles():
        np.testing.assert_array_equal(fn(w, x), first)
        assert "Finished XLA compilation" not in caplog.text
        fn(w, x[:1])
        assert "Finished XLA compilation" in caplog.text


@jax.jit
def attended(x, _=None):
    with jax.named_scope("attn"):
        return jnp.tanh(x @ x.T) @ x, None


PRODUCTS = {
    "jit": lambda w, x: attended(attended(x)[0])[0],
    "scan": lambda w, x: lax.scan(attended, x, None, length=2)[0],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, attended, attended, x)[0],
}


@pytest.mark.parametrize("piece", PRODUCTS.values(), ids=PRODUCTS)
def test_calls_with_products_that_follow_a_policy_compile_once(piece, caplog):
    policy, x = fb.Policy("int8", "int8"), jnp.arange(16.0).reshape(2, 8)
    recipe = fb.Recipe((fb.Rule("w", policy),), products=(fb.Rule("attn.*", policy),))
    fn = fb.train(lambda w, x: piece(w, x) @ w["w"], recipe)
    first = fn({"w": jnp.eye(8)}, x)
    with jax.log_compiles():
        np.testing.assert_array_equal(fn({"w": jnp.eye(8)}, x), first)
        assert "Finished XLA compilation" not in caplog.text


@pytest.mark.parametrize("scheme", ["int8", "q8_0"])
@pytest.mark.parametrize("shape", [(40, 8), (40, 8, 4)], ids=str)
def test_a_loop_over_the_quantized_axis_of_codes_of_whole_bytes(scheme, shape):
    q = fb.quantize(DRAW(size=shape).astype(np.float32), scheme, axis=0)

    def rows(w):
        return lax.scan(lambda c, row: (c, row.T), 0, w)[1]

    found = fb.transparent(rows)(q)
    assert fb.is_qarray(found)
    np.testing.assert_array_equal(fb.dequantize(found), rows(fb.dequantize(q)))


def test_a_loop_over_shared_bytes_is_refused():
    q = fb.quantize(DRAW(size=(64, 8)).astype(np.float32), "int4_g32", axis=0)
    with pytest.raises(fb.UnsupportedError, match="the loop runs along the axis whose codes share bytes"):
        fb.transparent(lambda w: lax.scan(lambda c, row: (c, row), 0, w)[1])(q)

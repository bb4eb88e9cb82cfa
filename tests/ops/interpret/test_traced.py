"""A function is traced once, with what its code sees of each argument."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops.interpret.traced import Traced, abstract, array_leaves

W, X = jnp.arange(32.0).reshape(4, 8), jnp.ones((2, 4))


@pytest.fixture
def counted():
    """A loss, and how often its Python code ran."""
    runs = []

    def loss(params, x, *, scale=1.0):
        runs.append(scale)
        return jnp.sum(jnp.einsum("bi,io->bo", x, params["w"]) ** 2) * scale

    return loss, runs


def test_inputs_are_array_leaves_in_order_and_results_have_their_tree():
    def fn(params, x, name, *, factor):
        assert name == "a" and factor.shape == ()
        return {"y": x @ params["w"] * factor, "none": None}

    q = fb.quantize(W, "int8", axis=0)
    traced = Traced.of(fn, ({"w": q, "rate": 0.5}, X, "a"), {"factor": np.float32(2)})
    assert [var.aval.shape for var in traced.closed.jaxpr.invars] == [(4, 8), (2, 4), ()]
    assert traced.first == 1
    assert traced.out_tree == jax.tree.structure({"y": 0, "none": None})
    assert array_leaves(({"w": q, "rate": 0.5}, X, "a")) == [q, X]


def test_code_sees_shape_and_dtype_of_every_kind_of_leaf():
    q = fb.quantize(W.astype(jnp.bfloat16), "int4_g8")
    shapes = jax.eval_shape(lambda: q)
    for leaf in (q, shapes, jax.ShapeDtypeStruct(q.shape, q.dtype)):
        seen = abstract(leaf)
        assert (seen.shape, seen.dtype) == ((4, 8), jnp.bfloat16)
    assert jax.make_jaxpr(lambda x: x)(abstract(jnp.asarray(2.0))).in_avals[0].weak_type
    array = np.ones(3, np.float16)
    assert abstract(array) is array


def test_train_traces_once(counted):
    loss, runs = counted
    step = jax.grad(fb.train(loss, fb.Recipe((fb.Rule("w", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))))
    jax.make_jaxpr(step)({"w": W}, X)
    assert runs == [1.0]


def test_train_with_rules_for_products_traces_once(counted):
    loss, runs = counted

    def fn(params, x):
        scores = jnp.einsum("bi,ci->bc", x, x)
        return loss(params, x) + scores.sum()

    recipe = fb.Recipe((fb.Rule("w", "int8"),), products=(fb.Rule(".*", fb.Policy("int8", "int8")),))
    jax.make_jaxpr(jax.grad(fb.train(fn, recipe)))({"w": W}, X)
    assert runs == [1.0]


def test_train_traces_arrays_among_keyword_arguments(counted):
    loss, runs = counted
    trained = fb.train(loss, fb.Recipe((fb.Rule("w", "int8"),)))
    jax.jit(trained)({"w": W}, X, scale=jnp.float32(2.0))
    (scale,) = runs
    assert isinstance(scale, jax.core.Tracer)


def test_observe_traces_once_for_each_shape(counted):
    loss, runs = counted
    batches = [X, 2 * X, jnp.ones((3, 4))]
    stats = fb.observe(loss, {"w": W}, batches, "w8a8")
    assert float(stats["w"].range.high) == 2.0
    assert runs == [1.0, 1.0]


def test_transparent_traces_once(counted):
    loss, runs = counted
    fb.transparent(loss)({"w": fb.quantize(W, "int8", axis=0)}, X)
    assert runs == [1.0]

"""`fb.quantize_params`: under a trace as outside it, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fewbit as fb
from tests.workflows.checkpoints import last_axis


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def fn(p, x):
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x @ p["in"], p["layers"])[0]
    return x + p["bias"][None]


PARAMS = {"in": normal(32, 64), "layers": normal(2, 64, 64, seed=1), "bias": jnp.zeros(64)}
PLAN = fb.plan(fn, PARAMS, jnp.ones((1, 32)), recipe="int4_g32")


def quantized(params):
    return fb.quantize_params(params, PLAN)


@pytest.fixture(scope="module")
def stored():
    return quantized(PARAMS)


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@pytest.mark.finding(13)
@pytest.mark.parametrize("plan", [PLAN, last_axis("int4_g32")], ids=["plan", "recipe"])
def test_shapes_alone_give_the_tree_to_restore_into(plan, stored):
    shapes = jax.eval_shape(lambda p: fb.quantize_params(p, plan), abstract(PARAMS))
    want = stored if plan is PLAN else fb.quantize_params(PARAMS, plan)
    # The structure holds the schemes, the dtypes that QArrays stand for, and their policies.
    assert jax.tree.structure(shapes) == jax.tree.structure(want)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(abstract(want))


@pytest.mark.finding(13)
def test_sharded_parameters_are_quantized_in_one_program(stored):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = {"in": PartitionSpec(None, "model"), "layers": PartitionSpec(None, None, "model"), "bias": PartitionSpec()}
    sharding = {name: NamedSharding(mesh, spec[name]) for name in spec}
    inputs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding[name]) for name, x in PARAMS.items()}
    shapes = jax.eval_shape(quantized, inputs)
    program = jax.jit(quantized, out_shardings=fb.shardings_of(shapes, mesh, spec)).lower(inputs).compile()
    made = program(jax.device_put(PARAMS, sharding))
    assert made["layers"].codes.sharding.spec == PartitionSpec(None, None, "model")
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(stored), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.finding(13)
def test_values_that_are_not_finite_are_found_where_there_are_values():
    bad = PARAMS | {"in": PARAMS["in"].at[0, :3].set(jnp.nan)}
    with pytest.raises(fb.QuantError, match=r"NaN or infinite values in in \(3 of 2,048\)"):
        quantized(bad)
    decoded = jax.jit(lambda p: fb.dequantize(quantized(p)["in"]))(bad)
    assert jnp.isnan(decoded[:32, :3]).all() and jnp.isfinite(decoded[:, 3:]).all()  # the tiles that hold them


def test_donation_is_refused_under_a_trace():
    with pytest.raises(fb.QuantError, match="donate=True deletes arrays, and bias is traced"):
        jax.eval_shape(lambda p: fb.frameworks.tree.quantize(None, p, recipe=PLAN, donate=True), PARAMS)


def test_a_plan_of_floats_refuses_a_quantized_parameter_by_its_name(stored):
    with pytest.raises(fb.QuantError, match="in is quantized already, as int4_g32, and the plan is for the float parameter"):
        quantized(stored)
    again = fb.quantize_params(stored, fb.plan(fn, stored, jnp.ones((1, 32)), recipe="int4_g32"))
    assert again["in"] is stored["in"]

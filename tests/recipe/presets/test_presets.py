"""Every preset says in a line what it is, stands in the documentation, and plans a model."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import fewbit as fb

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "recipes.md"
PARAMS = {
    "embed": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "layers_0": {
        name: jax.ShapeDtypeStruct((256, 256), jnp.float32)
        for name in ("query", "key", "value", "out", "wi_0", "wo", "wi_1")
    },
}


def net(p, ids):
    x = p["embed"][ids]
    for w in p["layers_0"].values():
        x = x @ w
    return x @ p["embed"].T


@pytest.mark.parametrize("name", fb.RECIPES.names())
def test_a_line_says_what_it_is(name):
    text = fb.RECIPES[name].description
    assert text.endswith(".")
    assert "\n" not in text
    assert 10 < len(text) < 200


def test_the_page_lists_every_preset_with_its_line():
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", PAGE.read_text().partition("## All presets")[2], re.MULTILINE))
    assert rows == {recipe.name: recipe.description for recipe in fb.RECIPES}


@pytest.mark.parametrize("name", fb.RECIPES.names())
def test_it_plans_a_model_of_layers(name):
    plan = fb.plan(net, PARAMS, jax.ShapeDtypeStruct((2,), jnp.int32), recipe=name)
    quantized = {row.path for row in plan if row.policy is not None}
    layers = {f"layers_0/{name}" for name in PARAMS["layers_0"]}
    assert quantized - {"embed"} == (set() if name.endswith("te_no_quant") else layers)
    leaves_tables = not any(rule.policy and "embedding" in rule.roles for rule in fb.RECIPES[name].rules)
    assert ("embed" in quantized) == (not leaves_tables)


@pytest.mark.parametrize("name", ["int5_g96", *(n for n in fb.RECIPES.names() if not re.match("te_|maxtext/", n))])
def test_a_plain_one_quantizes_kernels_of_convolutions_and_experts_too(name):
    def net(p, x, rows):
        return jax.lax.ragged_dot(jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME")[0].T, p["experts"], rows)

    shapes = {"kernel": (64, 64, 3), "experts": (2, 64, 64)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    plan = fb.plan(net, weights, jnp.ones((1, 64, 8)), jnp.array([3, 5]), recipe=name)
    assert {row.path: row.axis for row in plan if row.policy is not None} == {"kernel": (-1, -2), "experts": (-2,)}


@pytest.mark.parametrize("name", [n for n in fb.RECIPES.names() if "te_" in n and "maxtext" not in n])
def test_transformer_engines_recipes_differ_from_maxtexts_by_the_path_alone(name):
    ours, theirs = fb.recipe(name), fb.recipe(f"maxtext/{name}")
    assert ours.rules[-1].policy == theirs.rules[-1].policy
    assert (ours.rules[-1].path, theirs.rules[-1].path) == (".*", "(?!.*encoder/).*layers.*")


def policy(name):
    return fb.recipe(name).rules[-1].policy


def test_nvfp4_training():
    with_hadamard, without = policy("te_nvfp4"), policy("te_nvfp4_no_rht")
    assert with_hadamard.weight.tile == {...: 1, -2: 16, -1: 16}
    assert with_hadamard.drhs.hadamard == 16
    assert without.drhs.hadamard is None
    for both in (with_hadamard, without):
        assert both.dlhs.hadamard is None
        assert both.dlhs.rounding == both.drhs.rounding == "stochastic"
        assert both.dlhs.operand == "forward"  # square blocks: the same codes, transposed
        assert both.activation.name == both.drhs.gradient.name == both.drhs.operand.name == "nvfp4_absmax"


def test_mxfp8_training_quantizes_each_operand_once_along_each_contraction():
    mx = policy("te_mxfp8")
    assert {mx.weight, mx.activation, *(x for arm in (mx.dlhs, mx.drhs) for x in (arm.gradient, arm.operand))} == {mx.weight}
    assert (str(mx.weight.calibration), mx.weight.scale.name, mx.weight.tile[-1]) == ("mx,rceil", "e8m0", 32)


def of_matrix(params, recipe):
    """The plan of a matrix `[out, in]`."""
    return fb.plan(None, params, recipe=recipe, roles={"w": fb.TensorRole("matmul", -1)})


def test_delayed_recipes_are_for_training():
    assert policy("te_fp8_delayedscaling").delayed == fb.DelayedScaling(1024, 0)
    assert policy("te_fp8_currentscaling").delayed is None
    with pytest.raises(fb.UnsupportedError, match=r"w: policy fp8_tensor x .* there are none outside training"):
        fb.quantize_params({"w": jnp.ones((4, 4))}, of_matrix({"w": jnp.ones((4, 4))}, "te_fp8_delayedscaling"))


def test_ternary_is_bitnets():
    w = jnp.array([[0.3, -0.1, 0.9, -0.7]])
    q = fb.quantize_params({"w": w}, of_matrix({"w": w}, "ternary"))["w"]
    mean = jnp.abs(w).mean()
    assert jnp.allclose(fb.dequantize(q), jnp.clip(jnp.round(w / mean), -1, 1) * mean)
    assert q.policy.activation == fb.scheme("int8_narrow")

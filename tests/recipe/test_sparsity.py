"""Sparsity: when its mask is renewed, what the gradient is, what quantizing makes of zeros, and what a recipe does with it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import nm_mask
from fewbit.errors import QuantError
from fewbit.recipe import Sparsity, SparsityState
from tests.conformance.test_schemes import ALL, schemes


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_the_schedule():
    sparsity = Sparsity(1, 2, axis=-1, start_step=4, update_step=3)
    first, second = jnp.array([[1.0, 2.0]]), jnp.array([[2.0, 1.0]])
    update = jax.jit(sparsity.update)
    state = sparsity.init(first)
    masks = []
    for step in range(9):
        state = update(state, first if step < 6 else second)
        masks.append(state.mask.tolist()[0])
    assert masks == [[True, True]] * 4 + [[False, True]] * 3 + [[True, False]] * 2
    assert state.step == 9
    # The step that is named counts, whatever the state's own number.
    assert update(state, first, 10).mask.tolist() == [[False, True]]
    assert update(state, first, 11).mask.tolist() == [[True, False]] and update(state, first, 11).step == 12


def test_under_scan_and_vmap():
    sparsity, w = Sparsity(2, 4, axis=-2), weights(5, 8, 3)
    stacked = jax.jit(jax.vmap(lambda w: sparsity.update(sparsity.init(w), w)))(w)
    np.testing.assert_array_equal(stacked.mask, nm_mask(jnp.asarray(w), 2, 4, axis=-2))

    def step(state: SparsityState, w: jax.Array) -> tuple[SparsityState, jax.Array]:
        state = sparsity.update(state, w)
        return state, state.mask

    last, masks = jax.lax.scan(step, sparsity.init(w[0]), w)
    np.testing.assert_array_equal(masks, stacked.mask)
    assert last.step == 5


@pytest.mark.parametrize("gradient", ["identity", "masked"])
def test_gradients_in_both_modes(gradient: str):
    sparsity, w, v = Sparsity(2, 4, axis=-2, gradient=gradient), jnp.asarray(weights(8, 6)), jnp.asarray(weights(8, 6)[::-1])
    state = sparsity.update(sparsity.init(w), w)
    value, back = jax.vjp(lambda w: sparsity.apply(w, state), w)
    np.testing.assert_array_equal(value, jnp.where(state.mask, w, 0))
    expected = v if gradient == "identity" else jnp.where(state.mask, v, 0)
    np.testing.assert_array_equal(back(v)[0], expected)
    np.testing.assert_array_equal(jax.jvp(lambda w: sparsity.apply(w, state), (w,), (v,))[1], expected)
    np.testing.assert_array_equal(jax.grad(lambda w: sparsity.penalty(w, state))(w), jnp.where(state.mask, 0, w))


def test_the_mask_is_not_differentiated():
    sparsity, w = Sparsity(1, 2, axis=-1), jnp.array([[1.0, 2.0]])
    gradient = jax.grad(lambda w: sparsity.apply(w, sparsity.update(sparsity.init(w), w)).sum())(w)
    assert gradient.tolist() == [[1, 1]]


SYMMETRIC = [n for n in ALL if fb.SCHEMES[n].zero_point is None and 0.0 in fb.SCHEMES[n].format.values()]


@pytest.mark.slow_after(2)
@schemes(SYMMETRIC, ("int8", "int4_narrow", "nf4", "mxfp4", "fp8_block128", "q4_0", "ternary", "nf4_dq"))
def test_pruned_weights_quantize_to_exact_zero(name: str):
    w = jnp.asarray(weights(8, 64))
    mask = nm_mask(w, 2, 4, axis=-1)
    dense = jax.jit(lambda w: fb.fake_quant(w, name))(jnp.where(mask, w, 0))
    assert (dense[~mask] == 0).all() and (dense != 0).sum() > 16


@schemes(list(ALL), ("int8", "nf4", "uint4", "q4_1", "binary"))
def test_a_rule_refuses_a_scheme_without_exact_zeros(name: str):
    can = name in SYMMETRIC or name.startswith("uint")
    make = lambda: fb.Rule(".*", name, sparsity=Sparsity(2, 4))  # noqa: E731
    if can:
        assert make().sparsity == Sparsity(2, 4)
    else:
        with pytest.raises(QuantError, match="has no exact zero for pruned weights; use a symmetric scheme"):
            make()


def test_offsets_that_are_integers_keep_exact_zeros():
    w = jnp.asarray(weights(8, 64))
    mask = nm_mask(w, 2, 4, axis=-1)
    assert (fb.dequantize(fb.quantize(jnp.where(mask, w, 0), "uint4"))[~mask] == 0).all()


def test_a_nan_stays_visible():
    w = jnp.array([1.0, -jnp.nan, 9.0, 2.0])
    assert jnp.isnan(Sparsity(1, 4, axis=0).pruned(w)[1])


@pytest.mark.usefixtures("unchecked")
def test_what_is_refused():
    for make, message in (
        (lambda: Sparsity(0, 4), "n:m is 0:4"),
        (lambda: Sparsity(2.0, 4), "n is 2.0, must be an integer"),
        (lambda: Sparsity(2, "4"), "m is '4', must be an integer"),
        (lambda: Sparsity(2, 4, update_step=0), "start_step is 0 and update_step 0; must be at least 0 and at least 1"),
        (lambda: Sparsity(2, 4).pruned(jnp.ones((4, 4))), "2:4 sparse has no axis, .*; pass axis="),
        (lambda: Sparsity.from_json({"n": 2}), "sparsity lacks the field 'm'"),
        (
            lambda: fb.Recipe((fb.Rule(".*", None),), products=(fb.Rule("a", None, sparsity=Sparsity(2, 4)),)),
            "a product's rule .* takes no sparsity",
        ),
    ):
        with pytest.raises(QuantError, match=message):
            make()


@pytest.mark.usefixtures("unchecked")
def test_a_gradient_that_is_not_known_is_refused():
    with pytest.raises(QuantError, match="gradient is 'ste', must be identity or masked"):
        Sparsity(2, 4, gradient="ste")  # type: ignore[arg-type]


RECIPE = fb.Recipe(
    (
        fb.Rule("layers/w", "int8", sparsity=Sparsity(1, 4, start_step=3)),
        fb.Rule("heads", None, sparsity=Sparsity(2, 4, gradient="masked")),
        fb.Rule("conv", None, sparsity=Sparsity(1, 2)),
        fb.Rule("free", "int4", sparsity=Sparsity(2, 4, axis=-1)),
        fb.Rule(".*", None),
    ),
)
PARAMS = {
    "layers": {"w": jnp.asarray(weights(3, 8, 8))},
    "heads": jnp.asarray(weights(2, 4, 6)),
    "conv": jnp.asarray(weights(3, 3, 4, 2)),
    "free": jnp.asarray(weights(8, 12)),
    "gain": jnp.ones(8),
}


def net(p, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.T.T), None), x, p["layers"]["w"])
    image = jnp.broadcast_to(x[:, :4, None, None], (*x[:, :4].shape, 3, 3))
    y = jax.lax.conv_general_dilated(image, p["conv"], (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))
    return (
        jnp.einsum("bhd,hdm->bm", x.reshape(-1, 2, 4), p["heads"]).sum() + (x @ p["free"]).sum() + y.sum() + p["gain"].sum()
    )


def test_the_axis_of_a_rule_decides_the_groups_only_where_the_uses_do_not():
    params, x = {"w": jnp.ones((8, 8))}, jnp.ones((1, 8))
    for fn, expected in ((lambda p, x: x @ p["w"], (-2,)), (lambda p, x: x @ p["w"] @ p["w"].T, (-1,)), (None, (-1,))):
        rule = fb.Rule("w", "int8", axis=-1, sparsity=Sparsity(2, 4))
        row = fb.plan(fn, params, x, recipe=fb.Recipe((rule,)))["w"]
        assert (row.axis, row.sparsity.axis) == ((-1,), expected)


@pytest.mark.slow
def test_a_plan_prunes_along_what_is_contracted_and_says_so(tmp_path):
    plan = fb.plan(net, PARAMS, jnp.ones((2, 8)), recipe=RECIPE)
    axes = {row.path: row.sparsity.axis for row in plan if row.sparsity}
    assert axes == {"layers/w": (-2,), "heads": (-3, -2), "conv": (-2,), "free": (-1,)}
    assert [row.kind for row in plan] == [
        *("float32, 1:2 sparse", "int4, 2:4 sparse", "float32", "float32, 2:4 sparse", "int8, 1:4 sparse"),
    ]
    assert "int8, 1:4 sparse" in str(plan) and plan["heads"].bytes_after == plan["heads"].bytes_before
    plan.save(tmp_path / "plan.json")
    assert fb.Plan.load(tmp_path / "plan.json") == plan
    assert fb.Recipe.from_json(json.loads(json.dumps(RECIPE.to_json()))) == RECIPE
    assert str(RECIPE).splitlines()[1:3] == ["  layers/w -> int8, 1:4 sparse", "  heads -> 2:4 sparse"]

    stored = fb.quantize_params(PARAMS, plan)
    for path, n, m, axis in (("heads", 2, 4, (0, 1)), ("conv", 1, 2, 2)):
        np.testing.assert_array_equal(stored[path], np.where(nm_mask(PARAMS[path], n, m, axis=axis), PARAMS[path], 0))
    w, free = PARAMS["layers"]["w"], PARAMS["free"]
    pruned = jnp.where(nm_mask(w, 1, 4, axis=1), w, 0)
    np.testing.assert_array_equal(
        stored["layers"]["w"].codes, jax.vmap(lambda w: fb.quantize(w, "int8", axis=0))(pruned).codes
    )
    pruned = jnp.where(nm_mask(free, 2, 4, axis=1), free, 0)
    np.testing.assert_array_equal(stored["free"].codes, fb.quantize(pruned, "int4", axis=0).codes)
    again = fb.quantize_params(PARAMS | {"free": pruned}, plan)
    np.testing.assert_array_equal(again["free"].codes, stored["free"].codes)


def test_what_a_plan_cannot_prune():
    recipe = fb.Recipe((fb.Rule(".*", None, sparsity=Sparsity(2, 4)),))
    with pytest.raises(QuantError, match=r"quantizes nothing: its path matches gain, w \(no weight of a product\)"):
        fb.plan(
            lambda p, x: x * p["gain"][None] * p["w"],
            {"gain": jnp.ones(8), "w": jnp.ones((4, 8))},
            jnp.ones((4, 8)),
            recipe=recipe,
        )
    with pytest.raises(QuantError, match=r"^w \(6, 8\): axis \(-2,\) has 6 elements, which groups of m=4 do not divide"):
        fb.plan(lambda p, x: x @ p["w"], {"w": jnp.ones((6, 8))}, jnp.ones((1, 6)), recipe=recipe)
    known = fb.plan(None, {"w": jnp.ones((6, 8))}, recipe=recipe, roles={"w": fb.TensorRole("matmul", -1)})["w"]
    assert known.sparsity.axis == (-1,) and known.reason == ""

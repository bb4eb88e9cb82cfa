"""A recipe resolved once: plans, training, delayed scaling and statistics agree on axes, casts and stacked axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

OTHERS = ("int4_g32", "nf4", "mxfp4", "nvfp4", "fp8")
SCHEMES = ("int8", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


W, X = normal(64, 32), normal(4, 64, seed=1)


def weight_only(scheme, **kwargs):
    return fb.Recipe((fb.Rule(".*", scheme, **kwargs),))


def served_and_trained(fn, params, x, recipe):
    """The stored parameters, and what they and the trained ones make of `x`."""
    q = fb.quantize_params(params, fb.plan(fn, params, x, recipe=recipe))
    return q, fb.transparent(fn)(q, x), fb.train(fn, recipe)(params, x)


# --- one refusal ---


def both_ways(p, x):
    return jnp.tanh(x @ p["w"]) @ p["w"].T


ASKING = {
    "plan": lambda fn, p, x, recipe: fb.plan(fn, p, x, recipe=recipe),
    "train": lambda fn, p, x, recipe: fb.train(fn, recipe)(p, x),
    "delayed_state": lambda fn, p, x, recipe: fb.delayed_state(fn, p, x, recipe=recipe),
    "observe": lambda fn, p, x, recipe: fb.observe(fn, p, [x], recipe),
    "sparsity_state": lambda fn, p, x, recipe: fb.sparsity_state(fn, p, x, recipe=recipe),
}


@pytest.mark.finding(10)
def test_a_weight_whose_products_contract_different_axes_is_refused_alike():
    messages = set()
    for name, ask in ASKING.items():
        with pytest.raises(fb.QuantError, match=r"w: .*dot_general over \(-2,\).*dot_general over \(-1,\)") as caught:
            ask(both_ways, {"w": W}, X, "w8")
        messages.add(str(caught.value))
        assert messages == {str(caught.value)}, name


@pytest.mark.slow
@pytest.mark.finding(10)
@pytest.mark.parametrize("axis", [-1, -2])
def test_with_the_axis_of_a_rule_both_products_are_served_as_trained(axis):
    q, served, trained = served_and_trained(both_ways, {"w": W}, X, weight_only("int8", axis=axis))
    assert q["w"].scale.shape == ((64, 1) if axis == -1 else (1, 32))
    assert jnp.array_equal(served, trained)


@pytest.mark.slow
def test_products_agree_where_a_scheme_has_the_same_tiles_along_both_axes():
    scheme = fb.Scheme(fb.FORMATS["int8"], {})  # one scale for the whole array
    _, served, trained = served_and_trained(both_ways, {"w": W}, X, weight_only(fb.Policy(scheme)))
    assert jnp.array_equal(served, trained)


# --- casts ---


def in_bfloat16(p, x):
    """The decoded weight: products with the identity, in bfloat16, summed in float32."""
    eye = jnp.eye(p["w"].shape[0], dtype=jnp.bfloat16)
    return jnp.matmul(eye, p["w"].astype(jnp.bfloat16), preferred_element_type=jnp.float32)


@pytest.mark.finding(30)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_that_its_products_cast_is_quantized_after_the_cast(scheme):
    q, served, trained = served_and_trained(in_bfloat16, {"w": W}, X, weight_only(scheme))
    assert jnp.array_equal(served, trained)
    cast = fb.quantize(W.astype(jnp.bfloat16), scheme, axis=-2)
    assert q["w"].dtype == jnp.float32  # of the parameter that it stands for
    assert jnp.array_equal(q["w"].codes, cast.codes)
    assert jnp.array_equal(jnp.asarray(q["w"].scale), jnp.asarray(cast.scale))


@pytest.mark.finding(30)
def test_the_plan_names_the_cast_and_follows_an_edit_of_it():
    plan = fb.plan(in_bfloat16, {"w": W}, X, recipe="int8")
    assert plan["w"].casts == ("bfloat16",)
    assert plan["w"].reason == "cast to bfloat16 first, as its uses do"
    assert fb.Plan.from_json(plan.to_json()) == plan
    form = plan.to_json()
    del form["rows"][0]["casts"]
    master = fb.quantize_params({"w": W}, fb.Plan.from_json(form))["w"]
    assert jnp.array_equal(master.codes, fb.quantize(W, "int8", axis=-2).codes)
    assert jnp.mean(master.codes != fb.quantize_params({"w": W}, plan)["w"].codes) > 0.05


CASTS = {
    "a cast up loses nothing": (lambda w: w.astype(jnp.bfloat16), lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), 1),
    "cast twice": (lambda w: w.astype(jnp.bfloat16), lambda w: w.astype(jnp.bfloat16).astype(jnp.float16), 1),
    "one use reads it as it is": (lambda w: w, lambda w: w.astype(jnp.bfloat16), 0),
    "different dtypes": (lambda w: w.astype(jnp.float16), lambda w: w.astype(jnp.bfloat16), 0),
}


@pytest.mark.finding(30)
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("one use reads it as it is", "int8"),
        *(
            pytest.param(name, scheme, marks=pytest.mark.slow)
            for name, scheme in zip(CASTS, ("nvfp4", "int8") * 2, strict=True)
        ),
    ],
)
def test_uses_with_different_casts_share_the_codes_after_the_casts_that_all_have(name, scheme):
    one, other, count = CASTS[name]

    def fn(p, x):
        left, right = one(p["w"]), other(p["w"])
        first = jnp.matmul(x.astype(left.dtype), left, preferred_element_type=jnp.float32)
        return first, jnp.matmul(x.astype(right.dtype), right.T.T, preferred_element_type=jnp.float32)

    recipe = weight_only(scheme)
    assert fb.plan(fn, {"w": W}, X, recipe=recipe)["w"].casts == ("bfloat16",)[:count]
    _, served, trained = served_and_trained(fn, {"w": W}, X, recipe)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, served, trained))


def test_what_reads_a_parameter_without_a_product_has_no_say():
    def fn(p, x):
        return in_bfloat16(p, x), jnp.sum(p["w"] ** 2), p["w"][0, 0]

    row = fb.plan(fn, {"w": W}, X, recipe="int8")["w"]
    assert (row.casts, row.stacked) == (("bfloat16",), ())


# --- stacked axes ---

STACK = normal(64, 2, 64)


def layers(p, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, jnp.moveaxis(p["w"], 1, 0))[0]


@pytest.mark.finding(26)
@pytest.mark.parametrize(
    "scheme", ["int8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("int4_g32", "nf4_dq", "nvfp4", "fp8"))]
)
def test_layers_that_are_stacked_along_any_axis_are_served_as_trained(scheme):
    recipe = weight_only(scheme)
    row = fb.plan(layers, {"w": STACK}, X, recipe=recipe)["w"]
    assert (row.axis, row.stacked) == ((-3,), (-2,))
    q, served, trained = served_and_trained(layers, {"w": STACK}, X, recipe)
    assert jnp.array_equal(served, trained)
    decoded, own = fb.dequantize(q["w"]), [fb.dequantize(fb.quantize(STACK[:, i], scheme, axis=-2)) for i in (0, 1)]
    assert jnp.array_equal(decoded, jnp.stack(own, 1))  # each layer on its own
    assert row.bytes_after == q["w"].nbytes


@pytest.mark.slow
@pytest.mark.finding(26)
def test_a_stack_inside_a_stack_is_taken_apart_along_both_axes():
    params = {"w": normal(64, 2, 64, 3)}

    def fn(p, x):
        def outer(c, w):  # w: [64, 2, 64]
            return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, jnp.moveaxis(w, 1, 0))[0], None

        return jax.lax.scan(outer, x, jnp.moveaxis(p["w"], 3, 0))[0]

    row = fb.plan(fn, params, X, recipe=weight_only("nvfp4"))["w"]
    assert (row.axis, row.stacked) == ((-4,), (-3, -1))
    q, served, trained = served_and_trained(fn, params, X, weight_only("nvfp4"))
    assert q["w"].tensor_scale.shape == (1, 2, 1, 3)
    assert jnp.array_equal(served, trained)


@pytest.mark.parametrize("ask", [ASKING["plan"], ASKING["train"]], ids=["plan", "train"])
def test_the_axis_of_a_rule_is_one_that_tiles_can_run_along(ask):
    stacked = r"w \(64, 2, 64\): axis -2 cannot be tiled: a loop takes one element of it at a time"
    with pytest.raises(fb.QuantError, match=stacked):
        ask(layers, {"w": STACK}, X, weight_only("int8", axis=1))
    with pytest.raises(fb.QuantError, match=r"w \(64, 32\): axis is 5, must be from -2 to 1"):
        ask(in_bfloat16, {"w": W}, X, weight_only("int8", axis=5))


def test_a_product_over_the_axis_of_a_loop_names_the_parameter():
    """The loop takes a matrix of the stack at a time, and another product sums over the matrices."""

    def fn(p, x):
        looped = jax.lax.scan(lambda c, w: (c @ w, None), x, p["w"])[0]
        return looped, jnp.einsum("l,lkn->kn", jnp.ones(3), p["w"]), jnp.einsum("lk,lkn->n", jnp.ones((3, 8)), p["w"])

    with pytest.raises(fb.QuantError, match=r"^w(:| \(3, 8, 8\):) .*(axis -3 cannot be tiled|contract different axes)"):
        fb.plan(fn, {"w": normal(3, 8, 8)}, normal(2, 8), recipe=weight_only("int8"))

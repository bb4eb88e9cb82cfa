"""`fb.observe`: what parameters meet in every kind of code, and recipes with the ranges that it finds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import EMARange, MinMaxRange, PercentileRange
from fewbit.calibration.measure import STATISTICS

OF_VECTORS = [name for name in STATISTICS if name not in ("range", "cross")]
RECIPE = fb.Recipe((fb.Rule(".*", fb.Policy("int8", "int8")),))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


PARAMS = {"in": normal(8, 16), "out": normal(16, 4, seed=1)}
BATCHES = [normal(3, 5, 8, seed=2), normal(3, 5, 8, seed=3)]


def net(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def amax(x, axis=None):
    return np.abs(np.asarray(x)).max(axis)


def test_ranges_and_recipe_are_those_computed_by_hand():
    stats = fb.observe(net, PARAMS, BATCHES, RECIPE)
    hidden = [jax.jit(lambda x: jnp.tanh(x @ PARAMS["in"]))(x) for x in BATCHES]
    assert float(stats["in"].range.high) == amax(BATCHES) and int(stats["in"].range.count) == 2
    np.testing.assert_allclose(stats["out"].range.high, amax(hidden), rtol=1e-6)
    static = stats.recipe(RECIPE)
    assert fb.Recipe.from_json(static.to_json()) == static
    assert static.rules[0].policy.activation.calibration == fb.array.scales.Fixed(
        -float(amax(BATCHES)), float(amax(BATCHES))
    )

    x = 3 * normal(2, 7, 8, seed=4)  # another length, and beyond the range
    served = fb.quantize_params(PARAMS, fb.plan(net, PARAMS, x, recipe=static))
    scales = [np.float32(stats[name].range.high) / np.float32(127.5) for name in ("in", "out")]

    @jax.jit
    def by_hand(x):
        for name, scale in zip(("in", "out"), scales, strict=True):
            w = fb.dequantize(fb.quantize(PARAMS[name], "int8", axis=0))
            x = fb.fake_quant(x, "int8", scale=scale) @ w
            x = jnp.tanh(x) if name == "in" else x
        return x

    # An element of the hidden layer that lies between two codes may take either, by the last bit of its sum.
    step = float(scales[1]) * amax(PARAMS["out"]) * 1.01
    np.testing.assert_allclose(jax.jit(fb.transparent(net))(served, x), by_hand(x), rtol=1e-5, atol=step)
    assert np.abs(fb.transparent(net)(served, x) - net(PARAMS, x)).max() > 10 * step, "what is beyond the range is clipped"
    trained = jax.jit(fb.train(net, static))(PARAMS, x)
    assert np.array_equal(trained, jax.jit(fb.transparent(net))(served, x)), "what was trained is what is served"


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]


def test_stacked_layers_have_a_range_each_and_a_recipe_takes_the_widest():
    w, x = {"w": normal(3, 8, 8)}, 4 * normal(5, 8, seed=1)
    stats = fb.observe(scanned, w, [x, x / 8], RECIPE, collect=("range", "absmax", "hessian"))
    inputs = [x]
    for i in range(2):
        inputs.append(jnp.tanh(inputs[-1] @ w["w"][i]))
    seen = stats["w"]
    np.testing.assert_allclose(seen.range.high, [amax(x) for x in inputs], rtol=1e-6)
    assert seen.absmax.shape == (3, 8) and seen.hessian.shape == (3, 8, 8) and seen.count.tolist() == [10, 10, 10]
    np.testing.assert_array_equal(seen.absmax[0], amax(x, 0))
    assert stats.recipe(RECIPE).rules[0].policy.activation.calibration.high == float(amax(x))
    jitted = jax.jit(fb.transparent(scanned))
    assert jitted(fb.quantize_params(w, fb.plan(scanned, w, x, recipe=stats.recipe(RECIPE))), x).shape == (5, 8)


def at_fixed_indices(params, x):
    for i in range(3):
        x = jnp.tanh(x @ params["w"][i])
    return x


def at_a_counter(params, x):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ params["w"][i]), x)


def in_pairs(params, x):
    """Layers `[3, 1, ..]` in a loop over the first axis, with an index into the second; transposed, too."""
    pairs = params["w"].reshape(3, 1, 8, 8)
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0].T.T), None), x, pairs)[0]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("fn", [at_fixed_indices, at_a_counter, in_pairs], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("rule", [MinMaxRange(), EMARange(0.5), PercentileRange(90)], ids=lambda rule: type(rule).__name__)
def test_layers_at_indices_have_the_statistics_of_a_loop(fn, rule):
    w, batches = {"w": normal(3, 8, 8)}, [normal(5, 8, seed=1), normal(5, 8, seed=2)]
    collect = ("range", *OF_VECTORS)
    expected, found = (fb.observe(each, w, batches, RECIPE, rule=rule, collect=collect)["w"] for each in (scanned, fn))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for name in collect:  # the numbers are the same; XLA may order the sums in a product otherwise
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), getattr(found, name), getattr(expected, name))


def test_layers_at_indices_are_quantized_as_those_of_a_loop():
    w, batches = {"w": normal(3, 8, 8)}, [normal(5, 8, seed=1), normal(5, 8, seed=2)]

    def quantized(fn):
        stats = fb.observe(fn, w, batches, "int4", collect=("hessian",))
        return fb.quantize_params(w, fb.plan(fn, w, batches[0], recipe="int4"), method=fb.methods.GPTQ(), stats=stats)["w"]

    np.testing.assert_array_equal(quantized(at_a_counter).codes, quantized(scanned).codes)
    np.testing.assert_array_equal(quantized(at_fixed_indices).codes, quantized(scanned).codes)


def flipped(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.flip(params["w"], 0))[0]


def flipped_twice(params, x):
    """A loop backwards over a flipped stack, so that its layers are in the order of the parameter."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.flip(params["w"], 0), reverse=True)[0]


def backwards(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"], reverse=True)[0]


@pytest.mark.parametrize(
    ("fn", "order"),
    [(flipped, (2, 1, 0)), (flipped_twice, (0, 1, 2)), (backwards, (2, 1, 0))],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_statistics_belong_to_the_layer_in_a_loop_over_a_flipped_stack(fn, order):
    def one_by_one(params, x):
        for layer in order:
            x = jnp.tanh(x @ params["w"][layer])
        return x

    w, x = {"w": normal(3, 8, 8)}, normal(5, 8, seed=1)
    expected, found = (fb.observe(each, w, [x], RECIPE, collect=("sum",))["w"].sum for each in (one_by_one, fn))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # 5 terms of at most 1; XLA may order the sums otherwise


def test_statistics_of_stacked_axes_are_in_the_order_of_the_parameter():
    def inner(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0], None

    def swapped(params, x):
        return jax.lax.scan(inner, x, params["w"].swapaxes(0, 1))[0]

    def one_by_one(params, x):
        for j, i in np.ndindex(3, 2):
            x = jnp.tanh(x @ params["w"][i, j])
        return x

    w, x = {"w": normal(2, 3, 8, 8)}, normal(5, 8, seed=1)
    expected, found = (fb.observe(each, w, [x], RECIPE, collect=("sum",))["w"].sum for each in (one_by_one, swapped))
    assert found.shape == (2, 3, 8)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # 5 terms of at most 1; XLA may order the sums otherwise


def test_layers_in_a_loop_over_merged_axes_have_statistics_together():
    def merged(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"].reshape(4, 8, 8))[0]

    w, x = {"w": normal(2, 2, 8, 8)}, normal(5, 8, seed=1)
    stats = fb.observe(merged, w, [x], "int4", collect=("hessian",))
    assert stats["w"].hessian.shape == (8, 8) and stats["w"].count == 20
    with pytest.raises(fb.QuantError, match=r"those of all layers together.*a loop over a whole axis of them"):
        fb.quantize_params(w, fb.plan(merged, w, x, recipe="int4"), method=fb.methods.GPTQ(), stats=stats)


def test_a_stack_in_loops_in_two_orders_is_refused():
    def both(params, x):
        w = params["w"]
        return scanned(params, x) + jax.lax.scan(lambda x, w: (x @ w, None), x, w.swapaxes(0, 1))[0]

    w, x = {"w": normal(8, 8, 8)}, normal(5, 8, seed=1)
    with pytest.raises(fb.UnsupportedError, match=r"products of w are in loops over its axes \(-3,\) and \(-2,\)"):
        fb.observe(both, w, [x], fb.Recipe((fb.Rule("w", "int4", axis=-1),)), collect=("sum",))


def test_two_models_are_compared_where_products_have_different_numbers_of_tokens():
    def called_twice(params, x, y):
        return x @ params["w"], y @ params["w"]

    def branched(params, x, y):
        return jax.lax.cond(x[0, 0] > y[0, 0], lambda: x @ params["w"], lambda: jnp.tile(y @ params["w"], (2, 1))[: len(x)])

    w, x, y = {"w": normal(8, 8)}, normal(5, 8, seed=1), normal(3, 8, seed=2)
    both, one = (
        fb.observe(fn, w, [(x, y)], RECIPE, collect=("hessian", "cross"), quantized=w)["w"]
        for fn in (called_twice, branched)
    )
    np.testing.assert_allclose(both.cross, both.hessian, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(both.cross, x.T @ x + y.T @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.cross, one.hessian, rtol=1e-5, atol=1e-5)


def test_layers_at_indices_are_not_compared_with_another_model():
    w, x = {"w": normal(3, 8, 8)}, normal(5, 8, seed=1)
    with pytest.raises(fb.UnsupportedError, match=r"w: its \(3,\) layers are taken by an index"):
        fb.observe(at_fixed_indices, w, [x], RECIPE, collect=("cross",), quantized=w)


def test_a_loop_carries_the_statistics_of_what_each_iteration_uses():
    """A recurrent weight has one second moment, not one for each step, in the compiled program."""
    w, x, length = {"w": normal(8, 8)}, normal(5, 8, seed=1), 1000

    def steps(params, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["w"]), None), x, None, length=length)[0]

    def moments(w, x):
        return fb.observe(steps, w, [x], RECIPE, collect=("hessian",))["w"].hessian

    assert "[1000,8,8]" not in jax.jit(moments).lower(w, x).compile().as_text()
    inputs, length = [x], 3
    for _ in range(2):
        inputs.append(jnp.tanh(inputs[-1] @ w["w"]))
    bound = 15 * 2.0**-23 * sum(abs(x).T @ abs(x) for x in inputs)  # 15 terms, in another order
    assert (abs(moments(w, x) - sum(x.T @ x for x in inputs)) <= bound).all()


def recurrent(params, x):
    step = jax.checkpoint(lambda x, _: (jax.jit(jnp.tanh)(2 * x @ params["w"]), None))
    x = jax.lax.scan(step, x, None, length=3)[0]
    return jax.lax.cond(x[0, 0] > 9, lambda x: x @ params["w"].T, lambda x: x @ params["v"], x)


def test_calls_loops_and_branches():
    w, x = {"w": normal(8, 8), "v": normal(8, 8, seed=1)}, 4 * normal(5, 8, seed=2)
    policy = fb.Policy("int8", "int8")
    recipe = fb.Recipe((fb.Rule("w", policy, axis=-2), fb.Rule("v", policy)))  # the two branches contract other axes of w
    stats = fb.observe(recurrent, w, [x], recipe, rule=EMARange(0.5))
    inputs = [x]
    for _ in range(3):
        inputs.append(jnp.tanh(2 * inputs[-1] @ w["w"]))
    state = EMARange(0.5).init()
    for x in inputs[:3]:
        state = state.update(2 * x)
    assert int(stats["w"].range.count) == 3, "each turn counts; the branch that is not taken does not"
    np.testing.assert_allclose(stats["w"].range.high, state.high, rtol=1e-6)
    np.testing.assert_allclose(stats["v"].range.high, amax(inputs[3]), rtol=1e-6)


def test_statistics_of_the_groups_of_a_ragged_product():
    x, sizes = normal(9, 4), jnp.array([4, 0, 3], jnp.int32)  # two rows belong to no group

    def routed(w, x):
        return jax.lax.ragged_dot(x, w, sizes)

    recipe = fb.Recipe((fb.Rule(".*", "int8"),))
    stats = fb.observe(routed, normal(3, 4, 5, seed=1), [x, x], recipe, collect=OF_VECTORS)
    (seen,) = stats.observations.values()
    parts = [np.asarray(x[:4]), np.zeros((0, 4)), np.asarray(x[4:7])]
    np.testing.assert_allclose(seen.hessian, [2 * part.T @ part for part in parts], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen.squares, [2 * np.square(part).sum(0) for part in parts], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen.abssum, [2 * np.abs(part).sum(0) for part in parts], rtol=1e-5)
    np.testing.assert_array_equal(seen.absmax, [np.abs(part).max(0, initial=0) for part in parts])
    assert seen.count.tolist() == [8, 0, 6]


def test_hessians_follow_the_order_of_the_weights_axes():
    """However the dimension numbers list them."""
    x, w = normal(5, 3, 2), {"w": normal(2, 3, 4, seed=1)}
    recipe, flat = fb.Recipe((fb.Rule("w", "int8"),)), np.asarray(x).transpose(0, 2, 1).reshape(5, 6)
    for pairs in (((2, 1), (0, 1)), ((1, 2), (1, 0))):
        stats = fb.observe(
            lambda w, x, pairs=pairs: jax.lax.dot_general(x, w["w"], (pairs, ((), ()))), w, [x], recipe, collect=("hessian",)
        )
        np.testing.assert_allclose(stats["w"].hessian, flat.T @ flat, rtol=1e-5, atol=1e-5)


def conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


FLAT, IMAGES = normal(5, 6), normal(2, 4, 4, 2)
MOVED = {  # a stored weight, the product with the moved weight, and the same product with the weight as it is
    "transposed": (
        (2, 3, 4),
        lambda w: jnp.tensordot(FLAT.reshape(5, 2, 3).transpose(0, 2, 1), w.transpose(1, 0, 2), 2),
        lambda w: FLAT @ w.reshape(6, 4),
    ),
    "merged": (
        (2, 3, 4),
        lambda w: FLAT.reshape(5, 2, 3).transpose(0, 2, 1).reshape(5, 6) @ w.transpose(1, 0, 2).reshape(6, 4),
        lambda w: FLAT @ w.reshape(6, 4),
    ),
    "interleaved": (
        (6, 4),
        lambda w: (
            FLAT.reshape(5, 2, 3).transpose(0, 2, 1).reshape(5, 6) @ w.reshape(2, 3, 4).transpose(1, 0, 2).reshape(6, 4)
        ),
        lambda w: FLAT @ w,
    ),
    "reversed": ((6, 4), lambda w: FLAT[:, ::-1] @ w[::-1], lambda w: FLAT @ w),
    "kernel": (
        (3, 2, 3, 3),
        lambda w: conv(IMAGES, w.transpose(2, 3, 1, 0)),
        lambda w: jax.lax.conv_general_dilated(IMAGES, w, (1, 1), "SAME", dimension_numbers=("NHWC", "OIHW", "NHWC")),
    ),
}


@pytest.mark.parametrize(("shape", "moved", "plain"), MOVED.values(), ids=MOVED)
def test_statistics_follow_the_stored_order_of_a_weight_that_is_moved_first(shape, moved, plain):
    w = {"w": normal(*shape, seed=1)}
    recipe = fb.Recipe((fb.Rule("w", "int8"),))
    one, other = (
        fb.observe(lambda w, x, fn=fn: fn(w["w"]), w, [normal(1)], recipe, collect=("hessian", "sum"))["w"]
        for fn in (moved, plain)
    )
    np.testing.assert_allclose(one.hessian, other.hessian, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one.sum, other.sum, rtol=1e-5, atol=1e-5)


BATCHED = {
    "first": ((3, 4, 2), (-3,), lambda w, x: jnp.einsum("tek,eko->teo", x, w)),
    "last": ((2, 4, 3), (-1,), lambda w, x: jnp.einsum("tek,oke->teo", x, w)),
    "vmap": ((2, 4, 3), (-1,), lambda w, x: jax.vmap(lambda x, w: x @ w.T, (1, 2))(x, w)),
    "ragged": ((2, 4, 3), (-1,), lambda w, x: jax.lax.ragged_dot(x[:, 0], w.transpose(2, 1, 0), jnp.array([2, 0, 3]))),
    "loop": (
        (2, 2, 4, 3),
        (-1,),
        lambda w, x: jax.lax.scan(lambda c, w: (c, jnp.einsum("tek,oke->teo", x, w)), 0, w)[1],
    ),
    "part": ((12, 2), (), lambda w, x: jnp.einsum("tek,eko->teo", x, w.reshape(3, 4, 2))),
    "reversed": ((3, 4, 2), (), lambda w, x: jnp.einsum("tek,eko->teo", x, w[::-1])),
    "swapped": ((2, 3, 4, 2), (-3, -4), lambda w, x: jnp.einsum("teak,aeko->teao", jnp.stack([x, x], 2), w)),
}


@pytest.mark.parametrize(("shape", "batch", "product"), BATCHED.values(), ids=BATCHED)
def test_an_observation_names_the_batch_axes_of_the_weight(shape, batch, product):
    stats = fb.observe(lambda w, x: product(w["w"], x), {"w": normal(*shape)}, [normal(5, 3, 4)], RECIPE, collect=("sum",))
    assert stats["w"].batch == batch


def test_products_with_other_batch_axes_are_not_joined():
    def both(params, x):
        w = params["w"]
        return jnp.einsum("tek,eko->teo", x, w), jnp.einsum("tek,oke->teo", x, w)

    w, x = {"w": normal(3, 4, 3)}, normal(5, 3, 4)
    with pytest.raises(fb.UnsupportedError, match="the products of w have different batch axes"):
        fb.observe(both, w, [x], RECIPE, collect=("sum",))
    assert fb.observe(both, w, [x], RECIPE)["w"].batch is None, "one range needs none"


def test_hessians_and_channels():
    def experts(params, x):
        return jnp.einsum("etk,ekn->etn", x, params["e"]), jnp.einsum("eab,abn->en", x[:, :2, :4], params["m"])

    w, x = {"e": normal(2, 8, 4), "m": normal(2, 4, 3)}, normal(2, 6, 8, seed=1)
    stats = fb.observe(experts, w, [x, x], RECIPE, collect=OF_VECTORS)
    for name in w:
        diagonal = np.diagonal(stats[name].hessian, axis1=-2, axis2=-1)
        np.testing.assert_allclose(stats[name].squares, diagonal, rtol=1e-5)
    np.testing.assert_allclose(stats["e"].hessian, 2 * np.einsum("etk,etl->ekl", x, x), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stats["e"].absmax, amax(x, 1))
    np.testing.assert_allclose(stats["e"].abssum, 2 * np.abs(x).sum(1), rtol=1e-5)
    flat = np.asarray(x[:, :2, :4]).reshape(2, 8)
    np.testing.assert_allclose(stats["m"].hessian, 2 * flat.T @ flat, rtol=1e-5, atol=1e-5)
    assert stats["e"].range is None and stats["e"].count == 12
    with pytest.raises(fb.QuantError, match=r"e: no range was collected"):
        stats.recipe(RECIPE)


def test_only_the_activations_scheme_changes():
    rules = (fb.Rule("in", "nf4"), fb.Rule("out", fb.Policy("int4_g8", "uint8", dlhs="int8")))
    assert rules[1].policy is not None
    stats = fb.observe(net, PARAMS, BATCHES, fb.Recipe(rules), rule=MinMaxRange())
    static = stats.recipe(fb.Recipe(rules))
    policy = static.rules[0].policy
    assert [rule.path for rule in static.rules] == ["out", "in", "out"] and all(rule.optional for rule in static.rules[1:])
    assert (policy.weight, policy.dlhs) == (rules[1].policy.weight, rules[1].policy.dlhs)
    assert policy.activation.calibration.low == float(stats["out"].range.low) > -1


def test_leaves_that_are_no_arrays_and_arguments_by_keyword():
    params = {"w": normal(8, 8), "activation": jnp.tanh, "depth": 2}

    def called(params, x, is_doubled, *, scale):
        for _ in range(params["depth"]):
            x = params["activation"](scale * x @ params["w"])
        return 2 * x if is_doubled else x

    x = normal(5, 8, seed=1)
    seen = fb.observe(called, params, [(x, True), (x, False)], RECIPE, scale=9.0)["w"].range
    assert float(seen.high) == amax(9 * x) and int(seen.count) == 4


def test_what_cannot_be_observed_is_refused():
    def looping(params, x):
        return jax.lax.while_loop(lambda x: x[0, 0] > 9, lambda x: x @ params["w"], x)

    w, x = {"w": normal(8, 8)}, normal(5, 8)
    with pytest.raises(
        fb.UnsupportedError,
        match=r"cannot collect statistics of every product(.|\n)*w: .*while decodes w \(measurements inside it",
    ):
        fb.observe(looping, w, [x], RECIPE)
    with pytest.raises(fb.QuantError, match="batches is empty"):
        fb.observe(scanned, w, [], RECIPE)

    def product(params, x):
        return x @ params["w"]

    with pytest.raises(fb.QuantError, match=r"w: its activations were all zero"):
        fb.observe(product, w, [0 * x], RECIPE).recipe(RECIPE)
    with pytest.raises(fb.QuantError, match=r"w: its activations have a NaN"):
        fb.observe(product, w, [x / 0], RECIPE).recipe(RECIPE)
    with pytest.raises(fb.QuantError, match=r"these have axes \(-1,\)"):
        fb.observe(product, w, [x], RECIPE, rule=PercentileRange(99.0, axes=(-1,))).recipe(RECIPE)
    with pytest.raises(fb.QuantError, match=r"there are no statistics of 'v'"):
        fb.observe(product, w, [x], RECIPE)["v"]


def test_a_misspelt_statistic_is_refused_with_the_name_meant(unchecked):
    with pytest.raises(fb.QuantError, match="collect has 'hesian'; did you mean 'hessian'"):
        fb.observe(net, PARAMS, BATCHES, RECIPE, collect=("hesian",))  # type: ignore[arg-type]


def test_a_batch_without_tokens_changes_no_amax():
    batches = [jnp.zeros((0, 4)), jnp.array([[1.0, -3.0, 0.0, 2.0]])]
    stats = fb.observe(lambda p, x: x @ p["w"], {"w": jnp.ones((4, 2))}, batches, "int8", collect=("absmax",))
    assert stats["w"].absmax.tolist() == [1.0, 3.0, 0.0, 2.0] and stats["w"].count == 1

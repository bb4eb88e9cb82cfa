"""`fb.train`: unchanged code whose products follow a recipe, and what was trained is what is served."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit as fb

INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")
FP8 = fb.Policy("fp8", "fp8", dlhs="fp8_e5m2", drhs="fp8_e5m2")


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def layer(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"].T


PARAMS = {"in": normal(16, 32), "out": normal(16, 32, seed=1), "bias": jnp.zeros(16)}
X = normal(8, 16, seed=2)


def recipe(policy, path="in|out"):
    return fb.Recipe((fb.Rule(path, policy),))


def by_hand(policy):
    def fn(w, x):
        hidden = jnp.tanh(fb.dot_general(x, w["in"], (((1,), (0,)), ((), ())), policy=policy))
        return fb.dot_general(hidden, w["out"], (((1,), (1,)), ((), ())), policy=policy)

    return fn


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT8, FP8, fb.Policy("int4_g8")], ids=str)
def test_values_and_gradients_are_those_of_products_with_the_policy(policy):
    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda w: jnp.mean(fn(w, X) ** 2)))

    got, want = loss(fb.train(layer, recipe(policy)))(PARAMS), loss(by_hand(policy))(PARAMS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert jax.tree.structure(got[1]) == jax.tree.structure(PARAMS)


def stacked(w, x, transform=lambda step: step):
    def step(x, layer):
        return jnp.tanh(x @ layer), None

    return jax.lax.scan(transform(step), x, w["stack"])[0]


BODIES = {
    "scan": stacked,
    "remat in scan": lambda w, x: stacked(w, x, jax.checkpoint),
    "jit": lambda w, x: jax.jit(lambda m, x: jnp.tanh(x @ m))(w["stack"][0], x),
    "fori": lambda w, x: jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w["stack"][1]), x),
    "cond": lambda w, x: jax.lax.cond(x.sum() > -1e9, lambda m: x @ m, lambda m: x - m[:8], w["stack"][0]),
    "vmap": lambda w, x: jax.vmap(lambda x: x @ w["stack"][0])(x),
    "einsum and casts": lambda w, x: jnp.einsum("bi,lio->blo", x.astype(jnp.bfloat16), w["stack"].astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("body", BODIES)
def test_a_policy_follows_its_parameter_everywhere(body):
    """The dots of the trace multiply codes, so the output differs from the float one by what 8 bits allow, and no more."""
    fn, w = BODIES[body], {"stack": normal(3, 16, 16)}
    got = fb.train(fn, recipe(INT8, "stack"))(w, X)
    want = fn(w, X)
    # At most three layers, and in each two operands off by up to half of 1/127 of their largest element, 0.8 % of their spread.
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)
    text = str(jax.make_jaxpr(fb.train(fn, recipe(INT8, "stack")))(w, X))
    assert "preferred_element_type=int32" in text


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4_g8", "nf4", "mxfp8", "nvfp4"])
def test_what_was_trained_is_what_is_served(scheme):
    policy = fb.Policy(scheme, "int8")
    plan = fb.plan(layer, PARAMS, X, recipe=recipe(policy))
    served = jax.jit(fb.transparent(layer))(fb.quantize_params(PARAMS, plan), X)
    trained = jax.jit(fb.train(layer, recipe(policy)))(PARAMS, X)
    assert np.array_equal(served, trained)


@pytest.mark.parametrize(
    ("left", "right"),
    [("int4_g8", "int8"), (fb.Policy("int4_g8", "int8"), fb.Policy("int8", "int8")), ("int4_g8", fb.Policy("int8", "int8"))],
    ids=["weight-only", "activations", "one with activations"],
)
def test_both_parameters_of_a_product_are_trained_as_they_are_served(left, right):
    def fn(w, x):
        return x @ (w["in"] @ w["out"])

    two = fb.Recipe((fb.Rule("in", left), fb.Rule("out", right)))
    w = {"in": normal(16, 8), "out": normal(8, 16)}
    served = fb.transparent(fn)(fb.quantize_params(w, fb.plan(fn, w, X, recipe=two)), X)
    np.testing.assert_allclose(fb.train(fn, two)(w, X), served, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda w: jnp.sum(fb.train(fn, two)(w, X)))(w)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(gradient))


def test_parameters_of_a_product_with_policies_of_different_gradients_are_refused_by_path():
    two = fb.Recipe((fb.Rule("in", fb.Policy("int8", "int8")), fb.Rule("out", fb.Policy("int8", "int8", dlhs="int8"))))
    with pytest.raises(fb.QuantError, match=r"different policies: out \(int8 x int8, gradient int8\) and in \("):
        fb.train(lambda w, x: x @ (w["in"] @ w["out"].T), two)(PARAMS, X)


def test_a_stacked_model_is_served_as_it_was_trained():
    w = {"stack": normal(3, 16, 16)}
    policy = fb.Policy("int4_g8", "int8")
    plan = fb.plan(stacked, w, X, recipe=recipe(policy, "stack"))
    served = jax.jit(fb.transparent(stacked))(fb.quantize_params(w, plan), X)
    assert np.array_equal(served, jax.jit(fb.train(stacked, recipe(policy, "stack")))(w, X))


SUMS_OVER_SEVERAL_AXES = {
    "heads": lambda w, x: jnp.einsum("bnh,nhd->bd", x, w["w"]),
    "window": lambda w, x: jax.lax.conv_general_dilated(x, w["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
}


@pytest.mark.parametrize("name", SUMS_OVER_SEVERAL_AXES)
def test_tiles_run_along_the_same_of_several_axes_in_training_and_in_serving(name):
    fn, w, x = SUMS_OVER_SEVERAL_AXES[name], {"w": normal(3, 16, 8)}, normal(2, 3, 16)
    plan = fb.plan(fn, w, x, recipe=recipe("int4_g8", "w"))
    q = fb.quantize_params(w, plan)
    assert q["w"].scale.shape == (3, 2, 8)
    # One sum or the other of float32 numbers: 48 of them, each off by half a unit in the last place of at most 8.
    np.testing.assert_allclose(fb.transparent(fn)(q, x), fb.train(fn, recipe("int4_g8", "w"))(w, x), atol=48 * 8 * 2.0**-24)


MOVED = {
    # tiles of 32 in the array [4, 16, 24]: of a head's 16 where it lies, over two heads where its axes are merged
    "int4_g32 merged": lambda w, x: x.reshape(5, 64) @ w["w"].reshape(64, 24),
    "int4_g32 both axes": lambda w, x: jnp.einsum("bhd,hdm->bm", x, w["w"]),
    "int4_g32 transposed, merged": lambda w, x: w["w"].transpose(2, 0, 1).reshape(24, 64) @ x.reshape(5, 64).T,
    "int4_g32 merged, split": lambda w, x: jnp.einsum("bnk,nkm->bm", x.reshape(5, 8, 8), w["w"].reshape(8, 8, 24)),
    # scales that serve more than what is left of the array
    "int8 a part": lambda w, x: x[:, :, :4].reshape(5, 16) @ w["w"][:, :4].reshape(16, 24),
    "nvfp4 halves": lambda w, x: jnp.stack([jnp.einsum("bhd,hdm->bm", x, v) for v in jnp.split(w["w"], 2, -1)]),
    "int8 a part, in turns": lambda w, x: jax.lax.scan(
        lambda c, layer: (c + x[:, 0, :8] @ layer, None), jnp.zeros((5, 24)), w["w"][:, :8]
    )[0],
    "int4_g32 repeated": lambda w, x: jnp.einsum(
        "bk,bkm->bm", x.reshape(5, 64), jnp.broadcast_to(w["w"].reshape(64, 24), (5, 64, 24))
    ),
    # heads of 16 do not fill tiles of 12, so that serving decodes the reshaped weight
    "int4_g12 decoded": lambda w, x: x.reshape(5, 64) @ w["w"].reshape(64, 24),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "nvfp4" in n else []) for n in MOVED])
def test_a_weight_that_code_reshapes_or_cuts_has_the_codes_that_are_served(name):
    """Those of the stored array, whose tiles, and nvfp4's one scale for all, were there before its axes were moved."""
    scheme = name.partition(" ")[0]
    fn, w, x = MOVED[name], {"w": normal(4, 16, 24)}, normal(5, 4, 16, seed=1)
    trained = fb.train(fn, recipe(scheme, "w"))
    q = fb.quantize_params(w, fb.plan(fn, w, x, recipe=recipe(scheme, "w")))

    @jax.jit
    def step(w, q, x):
        got, pull = jax.vjp(lambda w: trained(w, x), w)
        want, pull_float = jax.vjp(lambda w: fn(w, x), w)
        served = fb.transparent(fn, fallback="dequantize")(q, x)
        return got, served, pull(jnp.sin(want)), pull_float(jnp.sin(want))

    got, served, gradient, float_gradient = step(w, q, x)
    # One sum or the other of float32 numbers: 64 of them, each off by half a unit in the last place of at most 16.
    np.testing.assert_allclose(got, served, atol=64 * 16 * 2.0**-24)
    # Weight-only: the product is linear, so the straight-through gradient is that of the float weight.
    np.testing.assert_allclose(gradient[0]["w"], float_gradient[0]["w"], rtol=1e-5, atol=1e-5)


SHARDED = {"in": normal(64, 32, seed=7), "out": normal(64, 32, seed=8)}


def sharded(w, x, kind=AxisType.Auto):
    """A product whose contraction axis is cut, then one whose output axis is."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])

    def over(fn, *specs):
        return jax.shard_map(fn, mesh=mesh, in_specs=specs[:-1], out_specs=specs[-1])

    hidden = over(lambda x, m: jax.lax.psum(x @ m, "d"), P(None, "d"), P("d"), P())(x, w["in"])
    return over(lambda x, m: x @ m.T, P(), P("d"), P(None, "d"))(jnp.tanh(hidden), w["out"])


def whole(w, x):
    """The same on one device."""
    return jnp.tanh(x @ w["in"]) @ w["out"].T


@pytest.mark.finding(30)
@pytest.mark.parametrize("scheme", ["fp8_tensor", *(pytest.param(s, marks=pytest.mark.slow) for s in ("nvfp4", "int8"))])
def test_a_weight_that_shard_map_cuts_has_the_scales_that_are_served(scheme):
    """Scales of the whole tensor, or of a whole contraction axis, are those of the whole parameter on every device."""
    x, policy = normal(8, 64, seed=9), fb.Policy(scheme, drhs="fp8_e5m2")
    served = fb.quantize_params(SHARDED, fb.plan(sharded, SHARDED, x, recipe=recipe(policy)))

    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda w: (fb.train(fn, recipe(policy))(w, x) ** 2).mean()))(SHARDED)

    (value, gradient), (expected, at_once) = loss(sharded), loss(whole)
    for other in (expected, (jax.jit(fb.transparent(sharded))(served, x) ** 2).mean()):
        np.testing.assert_allclose(value, other, rtol=1e-6)  # float32 sums in another order
    for name in SHARDED:
        np.testing.assert_allclose(gradient[name], at_once[name], rtol=0, atol=np.abs(at_once[name]).max() * 2**-3)


@pytest.mark.usefixtures("unchecked")  # the annotation is that of a typed key
def test_shard_map_takes_a_raw_key():
    policy, x = fb.Policy("int8", drhs=fb.Arm("int8", rounding="stochastic")), normal(8, 64, seed=9)
    gradient = jax.grad(lambda w, key: (fb.train(sharded, recipe(policy))(w, x, key=key) ** 2).mean())
    assert jax.eval_shape(gradient, SHARDED, jax.random.PRNGKey(0))["in"].shape == (64, 32)


@pytest.mark.slow
def test_scales_of_whole_axes_are_cut_on_an_explicit_mesh():
    """There `shard_map` demands that every leaf lies as its spec says, in serving too."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    params, x = jax.device_put((SHARDED, normal(8, 64, seed=9).T), NamedSharding(mesh, P("d")))
    net = functools.partial(sharded, kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        served = fb.quantize_params(params, fb.plan(net, params, x.T, recipe="int8"))
        trained = jax.jit(fb.train(net, "int8"))(params, x.T)
        np.testing.assert_allclose(trained, jax.jit(fb.transparent(net))(served, x.T), rtol=1e-6, atol=1e-6)


@pytest.mark.finding(30)
def test_a_tile_over_two_shards_is_refused_in_training_as_in_serving():
    trained = fb.train(sharded, recipe(fb.Policy("int4_g32")))
    message = r"(?s)shard_map cannot cut a trained parameter as .*an axis of 64 with tiles of 32 cannot be cut in 4"
    with pytest.raises(fb.UnsupportedError, match=message):
        jax.eval_shape(trained, SHARDED, normal(8, 64))


def test_the_kernel_of_a_depthwise_convolution_has_tiles_along_its_window():
    """It contracts one input channel: along that, every number would have a scale of its own."""

    def depthwise(w, x):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, w["w"], (1,), "SAME", None, None, numbers, feature_group_count=8)

    w, x = {"w": normal(4, 1, 8)}, normal(2, 5, 8)
    plan = fb.plan(depthwise, w, x, recipe=recipe("mxfp8", "w"))
    q = fb.quantize_params(w, plan)
    assert q["w"].scale.shape == (1, 1, 8)
    assert plan["w"].bytes_after == q["w"].nbytes == 4 * 8 + 8
    assert plan["w"].reason == ""
    # One sum or the other of float32 numbers: 4 of them, each off by half a unit in the last place of at most 8.
    np.testing.assert_allclose(
        fb.transparent(depthwise)(q, x), fb.train(depthwise, recipe("mxfp8", "w"))(w, x), atol=4 * 8 * 2.0**-24
    )


@pytest.mark.parametrize("change", [lambda w: w.T, lambda w: 0.9 * w], ids=["transposed", "scaled"])
def test_a_weight_that_a_loop_changes_is_float_in_the_plan_as_in_training(change):
    def net(w, x):
        return jax.lax.fori_loop(0, 2, lambda _, c: (change(c[0]), jnp.tanh(c[1] @ c[0])), (w["changed"], x))[1] @ w["w"]

    w, x = {"changed": normal(16, 16), "w": normal(16, 16)}, normal(2, 16)
    plan = fb.plan(net, w, x, recipe="w8")
    assert (plan["changed"].kind, plan["changed"].reason) == ("float32", "no product contracts it; used by scan")
    trained, served = fb.train(net, "w8")(w, x), fb.transparent(net)(fb.quantize_params(w, plan), x)
    np.testing.assert_allclose(trained, served, rtol=1e-6, atol=1e-6)


@jax.custom_jvp
def own_jvp(w, x):
    return jnp.tanh(x @ w)


@own_jvp.defjvp
def _(primals, tangents):
    (w, x), (dw, dx) = primals, tangents
    y = jnp.tanh(x @ w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def test_gradients_go_through_a_custom_jvp_with_a_weight():
    """Its derivative is linear in the tangents, and JAX transposes it: the weight in it is an array of the values served."""
    w, x = {"in": normal(8, 8), "out": normal(8, 8, seed=1)}, normal(2, 8)

    def net(w, x):
        return own_jvp(w["out"], x @ w["in"])

    plan = fb.plan(net, w, x, recipe="w4")
    decoded = {path: fb.dequantize(q) for path, q in fb.quantize_params(w, plan).items()}
    expected = jax.grad(lambda w: jnp.sum(net(w, x) ** 2))(decoded)
    for wrap in (jax.jit, lambda f: f):
        found = wrap(jax.grad(lambda w: jnp.sum(fb.train(net, "w4")(w, x) ** 2)))(w)
        for path, gradient in expected.items():
            np.testing.assert_allclose(found[path], gradient, rtol=1e-5, atol=1e-5)


def test_a_custom_vjp_does_not_quantize_gradients_as_activations():
    """They may be far below the step of the activations' static range."""

    @jax.custom_vjp
    def own_vjp(w, x):
        return x @ w

    own_vjp.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))

    def net(w, x):
        return 1e-4 * jnp.sum(jnp.sin(own_vjp(w["out"], x @ w["in"])))

    w, x = {"in": normal(8, 8), "out": normal(8, 8, seed=1)}, normal(2, 8)
    static = fb.observe(net, w, [x], "w8a8").recipe("w8a8")
    found, expected = jax.grad(fb.train(net, static))(w, x), jax.grad(net)(w, x)
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, atol=0.1 * jnp.abs(gradient).max())


def test_a_custom_vjp_is_told_which_operands_do_not_move():
    """Equinox's `filter_custom_vjp` refuses a gradient by others than its first argument."""

    @jax.custom_vjp
    def own_vjp(w, x):
        return x @ w

    def forward(w, x):
        assert w.perturbed and not x.perturbed
        return x.value @ w.value, x.value

    own_vjp.defvjp(forward, lambda x, g: (x.T @ g, None), symbolic_zeros=True)

    def net(w, x):
        return jnp.sum(own_vjp(w, x))

    w, x = normal(8, 8), normal(2, 8)
    np.testing.assert_allclose(jax.grad(fb.train(net, "w4"))(w, x), jax.grad(net)(w, x), rtol=1e-6)


def tied(w, tokens):
    x = w["table"][tokens]
    return jnp.tanh(x) @ w["table"].T


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_tables_are_trained_as_they_are_served(scheme):
    w, tokens = {"table": normal(24, 16)}, jnp.array([[1, 5], [23, 0]])
    recipe_of = fb.Recipe((fb.Rule("table", fb.Policy(scheme)),))
    served = jax.jit(fb.transparent(tied))(fb.quantize_params(w, fb.plan(tied, w, tokens, recipe=recipe_of)), tokens)
    trained = jax.jit(fb.train(tied, recipe_of))(w, tokens)
    # The codes are the same; the float product may add in another order where XLA lays the table out otherwise.
    np.testing.assert_allclose(served, trained, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda w: jnp.sum(fb.train(tied, recipe_of)(w, tokens)))(w)["table"]
    assert (gradient != 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [INT8, FP8, fb.Policy("int4")], ids=str)
def test_a_regression_is_learned(policy):
    target = {"in": normal(16, 32, seed=5) / 4, "out": normal(16, 32, seed=6) / 4}
    xs = normal(64, 16, seed=7)
    ys = layer(target, xs)

    def loss(w):
        return jnp.mean((fb.train(layer, recipe(policy))(w, xs) - ys) ** 2)

    @jax.jit
    def step(w):
        value, gradient = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - 0.3 * g, w, gradient), value

    w = {"in": normal(16, 32, seed=8) / 4, "out": normal(16, 32, seed=9) / 4}
    losses = []
    for _ in range(60):
        w, value = step(w)
        losses.append(float(value))
    assert losses[-1] < 0.25 * losses[0]


@pytest.mark.slow
def test_keys():
    policy = fb.Policy("int8", dlhs=fb.Arm("int8", rounding="stochastic"))
    fn = fb.train(lambda w, x: jnp.sum(jnp.sin(layer(w, x))), recipe(policy))
    assert fn(PARAMS, X).shape == ()
    with pytest.raises(fb.QuantError, match=r"rounded or rotated at random \(as int8\); pass key="):
        jax.grad(fn)(PARAMS, X)
    gradient = jax.jit(jax.grad(lambda x, key: fn(PARAMS, x, key=key)))
    one, other = (gradient(X, jax.random.key(i)) for i in (0, 1))
    assert not np.array_equal(one, other)
    assert np.array_equal(one, gradient(X, jax.random.key(0)))


def test_an_argument_that_fn_and_train_both_have_is_refused_by_name():
    def noisy(w, x, key=None, scale=1.0):
        return layer(w, x) + scale * jax.random.normal(key, (8, 16))

    key, fn = jax.random.key(3), fb.train(noisy, recipe(INT8))
    with pytest.raises(fb.QuantError, match=r"the function takes key= and so does fb\.train"):
        fn(PARAMS, X, key=key)
    noise = jax.random.normal(key, (8, 16))
    np.testing.assert_allclose(fn(PARAMS, X, key, key=jax.random.key(0)) - fn(PARAMS, X, key, scale=0.0), noise, atol=1e-5)


def test_a_trained_function_is_presented_as_the_function():
    def scaled(w, x, squared: bool, /, *, power=2):
        """Some text."""
        return layer(w, x) ** (power if squared else 1)

    fn = fb.train(scaled, recipe(INT8))
    assert (fn.__name__, fn.__doc__, fn.__module__) == ("scaled", "Some text.", __name__)
    assert str(inspect.signature(fn)) == "(w, x, squared: bool, /, *, power=2, key=None, delayed=None, sparsity=None)"
    static = jax.jit(lambda w, x, squared: fn(w, x, squared), static_argnames="squared")
    np.testing.assert_allclose(static(PARAMS, X, True), static(PARAMS, X, False) ** 2, rtol=1e-5)

    def named(w, x, squared):
        return layer(w, x) ** (2 if squared else 1)

    for wrapper in (fb.train(named, recipe(INT8)), fb.transparent(named)):
        jax.jit(wrapper, static_argnames="squared")(PARAMS, X, True)


@pytest.mark.parametrize("policy", [fb.Policy("int8"), INT8, fb.Policy("int8", "int8", dlhs=fb.Arm("int8", operand="int8"))])
def test_second_derivatives_are_refused(policy):
    """The derivative of rounding is zero almost everywhere, so they would be those of the scales alone."""
    fn = fb.train(lambda w, x: jnp.sum(jnp.sin(layer(w, x))), recipe(policy))
    of_x = jax.grad(fn, argnums=1)
    for second in (
        lambda w: jax.hessian(fn)(w, X),
        jax.grad(lambda w: jnp.sum(of_x(w, X) ** 2)),
        jax.jit(jax.grad(lambda w: jax.lax.scan(lambda c, x: (c + jnp.sum(of_x(w, x) ** 2), None), 0.0, X[None])[0])),
    ):
        with pytest.raises(fb.UnsupportedError, match="the gradients of a product under a policy have no derivative"):
            second(PARAMS)


def test_gradients_in_loops_and_of_what_follows_them_are_first_derivatives():
    fn = fb.train(lambda w, x: jnp.sum(jnp.sin(layer(w, x))), recipe(fb.Policy("int8")))
    by_loss = jax.grad(lambda factor: jnp.sum(jax.grad(lambda w: factor * fn(w, X))(PARAMS)["in"]))
    np.testing.assert_allclose(by_loss(2.0), jnp.sum(jax.grad(fn)(PARAMS, X)["in"]), rtol=1e-5)

    def steps(w, x):
        step = jax.checkpoint(lambda total, _: (total + fn(w, x + total), None))
        return jax.lax.scan(step, 0.0, None, length=3)[0]

    one, other = jax.grad(steps)(PARAMS, X), jax.grad(jax.jit(steps))(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), one, other)


def test_errors_of_gradients_name_the_parameter():
    policy = fb.Policy("int8", drhs=fb.Arm("int4", operand="int4", hadamard=16))
    fn = fb.train(lambda w, x: jnp.sum(jnp.sin(layer(w, x))), recipe(policy))
    with pytest.raises(fb.QuantError, match=r"^out: hadamard=16 must divide the contraction axis of the gradient"):
        jax.grad(lambda w: fn(w, X[:3], key=jax.random.key(0)))(PARAMS)
    with pytest.raises(fb.QuantError, match=r"^out: the gradient is rounded or rotated at random"):
        jax.grad(lambda w: fn(w, X[:3]))(PARAMS)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_errors_of_gradients_name_the_parameter_of_their_own_model(name):
    policy = fb.Policy("int8", drhs=fb.Arm("int4", operand="int4", hadamard=16))
    fn = fb.train(lambda w, x: jnp.sum(x @ w[name]), fb.Recipe((fb.Rule(name, policy),)))
    for key, message in ((jax.random.key(0), "hadamard=16 must divide"), (None, "the gradient is rounded or rotated")):
        with pytest.raises(fb.QuantError, match=f"^{name}: {message}"):
            jax.grad(lambda w: fn(w, X[:3], key=key))({name: PARAMS["in"]})  # noqa: B023


def test_layers_of_equal_shapes_share_compiled_functions():
    """Their latents differ in the label only."""
    block, traces = jax.jit(lambda w, x: (traces.append(1), x @ w)[1]), []
    weights = {name: normal(16, 16, seed=i) for i, name in enumerate("abc")}

    def fn(weights, x):
        for w in weights.values():
            x = block(w, x)
        return x

    trained = fb.train(fn, fb.Recipe((fb.Rule(".*", fb.Policy("int8", "int8")),)))
    jaxpr = jax.make_jaxpr(trained)(weights, normal(4, 16))
    assert len(traces) == 1
    inner = {
        id(e.params["jaxpr"].jaxpr) for e in jaxpr.eqns if "jaxpr" in e.params and "lambda" in str(e.params.get("name"))
    }
    assert len(inner) == 1


def test_what_reads_a_parameter_as_floats_is_reported():
    found = []
    fb.train(lambda w, x: layer(w, x) * w["in"].sum(), recipe(INT8), report=found.append)(PARAMS, X)
    assert [place.primitive for place in found] == ["reduce_sum"]


def test_rules():
    with pytest.raises(fb.QuantError, match=r"rule 1 of recipe 'recipe' \(nothing.*matches nothing"):
        fb.train(layer, recipe(INT8, "nothing.*"))(PARAMS, X)
    one = fb.train(layer, recipe(INT8, "in"))(PARAMS, X)
    assert not np.array_equal(one, fb.train(layer, recipe(INT8))(PARAMS, X))
    assert np.array_equal(fb.train(layer, fb.Recipe((fb.Rule(".*", None),)))(PARAMS, X), layer(PARAMS, X))


def test_a_rules_axis_is_trained_along():
    """Also where it is not the one that is contracted, and where two products contract one each."""

    def both(w, x):
        return x @ w["in"] @ w["in"].T

    for fn, axis in ((layer, -1), (layer, 0), (both, -2)):
        at = fb.Recipe((fb.Rule("in", "int4_g8", axis=axis),))
        q = fb.quantize_params(PARAMS, fb.plan(fn, PARAMS, X, recipe=at))
        np.testing.assert_allclose(fb.transparent(fn)(q, X), fb.train(fn, at)(PARAMS, X), rtol=1e-4, atol=1e-4)

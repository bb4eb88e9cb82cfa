"""Delayed scaling inside `fb.train`: the numbers of the explicit step, and how what is seen comes out of every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fewbit as fb
from fewbit.training import DelayedScale

WISH = fb.DelayedScaling(length=4)
POLICY = fb.Policy("fp8_tensor", "fp8_tensor", "fp8_e5m2_tensor", "fp8_e5m2_tensor", delayed=WISH)
NUMBERS = (((1,), (0,)), ((), ()))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def recipe(policy=POLICY):
    return fb.Recipe((fb.Rule("w", policy),))


def seen_by(fn, params, *inputs, state=None):
    """The gradient of `sum(sin(fn))` in the parameters, and what the step saw, by role."""
    trained = fb.train(fn, recipe())
    state = fb.delayed_state(fn, params, *inputs, recipe=recipe()) if state is None else state

    @jax.jit
    def step(params, state):
        return jax.grad(lambda p, s: jnp.sum(jnp.sin(trained(p, *inputs, delayed=s))), argnums=(0, 1))(params, state)

    gradient, seen = step(params, state)
    product = seen.products["w"]
    return gradient, tuple(np.asarray(s.scale) for s in (product.weight, product.activation, product.gradient))


def amax(x, *axes):
    return np.abs(np.asarray(x)).max(axes or None)


def product(params, x):
    return x @ params["w"]


def explicit_step(w, x, g, states):
    """One product and its gradients, with a `DelayedScale` for each tensor."""
    e4m3, e5m2 = fb.scheme("fp8_tensor"), fb.scheme("fp8_e5m2_tensor")
    x8 = fb.quantize(x, e4m3, scale=states["activation"].scale)
    w8 = fb.quantize(w, e4m3, axis=0, scale=states["weight"].scale)
    out = fb.dot_general(x8, w8, NUMBERS)
    g8 = fb.quantize(g, e5m2, scale=states["gradient"].scale)
    dw = fb.dot_general(x8.T, g8, NUMBERS)
    dx = fb.dot_general(g8, w8.T, NUMBERS)
    seen = {"activation": x, "weight": w, "gradient": g}
    return out, dw, dx, {name: state.update(seen[name]) for name, state in states.items()}


def test_a_product_has_the_numbers_of_the_explicit_step():
    trained = fb.train(product, recipe())
    state = fb.delayed_state(product, {"w": normal(16, 8)}, normal(4, 16), recipe=recipe())
    states = {name: DelayedScale.init(kind, length=4) for name, kind in (("activation", "e4m3fn"), ("weight", "e4m3fn"))}
    states["gradient"] = DelayedScale.init("e5m2", length=4)

    @jax.jit
    def step(w, x, g, state):
        out, back = jax.vjp(lambda w, x, s: trained({"w": w}, x, delayed=s), w, x, state)
        dw, dx, seen = back(g)
        return out, dw, dx, state.advance(seen)

    explicit = jax.jit(explicit_step)
    for i in range(6):
        w, x, g = normal(16, 8, seed=i), (7.0 - i) * normal(4, 16, seed=10 + i), normal(4, 8, seed=20 + i) / (i + 1)
        *got, state = step(w, x, g, state)
        *want, states = explicit(w, x, g, states)
        for a, b in zip(got, want, strict=True):  # both multiply the codes; the two scales may round in either order
            np.testing.assert_allclose(a, b, rtol=2.0**-22)
        for name, scale in states.items():
            jax.tree.map(np.testing.assert_array_equal, getattr(state.products["w"], name), scale)
    assert state.products["w"].gradient.scale != 1


def scanned(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]


def rematerialized(params, x):
    return jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, params["w"])[0]


def unrolled(params, x):
    for i in range(3):
        x = jnp.tanh(x @ params["w"][i])
    return x


STACK, X = {"w": normal(3, 8, 8)}, 4 * normal(4, 8, seed=1)


@pytest.mark.parametrize("fn", [scanned, pytest.param(rematerialized, marks=pytest.mark.slow), unrolled])
def test_stacked_layers_have_a_state_each(fn):
    state = fb.delayed_state(fn, STACK, X, recipe=recipe())
    assert state.products["w"].weight.amax_history.shape == (3, 4)
    _, (weight, activation, gradient) = seen_by(fn, STACK, X)
    np.testing.assert_array_equal(weight, amax(STACK["w"], 1, 2))
    assert activation[0] == amax(X) and (activation[1:] <= 1).all() and (gradient > 0).all()


def test_layers_of_a_flipped_stack_have_a_state_each():
    _, (weight, activation, _) = seen_by(lambda params, x: scanned({"w": params["w"][::-1]}, x), STACK, X)
    np.testing.assert_array_equal(weight, amax(STACK["w"], 1, 2))
    assert activation[-1] == amax(X) and (activation[:-1] <= 1).all()


def shared(params, x):
    return jax.lax.scan(lambda x, _: (2 * jnp.tanh(x @ params["w"]), None), x, None, length=3)[0] @ params["w"]


def called_twice(params, x):
    return jax.jit(product)(params, jnp.tanh(product(params, x))) + 3 * product(params, x / 2)


def branching(params, x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ params["w"], lambda x: x @ params["w"] / 2, x)


@pytest.mark.parametrize(
    ("fn", "largest"), [(shared, 4.0), pytest.param(called_twice, 4.0, marks=pytest.mark.slow), (branching, 4.0)]
)
def test_what_is_seen_in_several_places_joins_by_maximum(fn, largest):
    """The activations of the first use are the largest; a sum over the uses would be more."""
    x = normal(4, 8, seed=2)
    x = largest * x / amax(x)
    params = {"w": normal(8, 8, seed=3)}
    _, (weight, activation, _) = seen_by(fn, params, x)
    assert weight == amax(params["w"]) and activation == np.float32(amax(x))


def test_the_gradient_joins_by_maximum_over_the_turns_of_a_loop():
    """The last turn has the gradient `cos(out)`, and the ones before it a hundredth of it and less."""

    def fn(params, x):
        return jax.lax.scan(lambda y, x: (y / 100 + x @ params["w"], None), jnp.zeros(8), x)[0]

    params, x = {"w": jnp.eye(8)}, jnp.zeros((3, 8))
    assert seen_by(fn, params, x)[1][2] == 1


def test_vmap_around_the_trained_function_shares_the_state():
    trained, x = fb.train(product, recipe()), 4 * normal(5, 4, 8, seed=2)
    params = {"w": normal(8, 8, seed=3)}
    state = fb.delayed_state(product, params, x[0], recipe=recipe())

    def loss(state, x):
        return jnp.sum(jax.vmap(lambda x: trained(params, x, delayed=state))(x) * jnp.arange(1.0, 6)[:, None, None])

    seen = jax.jit(jax.grad(loss))(state, x).products["w"]
    assert seen.activation.scale == amax(x) and seen.gradient.scale == 5
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), state)
    own = jax.vmap(jax.grad(lambda s, x: trained(params, x, delayed=s).sum()))(states, x).products["w"]
    np.testing.assert_array_equal(own.activation.scale, amax(x, 1, 2))


def test_vmap_within_vmap_shares_the_state_or_has_its_own():
    trained, x = fb.train(product, recipe()), 4 * normal(2, 3, 4, 8, seed=2)
    params = {"w": normal(8, 8, seed=3)}
    state = fb.delayed_state(product, params, x[0, 0], recipe=recipe())

    def seen(loss, *state):
        return jax.jit(jax.grad(loss))(*state).products["w"].activation.scale

    def every(state):
        return jnp.sum(jax.vmap(jax.vmap(lambda x: trained(params, x, delayed=state)))(x))

    def each(states, axes):
        inner, outer = axes
        one = jax.vmap(lambda state, x: trained(params, x, delayed=state), (inner, 0))
        return jnp.sum(jax.vmap(one, (outer, 0))(states, x))

    assert seen(every, state) == amax(x)
    for count, axes, rest in ((2, (None, 0), (1, 2, 3)), (3, (0, None), (0, 2, 3))):
        states = jax.tree.map(lambda leaf, count=count: jnp.stack([leaf] * count), state)
        np.testing.assert_array_equal(seen(lambda s, axes=axes: each(s, axes), states), amax(x, *rest))


def test_a_state_of_another_depth_is_refused():
    def fn(params, x):
        return jax.lax.scan(lambda y, w: (y @ w, None), x, params["w"])[0]

    x = normal(4, 8)
    state = fb.delayed_state(fn, {"w": normal(3, 8, 8)}, x, recipe=recipe())
    message = r"delayed= is of another model: it has scales of shape \(3,\) for w, whose shape is \(4, 8, 8\); start with"
    with pytest.raises(fb.QuantError, match=message):
        fb.train(fn, recipe())({"w": normal(4, 8, 8)}, x, delayed=state)


def test_shards_join_by_maximum():
    mesh = jax.make_mesh((2, 2), ("data", "stage"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def fn(params, x):
        def local(w, x):
            start = x + 0 * w[0, 0, 0]  # the carry differs between stages
            return jax.lax.psum(jax.lax.scan(lambda x, w: (x @ w, None), start, w)[0], "stage")

        return jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), P("data")), out_specs=P("data"))(params["w"], x)

    params, x = {"w": normal(4, 8, 8)}, 4 * normal(4, 8, seed=2)
    _, (weight, activation, _) = seen_by(fn, params, x)
    np.testing.assert_array_equal(weight, amax(params["w"], 1, 2))
    assert activation[0] == amax(x) == activation[2]


@pytest.mark.parametrize("is_inside", [False, True])
def test_devices_around_the_trained_function_join_by_maximum(is_inside):
    """In the body of a `shard_map`, differentiated as a whole or within the body."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = {"w": normal(8, 8)}, normal(8, 8, seed=2)

    def fn(params, x):
        return jnp.tanh(x @ params["w"])

    trained, state = fb.train(fn, recipe()), fb.delayed_state(fn, params, x, recipe=recipe())

    def loss(state, x):
        return jnp.sum(trained(params, x, delayed=state) ** 2)

    if is_inside:
        each = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    else:
        each = jax.grad(
            jax.shard_map(
                lambda state, x: jax.lax.psum(loss(state, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
            )
        )
    seen, whole = jax.jit(each)(state, x), jax.jit(jax.grad(loss))(state, x)
    jax.tree.map(np.testing.assert_array_equal, seen, whole)


@pytest.mark.slow
def test_a_pipeline_sees_what_its_layers_see_one_after_the_other():
    """Four stages on four devices hand micro-batches on, and work on zeros while they wait."""
    mesh = jax.make_mesh((4,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    def stage(w, x):
        def tick(handed, fresh):
            out = layers(jnp.where(jax.lax.axis_index("stage") == 0, fresh, handed), w)
            return jax.lax.ppermute(out, "stage", [(0, 1), (1, 2), (2, 3)]), out

        waiting = jnp.zeros((3, *x.shape[1:]))
        return jax.lax.scan(tick, waiting[0] + 0 * w[0, 0, 0], jnp.concatenate([x, waiting]))[1][None]

    def pipelined(params, x):
        outs = jax.shard_map(stage, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"))(params["w"], x)
        return outs[3, 3:]

    params, x = {"w": normal(4, 8, 8)}, normal(2, 3, 8, seed=2)
    whole = seen_by(lambda params, x: layers(x, params["w"]), params, x)
    # Sums in another order may take a number over a tie of E4M3, 1/16 of it; from there on all is a little different.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.07), seen_by(pipelined, params, x)[1], whole[1])


def test_micro_batches_merge_to_the_whole_step():
    params, x = {"w": normal(8, 8)}, normal(8, 8, seed=1)
    trained, state = fb.train(product, recipe()), fb.delayed_state(product, params, x, recipe=recipe())

    @jax.jit
    def seen(x):
        return jax.grad(lambda s: jnp.sum(jnp.sin(trained(params, x, delayed=s))))(state)

    parts = [seen(x[:4]), seen(x[4:])]
    jax.tree.map(np.testing.assert_array_equal, state.advance(parts[0].merge(parts[1])), state.advance(seen(x)))


def test_tables_are_looked_up_with_the_scale_of_earlier_steps():
    policy = fb.Policy("fp8_tensor", delayed=WISH)
    params, tokens = {"w": normal(6, 8)}, jnp.array([1, 5])
    state = fb.delayed_state(lambda p, t: p["w"][t], params, tokens, recipe=recipe(policy))
    trained = fb.train(lambda p, t: p["w"][t], recipe(policy))

    @jax.jit
    def step(state):
        rows, back = jax.vjp(lambda s: trained(params, tokens, delayed=s), state)
        return rows - fb.fake_quant(params["w"], "fp8_tensor", scale=1.0)[tokens], back(jnp.ones((2, 8)))[0]

    difference, seen = step(state)
    assert not difference.any() and seen.products["w"].weight.scale == amax(params["w"])


@pytest.mark.parametrize("preset", ["te_fp8_delayedscaling", pytest.param("maxtext/fp8_gpu", marks=pytest.mark.slow)])
def test_a_regression_is_learned(preset):
    def net(w, x):
        for name in ("in", "hidden"):
            x = jnp.tanh(x @ w[name])
        return x

    names = ("in", "hidden")
    rules = (fb.Rule(".*", fb.recipe(preset).rules[-1].policy),)
    assert rules[0].policy is not None and rules[0].policy.delayed is not None
    xs = normal(64, 16, seed=7)
    ys = net({name: normal(16, 16, seed=i) / 4 for i, name in enumerate(names)}, xs)
    trained = fb.train(net, fb.Recipe(rules))

    def loss(w, delayed):
        return jnp.mean((trained(w, xs, delayed=delayed) - ys) ** 2)

    @jax.jit
    def step(w, delayed):
        value, (gradient, seen) = jax.value_and_grad(loss, argnums=(0, 1))(w, delayed)
        return jax.tree.map(lambda p, g: p - 2 * g, w, gradient), delayed.advance(seen), value

    w = {name: normal(16, 16, seed=8 + i) / 4 for i, name in enumerate(names)}
    delayed = fb.delayed_state(net, w, xs, recipe=fb.Recipe(rules))
    assert delayed.products["in"].weight.amax_history.shape == (1024,)
    values = []
    for _ in range(80):
        w, delayed, value = step(w, delayed)
        values.append(float(value))
    assert values[-1] < 0.1 * values[0]


def test_what_does_not_go_together_is_refused():
    params, x = {"w": normal(8, 8)}, normal(4, 8)
    trained = fb.train(product, recipe())
    with pytest.raises(
        fb.QuantError, match=r"of \['w'\] from earlier steps, and there is no delayed=; start with delayed_state"
    ):
        trained(params, x)
    with pytest.raises(fb.QuantError, match=r"delayed= has them for \['v'\]"):
        trained(
            params, x, delayed=fb.DelayedState({"v": fb.delayed_state(product, params, x, recipe=recipe()).products["w"]})
        )
    assert fb.delayed_state(product, params, x, recipe="w8a8").products == {}
    own = jax.custom_vjp(lambda w, x: x @ w)
    own.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))

    def inside(params, x):
        return own(params["w"], x)

    state = fb.delayed_state(inside, params, x, recipe=recipe())
    with pytest.raises(fb.UnsupportedError, match=r"delayed scaling cannot follow a parameter into custom_vjp_call"):
        fb.train(inside, recipe())(params, x, delayed=state)
    arms = ("fp8_e5m2_tensor", "fp8_tensor")
    with pytest.raises(
        fb.QuantError, match="one history of the gradient; the arms quantize it as fp8_e5m2_tensor and fp8_tensor"
    ):
        fb.Policy("fp8_tensor", "fp8_tensor", *arms, delayed=WISH)
    turned = fb.Arm("fp8_tensor", operand="fp8_tensor", hadamard=16)
    with pytest.raises(fb.QuantError, match="leave hadamard out"):
        fb.Policy("fp8_tensor", "fp8_tensor", turned, delayed=WISH)


@pytest.mark.oracle
def test_the_numbers_are_those_of_flax():
    linen = pytest.importorskip("flax.linen")
    few = pytest.importorskip("fewbit.frameworks.linen")
    theirs = linen.Dense(8, use_bias=False, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    ours = linen.Dense(8, use_bias=False)
    policy = next(rule.policy for rule in fb.recipe("maxtext/fp8_gpu").rules if rule.policy is not None)
    x, rules = normal(4, 16), fb.Recipe((fb.Rule("kernel", policy),))
    their_state = theirs.init(jax.random.key(0), x)
    variables = {"params": their_state["params"]}
    state = few.delayed_state(ours, variables, x, recipe=rules)
    trained = few.train(ours, rules)

    @jax.jit
    def their_step(state, x):
        gradient = jax.grad(lambda state: jnp.sum(jnp.sin(theirs.apply(state, x))))(state)
        return theirs.apply(state, x), gradient["params"]["kernel"], {**gradient, "params": state["params"]}

    @jax.jit
    def our_step(state, x):
        def loss(variables, state):
            out = trained(variables, x, delayed=state)
            return jnp.sum(jnp.sin(out)), out

        (gradient, seen), out = jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, state)
        return out, gradient["params"]["kernel"], state.advance(seen)

    for i in range(5):
        x = (5.0 - i) * normal(4, 16, seed=i)
        *want, their_state = their_step(their_state, x)
        *got, state = our_step(state, x)
        for a, b in zip(got, want, strict=True):  # Flax inverts its scales twice, so their last bits differ
            assert jnp.linalg.norm(a - b) < 1e-5 * jnp.linalg.norm(b)
    theirs_held = jax.tree.leaves(their_state["_overwrite_with_gradient"])
    histories = [np.sort(np.asarray(leaf)) for leaf in theirs_held if leaf.shape == (1024,)]
    product = state.products["kernel"]
    for held in (product.weight, product.activation, product.gradient):
        assert any(np.allclose(np.sort(held.amax_history), history, rtol=1e-5) for history in histories)

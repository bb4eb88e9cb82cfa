"""Delayed scaling: the history, the scale of the step after, merging, and the numbers of Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.training import DelayedScale

update = jax.jit(lambda state, x: state.update(x))


def steps(*amaxes: float) -> list[jax.Array]:
    return [jnp.array([[0.0, -a], [a / 2, 0.0]]) for a in amaxes]


def test_the_scale_is_that_of_the_steps_before():
    state = DelayedScale.init(length=3)
    scales = []
    for x in steps(448.0, 896.0, 224.0, 112.0, 112.0, 112.0):
        scales.append(float(state.scale))
        state = update(state, x)
    # Scale 1 before the first step; the maximum of the last three steps after it.
    assert scales == [1.0, 1.0, 2.0, 2.0, 2.0, 0.5]
    assert state.scale == 0.25
    assert sorted(state.amax_history.tolist()) == [112.0, 112.0, 112.0]


@pytest.mark.parametrize(("name", "largest"), [("e4m3fn", 448), ("e5m2", 57344), ("e4m3fnuz", 240), ("int8", 127.5)])
def test_formats_and_margin(name: str, largest: float):
    x = jnp.array([3.0, -7.0])
    assert DelayedScale.init(name).update(x).scale == np.float32(7) / np.float32(largest)
    assert DelayedScale.init(fb.FORMATS[name], margin=2).update(x).scale == np.float32(28) / np.float32(largest)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_zeros_and_poison_keep_the_scale_and_do_not_stay(poison: float):
    state = DelayedScale.init(length=4)
    assert update(state, jnp.zeros((2, 2))).scale == 1
    assert update(state, jnp.array([[1.0, poison]])).scale == 1
    state = update(update(state, steps(448.0)[0] / 8), jnp.array([[poison, 5.0]]))
    assert state.scale == 0.125 and jnp.isfinite(state.amax_history).all()
    assert update(state, steps(896.0)[0]).scale == 2, "the next finite step counts at once"


def test_parts_of_a_step_merge_by_maximum():
    before = update(DelayedScale.init(length=3), steps(8.0)[0])
    parts = steps(1.0, 16.0, 0.0)
    whole = update(before, jnp.stack(parts))
    merged = update(before, parts[0]).merge(update(before, parts[1])).merge(update(before, parts[2]))
    jax.tree.map(np.testing.assert_array_equal, merged, whole)

    @jax.jit
    def scanned(before: DelayedScale, parts: jax.Array) -> DelayedScale:
        start = before.update(jnp.zeros(1))  # a part that saw nothing
        return jax.lax.scan(lambda state, x: (state.merge(before.update(x)), None), start, parts)[0]

    jax.tree.map(np.testing.assert_array_equal, scanned(before, jnp.stack(parts)), whole)


def test_a_part_that_saw_zeros_first_does_not_hold_the_scale_up():
    before = DelayedScale.init(length=2)
    merged = before.update(jnp.zeros(1)).merge(before.update(jnp.array([0.448])))
    assert merged.scale == np.float32(0.448) / np.float32(448)


def test_stacked_states_update_under_vmap_and_merge_as_they_are():
    x = jnp.stack(steps(1.0, 2.0, 4.0))
    stacked = jax.vmap(lambda x: DelayedScale.init(length=2).update(x))(x)
    assert stacked.amax_history.shape == (3, 2)
    other = jax.vmap(lambda s, x: s.update(x))(jax.tree.map(jnp.zeros_like, stacked), 4 - x)
    np.testing.assert_array_equal(stacked.merge(other).scale, np.float32([5, 6, 8]) / np.float32(448))
    with pytest.raises(QuantError, match=r"the state is stacked .* update it under jax\.vmap"):
        stacked.update(x)


def test_a_step_quantizes_with_the_scale_of_its_state():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32))

    @jax.jit
    def step(state: DelayedScale, x: jax.Array) -> tuple[DelayedScale, jax.Array]:
        return state.update(x), fb.fake_quant(x, "fp8_tensor", scale=state.scale)

    state, first = step(DelayedScale.init(), x)
    _, second = step(state, x)
    by_itself = jax.jit(lambda x: (fb.fake_quant(x, "fp8_tensor", scale=1.0), fb.fake_quant(x, "fp8_tensor")))(x)
    # Scale 1 at first, and then the range of the same array.
    jax.tree.map(np.testing.assert_array_equal, (first, second), by_itself)


def test_what_is_refused():
    with pytest.raises(QuantError, match="length is 0, must be at least 1 step"):
        DelayedScale.init(length=0)
    with pytest.raises(QuantError, match="e4m4"):
        DelayedScale.init("e4m4")
    with pytest.raises(QuantError, match=r"cannot be merged: \('e4m3fn', 0, \(1024,\)\) and \('e5m2', 0, \(1024,\)\)"):
        DelayedScale.init().merge(DelayedScale.init("e5m2"))


@pytest.mark.oracle
@pytest.mark.parametrize("margin", [0, 1])
def test_flax_has_the_same_numbers(margin: int):
    fp8_ops = pytest.importorskip("flax.linen.fp8_ops")
    history, scale = jnp.zeros(5), jnp.ones(1)
    state = DelayedScale.init(length=5, margin=margin)
    rng = np.random.default_rng(0)
    for spread in (0.0, 1e-3, 1.0, 30.0, 0.0, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1):
        x = jnp.asarray(rng.standard_normal((4, 8)).astype(np.float32) * np.float32(spread))
        scale = fp8_ops.compute_scale(history.max(keepdims=True), scale, 448.0, margin)
        history = fp8_ops.compute_amax_history(x, history)
        # Flax keeps 1 / scale and inverts it twice: four roundings to our one.
        np.testing.assert_allclose(state.scale, scale[0], rtol=4 * 2.0**-23)
        state = update(state, x)
        np.testing.assert_array_equal(state.amax_history, history)


def test_states_are_float32_where_float64_is_on():
    with jax.enable_x64(True):
        state = DelayedScale.init().update(jnp.ones(3, jnp.float64))
        merged = state.merge(DelayedScale.init())
    assert {leaf.dtype for leaf in jax.tree.leaves((state, merged))} == {np.dtype(np.float32)}

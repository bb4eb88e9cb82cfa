"""Sparsity: which weights a mask keeps, when it is renewed, what the gradient is, and what quantizing makes of zeros."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.training import Sparsity, SparsityState, magnitude_mask, nm_mask
from tests.conformance.test_schemes import ALL, schemes


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 8), (4, 4)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_largest_of_every_group_are_kept(n: int, m: int, axis: int):
    w = weights(16, 8, 24)
    mask = np.asarray(jax.jit(lambda w: nm_mask(w, n, m, axis=axis))(w))
    groups = np.moveaxis(np.where(mask, np.abs(w), 0), axis, -1).reshape(-1, m)
    kept = np.moveaxis(mask, axis, -1).reshape(-1, m)
    every = np.moveaxis(np.abs(w), axis, -1).reshape(-1, m)
    assert (kept.sum(-1) == n).all()
    np.testing.assert_array_equal(np.sort(groups)[:, m - n :], np.sort(every)[:, m - n :])


def test_every_tie_goes_to_the_first():
    groups = np.array(list(itertools.product([-1.0, 0.0, 1.0, 2.0], repeat=4)), np.float32)
    mask = np.asarray(nm_mask(jnp.asarray(groups), 2, 4, axis=-1))
    for group, kept in zip(groups, mask, strict=True):
        first = sorted(range(4), key=lambda i: (-abs(group[i]), i))[:2]
        assert set(np.flatnonzero(kept)) == set(first), group


def test_a_nan_is_kept_and_counts_as_infinite():
    w = jnp.array([1.0, 5.0, -jnp.nan, 9.0, jnp.nan, jnp.inf, -jnp.inf, 2.0])
    assert nm_mask(w, 1, 4, axis=0).tolist() == [False, False, True, False, True, False, False, False]
    assert magnitude_mask(w, 0.25).tolist() == [False, False, True, False, True, False, False, False]
    assert jnp.isnan(Sparsity(1, 4, axis=0).apply(w, SparsityState(nm_mask(w, 1, 4, axis=0), jnp.int32(0)))[2])


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_unstructured_masks_keep_a_fraction(density: float):
    w = weights(8, 10)
    mask = np.asarray(magnitude_mask(jnp.asarray(w), density))
    assert mask.sum() == round(density * 80)
    if 0 < density < 1:
        assert np.abs(w[mask]).min() >= np.abs(w[~mask]).max()
    assert magnitude_mask(jnp.ones(4), 0.5).tolist() == [True, True, False, False]


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
    sparsity, w = Sparsity(2, 4), weights(5, 8, 3)
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
    sparsity, w, v = Sparsity(2, 4, gradient=gradient), jnp.asarray(weights(8, 6)), jnp.asarray(weights(8, 6)[::-1])
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


@schemes(SYMMETRIC, ("int8", "int4_narrow", "nf4", "mxfp4", "fp8_block128", "q4_0", "ternary", "nf4_dq"))
def test_pruned_weights_quantize_to_exact_zero(name: str):
    w = jnp.asarray(weights(8, 64))
    mask = nm_mask(w, 2, 4, axis=-1)
    dense = jax.jit(lambda w: fb.fake_quant(w, name))(jnp.where(mask, w, 0))
    assert (dense[~mask] == 0).all() and (dense != 0).sum() > 16


def test_binary_has_no_zero_to_prune_to():
    assert "binary" not in SYMMETRIC and "int8" in SYMMETRIC


def test_what_is_refused():
    with pytest.raises(
        QuantError, match=r"axis -1 has 30 elements, .* m=4 do not divide; pad it to 32, .* fit: 2, 3, 5, 6, 10, 15, 30"
    ):
        nm_mask(jnp.ones((4, 30)), 2, 4, axis=-1)
    for make, message in (
        (lambda: nm_mask(jnp.ones(67), 2, 4, axis=0), "pad it to 68, .* fit: none up to 64"),
        (lambda: nm_mask(jnp.ones(8), 5, 4, axis=0), "n:m is 5:4; at least one and at most m weights"),
        (lambda: nm_mask(jnp.ones(8), 2, 4, axis=1), "axis is 1, but the array has 1 axes"),
        (lambda: magnitude_mask(jnp.ones(8), 1.5), "density is 1.5, must lie between 0 and 1"),
        (lambda: Sparsity(0, 4), "n:m is 0:4"),
        (lambda: Sparsity(2, 4, update_step=0), "start_step is 0 and update_step 0; must be at least 0 and at least 1"),
    ):
        with pytest.raises(QuantError, match=message):
            make()


@pytest.mark.usefixtures("unchecked")
def test_a_gradient_that_is_not_known_is_refused():
    with pytest.raises(QuantError, match="gradient is 'ste', must be identity or masked"):
        Sparsity(2, 4, gradient="ste")  # type: ignore[arg-type]

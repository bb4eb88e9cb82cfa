"""Masks: which weights they keep, of every group and of a whole array."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.array import magnitude_mask, nm_mask
from fewbit.errors import QuantError


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (3, 8), (4, 4), (5, 48)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_largest_of_every_group_are_kept(n: int, m: int, axis: int):
    w = weights(48, 48, 48)
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


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
def test_unstructured_masks_keep_a_fraction(density: float):
    w = weights(8, 10)
    mask = np.asarray(magnitude_mask(jnp.asarray(w), density))
    assert mask.sum() == round(density * 80)
    if 0 < density < 1:
        assert np.abs(w[mask]).min() >= np.abs(w[~mask]).max()
    assert magnitude_mask(jnp.ones(4), 0.5).tolist() == [True, True, False, False]


def test_several_axes_are_taken_as_one():
    w = jnp.asarray(weights(4, 6, 2))
    flat = nm_mask(w.reshape(24, 2), 2, 8, axis=0)
    np.testing.assert_array_equal(nm_mask(w, 2, 8, axis=(0, 1)), flat.reshape(w.shape))
    np.testing.assert_array_equal(
        nm_mask(w.transpose(2, 1, 0), 2, 8, axis=(-1, 1)), flat.reshape(w.shape).transpose(2, 1, 0)
    )


def test_what_is_refused():
    with pytest.raises(
        QuantError, match=r"axis -1 has 30 elements, .* m=4 do not divide; pad it to 32, .* fit: 2, 3, 5, 6, 10, 15, 30"
    ):
        nm_mask(jnp.ones((4, 30)), 2, 4, axis=-1)
    for make, message in (
        (lambda: nm_mask(jnp.ones(67), 2, 4, axis=0), "pad it to 68, .* fit: none up to 64"),
        (lambda: nm_mask(jnp.ones(8), 5, 4, axis=0), "n:m is 5:4; at least one and at most m weights"),
        (lambda: nm_mask(jnp.ones(8), 2, 4, axis=1), "axis is 1, but the array has 1 axes"),
        (lambda: nm_mask(jnp.ones((8, 8)), 2, 4, axis=(1, -1)), r"axis is \(1, -1\), but the array has 2 axes"),
        (lambda: magnitude_mask(jnp.ones(8), 1.5), "density is 1.5, must be between 0 and 1"),
    ):
        with pytest.raises(QuantError, match=message):
            make()

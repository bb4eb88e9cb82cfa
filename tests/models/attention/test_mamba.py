"""A state space by chunks is its recurrence, and has a state in the cache. What it shares with linear attention is in test_linear."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.models import HybridCache, Mamba2, empty_cache
from fewbit.models.attention.mamba import state_space
from tests.nets.random_decoder import MAMBA


def recurrence(c, b, x, decay, memory) -> tuple[np.ndarray, np.ndarray]:
    """The outputs and the last state, token by token in float64; heads 0 and 1 are of group 0."""
    c, b = (np.repeat(one, x.shape[1] // one.shape[1], axis=1) for one in (c, b))
    out = np.zeros(x.shape)
    for t in range(x.shape[2]):
        written = b[:, :, t, :, None] * x[:, :, t, None, :]
        memory = memory * np.exp(decay[:, :, t])[..., None, None] + written
        out[:, :, t] = np.einsum("bmnk,bmn->bmk", memory, c[:, :, t])
    return out, memory


def inputs(T: int, *, decays: str = "some") -> dict[str, np.ndarray]:
    """Random inputs of four heads in two groups."""
    draw = np.random.default_rng(T)
    decay = {"some": -draw.exponential(size=(2, 4, T)), "none": np.zeros((2, 4, T)), "all": np.full((2, 4, T), -200.0)}[
        decays
    ]
    c, b = draw.normal(size=(2, 2, 2, T, 8))
    return {"c": c, "b": b, "x": draw.normal(size=(2, 4, T, 6)), "decay": decay, "memory": draw.normal(size=(2, 4, 8, 6))}


@pytest.mark.parametrize(
    ("T", "decays"), [(1, "some"), (63, "some"), (64, "some"), (150, "some"), (130, "none"), (130, "all")]
)
def test_chunks_are_the_recurrence(T: int, decays: str):
    given = inputs(T, decays=decays)
    out, memory = state_space(**{name: jnp.asarray(one, jnp.float32) for name, one in given.items()})
    expected, state = recurrence(**given)
    # Sums of T products of three numbers near 1, each with a float32 rounding or two: T times 2**-23 of values below 10.
    close = {"atol": 10 * T * 2**-23, "rtol": 0}
    np.testing.assert_allclose(out, expected, **close)
    np.testing.assert_allclose(memory, state, **close)


@pytest.mark.slow
def test_gradients_are_finite_where_all_is_forgotten():
    given = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(70, decays="all").items()}
    found = jax.grad(lambda given: jnp.sum(state_space(**given)[0] ** 2))(given)
    assert all(np.isfinite(one).all() for one in jax.tree.leaves(found))
    assert np.abs(found["x"]).max() > 0


def test_a_cache_has_keys_of_the_one_layer_and_states_of_the_others():
    cache = empty_cache(MAMBA, batch=2, max_length=14, dtype=jnp.bfloat16)
    assert isinstance(cache, HybridCache) and cache.kv.keys.shape == (1, 2, 2, 14, 8)
    assert {(state.inputs.shape, state.inputs.dtype) for state in cache.states} == {((2, 2, 44), jnp.dtype(jnp.bfloat16))}
    assert {(state.memory.shape, state.memory.dtype) for state in cache.states} == {((2, 4, 5, 6), jnp.dtype(jnp.float32))}
    assert len(cache.states) == 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"groups": 3}, r"mamba\.groups is 3, must divide mamba\.heads, 4"),
        ({"layers": (1, 0)}, r"mamba\.layers is \(1, 0\), must be layers in ascending order"),
        ({"state_dim": 0}, r"mamba\.state_dim is 0, must be a positive integer"),
        ({"bias": 1}, r"mamba\.bias is 1, must be true or false"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_numbers_that_do_not_fit_are_refused(changed: dict, message: str):
    assert isinstance(MAMBA.mamba, Mamba2)
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(MAMBA.mamba, **changed)


def test_a_decoder_without_attention_is_refused():
    with pytest.raises(QuantError, match=r"mamba\.layers has 4 of 4 layers; one without is expected at least"):
        dataclasses.replace(MAMBA, mamba=dataclasses.replace(MAMBA.mamba, layers=(0, 1, 2, 3)))

"""A state space by chunks is its recurrence, and states of a KV cache go on where the tokens before ended."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.models import HybridCache, Mamba2, empty_cache, forward, fuse_weights, generate, prefill, stack_layers
from fewbit.models.attention.mamba import state_space
from tests.nets.random_decoder import MAMBA, random_params, random_tokens


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
    close = {"atol": 10 * T * 2**-23, "rtol": 2**-20}
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


@pytest.mark.slow
def test_a_prompt_in_parts_and_with_padding_gives_the_logits_of_the_whole():
    params, tokens = random_params(MAMBA), random_tokens(MAMBA, 2, 13)
    whole = np.asarray(jax.jit(forward, static_argnames="config")(params, tokens, MAMBA)[:, -1])
    cache = empty_cache(MAMBA, batch=2, max_length=20)
    _, cache = prefill(params, jnp.pad(tokens[:, :6], ((0, 0), (0, 4))), cache, MAMBA, length=jnp.int32(6))
    logits, cache = prefill(params, tokens[:, 6:], cache, MAMBA)
    np.testing.assert_allclose(logits, whole, atol=1e-5 * np.abs(whole).max(), rtol=0)
    assert isinstance(cache, HybridCache) and int(cache.length) == 13


@pytest.mark.slow
def test_fused_stacked_and_quantized_weights_generate_what_they_do_one_by_one():
    quantized = jax.tree.map(lambda a: fb.quantize(a, "int8") if a.ndim == 2 else a, random_params(MAMBA))
    fused = fuse_weights(quantized)
    assert "q+k+v" in fused["layers"][2]["attn"] and "in" in fused["layers"][0]["attn"]
    prompt = random_tokens(MAMBA, 2, 7)
    written = functools.partial(generate, config=MAMBA, max_new_tokens=9)
    expected = fb.transparent(written)(quantized, prompt).tokens
    np.testing.assert_array_equal(fb.transparent(written)(fused, prompt).tokens, expected)
    np.testing.assert_array_equal(fb.transparent(written)(stack_layers(fused), prompt).tokens, expected)


def test_rules_for_products_tell_its_products_by_name():
    plan = fb.plan(
        lambda params, tokens: forward(params, tokens, MAMBA),
        random_params(MAMBA),
        random_tokens(MAMBA, 1, 3),
        recipe="int8",
    )
    named = [row.name.partition("#")[0] for row in plan.products]
    assert named.count("state_space") == len(named) - 2, "all but the scores and the mean of values of one layer"
    quantized = {row.path.rsplit("/", 1)[1] for row in plan if row.policy is not None and "/0/attn" in row.path}
    assert quantized == {"in", "out"}


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

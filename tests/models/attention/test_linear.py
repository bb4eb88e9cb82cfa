"""The gated delta rule by chunks is its recurrence, and states of a KV cache go on where the tokens before ended."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kvcache import QuantizedCache, kv_policy
from fewbit.models import DecoderConfig, HybridCache, empty_cache, forward, fuse_weights, generate, prefill, stack_layers
from fewbit.models.attention.linear import gated_delta_rule
from tests.nets.random_decoder import LINEAR, MAMBA, SHORT_CONV, random_params, random_tokens

Case = tuple[dict[str, np.ndarray], np.ndarray]


def recurrence(q, k, v, decay, beta, memory) -> Case:
    """The outputs and the last state, token by token in float64."""
    state, out = memory, np.zeros(v.shape)
    for t in range(q.shape[2]):
        state = state * np.exp(decay[:, :, t])[..., None, None]
        error = (v[:, :, t] - np.einsum("bmnk,bmn->bmk", state, k[:, :, t])) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * error[:, :, None]
        out[:, :, t] = np.einsum("bmnk,bmn->bmk", state, q[:, :, t])
    return {"out": out, "memory": state}, state


def inputs(T: int, *, decays: str = "some") -> dict[str, np.ndarray]:
    """Random queries, keys of length 1, values, decays, and how far values are replaced."""
    draw = np.random.default_rng(T)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in draw.normal(size=(2, 2, 3, T, 8)))
    decay = {"some": -draw.exponential(size=(2, 3, T)), "none": np.zeros((2, 3, T)), "all": np.full((2, 3, T), -200.0)}[
        decays
    ]
    return {
        "q": q,
        "k": k,
        "v": draw.normal(size=(2, 3, T, 6)),
        "decay": decay,
        "beta": draw.uniform(size=(2, 3, T)),
        "memory": draw.normal(size=(2, 3, 8, 6)),
    }


# A float32 sum of 8 products, and a triangular system of at most 64 values that each have such an error: keys of length 1 and beta
# below 1 let them add up, at most. 64 * 8 * 6e-8 is 3e-5 of values near 1.
CLOSE = {"atol": 3e-5, "rtol": 0}


@pytest.mark.parametrize(
    ("T", "decays"), [(1, "some"), (63, "some"), (64, "some"), (150, "some"), (130, "none"), (130, "all")]
)
def test_chunks_are_the_recurrence(T: int, decays: str):
    given = inputs(T, decays=decays)
    out, memory = gated_delta_rule(**{name: jnp.asarray(x, jnp.float32) for name, x in given.items()})
    expected, state = recurrence(**given)
    np.testing.assert_allclose(out, expected["out"], **CLOSE)
    np.testing.assert_allclose(memory, state, **CLOSE)


@pytest.mark.slow
def test_gradients_are_finite_where_all_is_forgotten():
    given = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(70, decays="all").items()}
    found = jax.grad(lambda given: jnp.sum(gated_delta_rule(**given)[0] ** 2))(given)
    assert all(np.isfinite(one).all() for one in jax.tree.leaves(found))
    assert np.abs(found["v"]).max() > 0


def test_a_cache_has_keys_of_the_one_layer_and_states_of_the_others():
    cache = empty_cache(LINEAR, batch=2, max_length=14, dtype=jnp.bfloat16)
    assert isinstance(cache, HybridCache) and not isinstance(cache.kv, QuantizedCache)
    assert cache.kv.keys.shape == (1, 2, 2, 14, 8) and cache.max_length == 14
    assert len(cache.states) == 3
    assert {(state.inputs.shape, state.inputs.dtype) for state in cache.states} == {((2, 2, 44), jnp.dtype(jnp.bfloat16))}
    assert {(state.memory.shape, state.memory.dtype) for state in cache.states} == {((2, 4, 6, 5), jnp.dtype(jnp.float32))}
    assert cache.nbytes == 2 * 2 * 2 * 2 * 14 * 8 + 3 * 2 * (2 * 44 * 2 + 4 * 6 * 5 * 4)


@pytest.mark.slow
def test_a_quantized_cache_in_parts_gives_the_logits_of_the_whole():
    params, tokens, policy = random_params(LINEAR), random_tokens(LINEAR, 2, 13), kv_policy("int8")
    whole = np.asarray(jax.jit(forward, static_argnames=("config", "kv"))(params, tokens, LINEAR, kv=policy)[:, -1])
    cache = empty_cache(LINEAR, batch=2, max_length=14, kv=policy)
    _, cache = prefill(params, tokens[:, :6], cache, LINEAR)
    logits, _ = prefill(params, tokens[:, 6:], cache, LINEAR)
    assert np.std(logits - whole) < 1e-3 * np.std(whole)  # as in test_latent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name"), [(LINEAR, "qkv"), (MAMBA, "in"), (SHORT_CONV, "in")], ids=["linear", "mamba", "short conv"]
)
def test_fused_and_quantized_weights_generate_what_they_do_one_by_one(config: DecoderConfig, name: str):
    quantized = jax.tree.map(lambda a: fb.quantize(a, "int8") if a.ndim == 2 else a, random_params(config))
    fused = fuse_weights(quantized)
    assert "q+k+v" in fused["layers"][2]["attn"] and name in fused["layers"][0]["attn"]
    prompt = random_tokens(config, 2, 7)
    written = functools.partial(generate, config=config, max_new_tokens=9)
    expected = fb.transparent(written)(quantized, prompt).tokens
    np.testing.assert_array_equal(fb.transparent(written)(fused, prompt).tokens, expected)
    np.testing.assert_array_equal(fb.transparent(written)(stack_layers(fused), prompt).tokens, expected)


@pytest.mark.slow
def test_states_continue_in_the_dtype_of_the_model():
    config, tokens = dataclasses.replace(LINEAR, tied=True), random_tokens(LINEAR, 1, 6)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), random_params(LINEAR))
    cache = empty_cache(config, batch=1, max_length=8, dtype=jnp.bfloat16)
    logits, cache = prefill(params, tokens, cache, config, dtype=jnp.bfloat16)
    whole = forward(params, tokens, config, dtype=jnp.bfloat16)[:, -1]
    # bfloat16 rounds by 2**-9, and each of four layers some four times one after another: 16 * 2**-9.
    np.testing.assert_allclose(logits, whole, atol=2**-5 * np.abs(whole).max(), rtol=0)
    assert isinstance(cache, HybridCache) and int(cache.length) == 6


def test_no_triangular_solve_that_waits_for_another_one():
    """Two of jaxlib 0.10's at once, such as those of two models in one program, wait for each other's thread forever."""
    given = {name: jnp.asarray(x, jnp.float32) for name, x in inputs(70).items()}
    assert "triangular_solve" not in str(jax.make_jaxpr(lambda given: gated_delta_rule(**given))(given))


@pytest.mark.parametrize(
    ("config", "name", "weights"),
    [(LINEAR, "gated_delta_rule", {"qkv", "z", "out"}), (MAMBA, "state_space", {"in", "out"})],
    ids=["linear", "mamba"],
)
def test_rules_for_products_tell_its_products_by_name(config: DecoderConfig, name: str, weights: set[str]):
    plan = fb.plan(
        lambda params, tokens: forward(params, tokens, config),
        random_params(config),
        random_tokens(config, 1, 3),
        recipe="int8",
    )
    named = [row.name.partition("#")[0] for row in plan.products]
    assert named.count(name) == len(named) - 2, "all but the scores and the mean of values of one layer"
    quantized = {
        row.path.rsplit("/", 1)[1] for row in plan if row.policy is not None and row.path.startswith("layers/0/attn")
    }
    assert quantized == weights

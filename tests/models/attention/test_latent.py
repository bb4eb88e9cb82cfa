"""Latent attention caches one vector of each token, and computes from it what the heads' own keys and values give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kvcache import KVPolicy, kv_policy
from fewbit.models import Cache, empty_cache, forward, prefill, stack_experts, stack_layers
from tests.nets.random_decoder import LATENT, random_params, random_tokens

TOKENS = random_tokens(LATENT, 2, 13)
run = jax.jit(forward, static_argnames=("config", "kv"))


@functools.cache
def params():
    return stack_layers(stack_experts(random_params(LATENT)))


def in_two_parts(params, kv: KVPolicy | None = None) -> jax.Array:
    """The logits after the last token, its KV cache prefilled twice."""
    _, cache = prefill(params, TOKENS[:, :6], empty_cache(LATENT, batch=2, max_length=14, kv=kv), LATENT)
    logits, _ = prefill(params, TOKENS[:, 6:], cache, LATENT)
    return logits


def test_a_cache_has_the_latent_and_the_rotary_key_of_a_token():
    assert LATENT.latent is not None
    cache = empty_cache(LATENT, batch=2, max_length=14)
    assert isinstance(cache, Cache) and cache.values is None
    assert cache.keys.shape == (LATENT.layers, 2, 1, 14, LATENT.latent.rank + LATENT.rotary_dim)
    assert cache.nbytes == 4 * cache.keys.size


@pytest.mark.slow
def test_what_is_cached_gives_the_logits_of_the_heads():
    expected = np.asarray(run(params(), TOKENS, LATENT)[:, -1])
    np.testing.assert_allclose(in_two_parts(params()), expected, atol=2e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
def test_a_projection_in_two_parts_gives_the_logits_of_the_whole():
    latent, plain = LATENT.latent, LATENT.head_dim - LATENT.rotary_dim
    assert latent is not None
    split = dataclasses.replace(LATENT, latent=dataclasses.replace(latent, split=True))
    tree = random_params(LATENT)
    for layer in tree["layers"]:
        by_head = layer["attn"].pop("kv_b").reshape(LATENT.heads, -1, latent.rank)
        layer["attn"] |= {"k_b": by_head[:, :plain].swapaxes(1, 2), "v_b": by_head[:, plain:]}
    tree = stack_layers(stack_experts(tree))
    expected = np.asarray(run(params(), TOKENS, LATENT))
    tolerance = 2e-6 * np.abs(expected).max()
    np.testing.assert_allclose(run(tree, TOKENS, split), expected, atol=tolerance, rtol=0)
    cached, _ = prefill(tree, TOKENS, empty_cache(split, batch=2, max_length=14), split)
    np.testing.assert_allclose(cached, expected[:, -1], atol=tolerance, rtol=0)


@pytest.mark.slow
def test_a_quantized_cache_gives_the_logits_of_the_whole():
    policy = kv_policy("int8")
    whole = np.asarray(run(params(), TOKENS, LATENT, kv=policy)[:, -1])
    difference = np.std(in_two_parts(params(), policy) - whole)
    # As in test_quantized_cache: a code in thousands falls to its neighbour. The rounding itself is larger than that.
    assert difference < 1e-3 * np.std(whole)
    assert np.std(whole - run(params(), TOKENS, LATENT)[:, -1]) > 1e-3 * np.std(whole)


@pytest.mark.slow
def test_quantized_weights_compute_from_a_cache_what_their_decoded_arrays_do():
    quantized = jax.tree.map(lambda a: fb.quantize(a, "int8") if a.ndim == 2 else a, random_params(LATENT))
    floats = jax.tree.map(lambda a: fb.dequantize(a) if fb.is_qarray(a) else a, quantized, is_leaf=fb.is_qarray)
    read = functools.partial(prefill, config=LATENT)
    empty = functools.partial(empty_cache, LATENT, batch=2, max_length=14)
    expected, _ = read(stack_layers(stack_experts(floats)), TOKENS, empty())
    logits, _ = fb.transparent(read)(stack_layers(stack_experts(quantized)), TOKENS, empty())
    np.testing.assert_allclose(logits, expected, atol=2e-5 * float(jnp.abs(expected).max()), rtol=0)

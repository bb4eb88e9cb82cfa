"""Heads of two widths, and layers that share keys and values: caches, steps, and runs layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kvcache import QuantizedCache, kv_policy
from fewbit.models import Cache, DecoderConfig, HybridCache, empty_cache, forward, fuse_weights, prefill, stack_layers
from fewbit.models.decoder import first_stream, layer_output, output_logits
from tests.nets.random_decoder import SHARED_KEYS, SMALL, TWO_WIDTHS, random_params, random_tokens

ROUNDING = {"atol": 2e-5, "rtol": 0}  # as in test_decoder
run = jax.jit(forward, static_argnames=("config", "kv"))
step = jax.jit(layer_output, static_argnames="config")


def test_a_cache_has_arrays_of_each_width():
    cache = empty_cache(TWO_WIDTHS, batch=2, max_length=14, dtype=jnp.bfloat16)
    assert isinstance(cache, HybridCache) and isinstance(cache.kv, Cache) and isinstance(cache.full, Cache)
    assert (cache.kv.keys.shape, cache.full.keys.shape) == ((2, 2, 2, 14, 8), (1, 2, 3, 14, 12))
    assert cache.nbytes == 2 * 2 * (2 * 2 * 2 * 14 * 8 + 2 * 3 * 14 * 12)
    advanced = cache.advanced(3)
    assert advanced.full is not None and (int(advanced.length), int(advanced.full.length)) == (3, 3)


def test_layers_that_share_keys_take_no_room():
    cache = empty_cache(SHARED_KEYS, batch=1, max_length=9, kv=kv_policy("int8"))
    assert isinstance(cache, HybridCache) and isinstance(cache.full, QuantizedCache)
    assert (len(cache.kv.layers()[0]), len(cache.full.layers()[0])) == (2, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [pytest.param(TWO_WIDTHS, id="two widths", marks=pytest.mark.slow), pytest.param(SHARED_KEYS, id="shared keys")],
)
def test_a_quantized_cache_gives_what_quantized_keys_and_values_do(config: DecoderConfig):
    params, tokens, policy = random_params(config), random_tokens(config, 1, 8), kv_policy("int8")
    whole = run(params, tokens, config, kv=policy)
    params = stack_layers(params)
    logits, cache = prefill(params, tokens[:, :7], empty_cache(config, batch=1, max_length=8, kv=policy), config)
    np.testing.assert_allclose(logits, whole[:, 6], **ROUNDING)
    logits, _ = prefill(params, tokens[:, 7:], cache, config)
    np.testing.assert_allclose(logits, whole[:, 7], **ROUNDING)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [SHARED_KEYS, TWO_WIDTHS], ids=["shared keys", "two widths"])
def test_fused_weights_compute_what_they_do_one_by_one(config: DecoderConfig):
    quantized = jax.tree.map(lambda a: fb.quantize(a, "int8") if a.ndim == 2 else a, random_params(config))
    fused, tokens = fuse_weights(quantized), random_tokens(config, 1, 7)
    assert "q+k+v" in fused["layers"][0]["attn"], "a layer with keys of its own"
    assert "q" in fused["layers"][-1 if config is SHARED_KEYS else 1]["attn"], "one without keys, or without values"
    logits = jax.jit(fb.transparent(forward), static_argnums=2)
    expected = logits(quantized, tokens, config)
    np.testing.assert_allclose(logits(stack_layers(fused), tokens, config), expected, **ROUNDING)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("config", [SMALL, TWO_WIDTHS, SHARED_KEYS], ids=["small", "two widths", "shared keys"])
def test_layer_by_layer(config: DecoderConfig):
    """A stream has what later layers read in channels after the residual stream."""
    params, tokens = random_params(config), random_tokens(config, 2, 7)
    stream = first_stream({path: leaf for path, leaf in params.items() if path not in ("layers", "norm")}, tokens, config)
    extra = 5 * 10 + 2 * (2 * 8 + 2 * 12) if config is SHARED_KEYS else 0
    assert stream.shape == (2, 7, config.width + extra)
    for index, layer in enumerate(params["layers"]):
        stream = step(layer, stream, config, jnp.int32(index))
    np.testing.assert_allclose(output_logits(params, stream, config), run(params, tokens, config), **ROUNDING)

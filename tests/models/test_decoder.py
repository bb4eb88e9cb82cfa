"""The network computes its formulas, whole or token by token, stacked or not, with float or quantized leaves."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.kvcache import KVPolicy, kv_policy
from fewbit.models import DecoderConfig, Experts, decode_step, empty_cache, forward, prefill, stack_experts, stack_layers
from fewbit.models.attention.rope_scaling import Dynamic
from tests.nets.random_decoder import (
    BY_HEAD,
    BY_KEY_HEAD,
    CHUNKS,
    CONFIGS,
    CORRECTED,
    FEATURES,
    LATENT,
    LEARNED_POSITIONS,
    LINEAR,
    MAMBA,
    OTHERS,
    PARALLEL,
    SHARED_KEYS,
    SHORT_CONV,
    SINGLE_BLOCKS,
    SMALL,
    SUB_NORMS,
    TWO_WIDTHS,
    UNTIED,
    logits_float64,
    random_params,
    random_tokens,
)

# Logits are about 1 to 10 in size. A float32 forward of three layers carries an error of a few eps (6e-8) of the largest
# term of each of some 20 sums on its way: 20 * 10 * 6e-8 is 1.2e-5.
ROUNDING = {"atol": 2e-5, "rtol": 0}

run = jax.jit(forward, static_argnames=("config", "dtype"))
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


# One compilation for each shape, not for each matrix.
quantize = jax.jit(fb.quantize, static_argnames="scheme")
dequantize = jax.jit(fb.dequantize)


def quantized(params: dict[str, Any], scheme: str) -> dict[str, Any]:
    """Every matrix as a QArray."""
    return jax.tree.map(lambda a: quantize(a, scheme=scheme) if a.ndim == 2 else a, params)


def decoded(params: dict[str, Any]) -> dict[str, Any]:
    """Every QArray as the array that it stands for."""
    return jax.tree.map(lambda a: dequantize(a) if fb.is_qarray(a) else a, params, is_leaf=fb.is_qarray)


@every_config
def test_logits_are_those_of_the_formula_in_float64(config: DecoderConfig):
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    logits = run(params, tokens, config)
    assert logits.shape == (2, 13, config.vocab)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, logits_float64(params, tokens, config), **ROUNDING)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(FEATURES, id="features"),
        pytest.param(OTHERS, id="others"),
        pytest.param(SUB_NORMS, id="sub norms"),
        pytest.param(LATENT, id="latent", marks=pytest.mark.slow),
        pytest.param(LINEAR, id="linear"),
        pytest.param(BY_KEY_HEAD, id="linear by key head", marks=pytest.mark.slow),
        pytest.param(MAMBA, id="mamba"),
        pytest.param(SHORT_CONV, id="short conv"),
        pytest.param(TWO_WIDTHS, id="two widths"),
        pytest.param(SHARED_KEYS, id="shared keys"),
        pytest.param(LEARNED_POSITIONS, id="learned positions"),
        pytest.param(BY_HEAD, id="by head"),
        pytest.param(PARALLEL, id="parallel"),
        pytest.param(SINGLE_BLOCKS, id="single blocks"),
        pytest.param(CORRECTED, id="corrected"),
        pytest.param(CHUNKS, id="chunks"),
    ],
)
def test_every_feature_is_its_formula_in_float64(config: DecoderConfig):
    """Whole and unrolled, and token by token with the layers in a scan, where a window and a rotary table are traced."""
    params, tokens = random_params(config), random_tokens(config, 1, 9)
    expected = logits_float64(params, tokens, config)
    rounding = {"atol": 2e-6 * np.abs(expected).max(), "rtol": 0}
    np.testing.assert_allclose(run(params, tokens, config), expected, **rounding)
    stacked = stack_layers(stack_experts(params))
    logits, cache = prefill(stacked, tokens[:, :7], empty_cache(config, batch=1, max_length=9), config)
    np.testing.assert_allclose(logits, expected[:, 6], **rounding)
    for t in (7, 8):
        logits, cache = decode_step(stacked, tokens[:, t], cache, config)
        np.testing.assert_allclose(logits, expected[:, t], **rounding)


@every_config
def test_stacked_layers_compute_the_same(config: DecoderConfig):
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    stacked = stack_layers(params)
    assert len(stacked["layers"]) == 1
    np.testing.assert_allclose(run(stacked, tokens, config), run(params, tokens, config), **ROUNDING)


@pytest.mark.slow
@every_config
@pytest.mark.parametrize("is_stacked", [False, True], ids=["list", "stacked"])
def test_reading_token_by_token_gives_the_logits_of_the_whole(config: DecoderConfig, is_stacked: bool):
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    whole = run(params, tokens, config)
    params = stack_layers(params) if is_stacked else params
    logits, cache = prefill(params, tokens[:, :6], empty_cache(config, batch=2, max_length=13), config)
    np.testing.assert_allclose(logits, whole[:, 5], **ROUNDING)
    logits, cache = prefill(params, tokens[:, 6:9], cache, config)
    np.testing.assert_allclose(logits, whole[:, 8], **ROUNDING)
    for t in range(9, 13):
        logits, cache = decode_step(params, tokens[:, t], cache, config)
        np.testing.assert_allclose(logits, whole[:, t], **ROUNDING)
    assert int(cache.length) == 13


DYNAMIC = dataclasses.replace(SMALL, rope_scaling=Dynamic(2.0, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kv"),
    [
        pytest.param(SMALL, None, id="plain"),
        pytest.param(FEATURES, kv_policy("int8"), id="features, int8"),
        pytest.param(LATENT, None, id="latent"),
        pytest.param(LATENT, kv_policy("int8"), id="latent, int8"),
        pytest.param(LINEAR, None, id="linear"),
        pytest.param(LINEAR, kv_policy("int8"), id="linear, int8"),
        pytest.param(MAMBA, None, id="mamba"),
        pytest.param(SHORT_CONV, None, id="short conv"),
        pytest.param(LEARNED_POSITIONS, None, id="learned positions"),
        pytest.param(TWO_WIDTHS, kv_policy("int8"), id="two widths, int8"),
        pytest.param(SHARED_KEYS, kv_policy("int8"), id="shared keys, int8"),
        pytest.param(DYNAMIC, None, id="dynamic"),
        pytest.param(SMALL, kv_policy("int8"), id="plain, int8", marks=pytest.mark.long),
        pytest.param(FEATURES, None, id="features", marks=pytest.mark.long),
        pytest.param(DYNAMIC, kv_policy("int8"), id="dynamic, int8", marks=pytest.mark.long),
    ],
)
def test_padding_after_a_prompt_changes_nothing(config: DecoderConfig, kv: KVPolicy | None):
    params, tokens = random_params(config), random_tokens(config, 2, 12)
    exact, cache = prefill(params, tokens[:, :6], empty_cache(config, batch=2, max_length=16, kv=kv), config)
    padded = jnp.concatenate([tokens[:, :6], tokens[:, :4]], axis=1)
    empty = empty_cache(config, batch=2, max_length=16, kv=kv)
    logits, filled = prefill(params, padded, empty, config, length=jnp.int32(6))
    np.testing.assert_allclose(logits, exact, **ROUNDING)
    assert int(filled.length) == 6
    for t in range(6, 12):
        expected, cache = decode_step(params, tokens[:, t], cache, config)
        logits, filled = decode_step(params, tokens[:, t], filled, config)
        np.testing.assert_allclose(logits, expected, **ROUNDING)


def test_padding_beyond_the_cache_gives_nan():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 1, 5)
    _, cache = prefill(params, tokens, empty_cache(SMALL, batch=1, max_length=8), SMALL)
    logits, _ = prefill(params, tokens, cache, SMALL, length=jnp.int32(2))
    assert np.isnan(logits).all()


def test_a_full_cache_gives_nan():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 1, 5)
    logits, cache = prefill(params, tokens, empty_cache(SMALL, batch=1, max_length=6), SMALL)
    assert np.isfinite(logits).all()
    logits, cache = decode_step(params, tokens[:, 0], cache, SMALL)
    assert np.isfinite(logits).all()
    logits, _ = decode_step(params, tokens[:, 0], cache, SMALL)
    assert np.isnan(logits).all()


def test_later_tokens_do_not_change_earlier_logits():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 1, 12)
    changed = tokens.at[:, 7:].set((tokens[:, 7:] + 1) % SMALL.vocab)
    before, after = run(params, tokens, SMALL), run(params, changed, SMALL)
    assert np.array_equal(np.asarray(before[:, :7]), np.asarray(after[:, :7]))
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_rows_of_a_batch_are_apart():
    params, tokens = random_params(UNTIED), random_tokens(UNTIED, 3, 9)
    alone = run(params, tokens[1:2], UNTIED)
    np.testing.assert_allclose(run(params, tokens, UNTIED)[1:2], alone, **ROUNDING)


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 2, 13)
    exact, rough = run(params, tokens, SMALL), run(params, tokens, SMALL, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    error = float(jnp.std(exact - rough) / jnp.std(exact))
    # Each of some ten roundings to 8 bits on the way adds noise of about 2**-9 / sqrt(3) of the signal: 0.4 % in all.
    assert 1e-3 < error < 2e-2
    short, _ = prefill(
        params, tokens, empty_cache(SMALL, batch=2, max_length=13, dtype="bfloat16"), SMALL, dtype=jnp.bfloat16
    )
    assert float(jnp.std(short - rough[:, -1]) / jnp.std(exact)) < 2e-2


def test_float16_weights_compute_in_float32():
    params = jax.tree.map(lambda a: a.astype(jnp.float16), random_params(SMALL))
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    tokens = random_tokens(SMALL, 1, 8)
    assert np.array_equal(np.asarray(run(params, tokens, SMALL)), np.asarray(run(wide, tokens, SMALL)))


def test_a_token_that_is_not_in_the_vocabulary_gives_nan():
    params = random_params(SMALL)
    for leaves in (params, quantized(params, "int8")):
        for token in (SMALL.vocab, -1):
            logits = fb.transparent(run)(leaves, jnp.array([[1, 2, token]], jnp.int32), SMALL)
            assert np.isnan(logits[:, 2]).all() and np.isfinite(logits[:, :2]).all()


def test_no_tokens_are_refused():
    with pytest.raises(QuantError, match="tokens has no positions"):
        forward(random_params(SMALL), jnp.zeros((1, 0), jnp.int32), SMALL)


def test_a_cache_of_another_dtype_is_refused():
    with pytest.raises(QuantError, match="the cache is float32 and dtype is bfloat16"):
        prefill(
            random_params(SMALL),
            random_tokens(SMALL, 1, 3),
            empty_cache(SMALL, batch=1, max_length=4),
            SMALL,
            dtype="bfloat16",
        )


def test_a_separate_expert_that_no_token_chooses_adds_nothing_even_where_it_overflows():
    config = dataclasses.replace(SMALL, layers=1, experts=Experts(4, 1, 24))
    params, tokens = random_params(config), random_tokens(config, 1, 5)
    mlp = params["layers"][0]["mlp"]
    mlp["router"] = mlp["router"].at[2].set(0.0)  # its score is 0, and one of three others is above
    clean = run(params, tokens, config)
    mlp["experts"][2] = {**mlp["experts"][2], "down": jnp.full_like(mlp["experts"][2]["down"], jnp.inf)}
    assert np.array_equal(run(params, tokens, config), clean)


def test_segments_are_runs_of_alike_layers():
    config = dataclasses.replace(SMALL, layers=5)
    params = random_params(config)
    half = jax.tree.map(lambda a: a.astype(jnp.float16), params["layers"][2])
    mixed = {**params, "layers": [*params["layers"][:2], half, *params["layers"][3:]]}
    segments = stack_layers(mixed)["layers"]
    assert [s["attn"]["q"].shape[0] for s in segments] == [2, 1, 2]
    tokens = random_tokens(config, 1, 9)
    np.testing.assert_allclose(run(stack_layers(mixed), tokens, config), run(mixed, tokens, config), **ROUNDING)


@pytest.mark.slow
def test_quantized_layers_are_stacked_by_their_schemes():
    params = random_params(SMALL)
    layers = [quantized(layer, s) for layer, s in zip(params["layers"], ("int8", "nf4", "nf4"), strict=True)]
    segments = stack_layers({**params, "layers": layers})["layers"]
    assert [s["attn"]["q"].shape[0] for s in segments] == [1, 2]
    for i, layer in enumerate(layers[1:]):
        for name in ("q", "o"):
            held = dequantize(segments[1]["attn"][name][i])
            assert np.array_equal(held, dequantize(layer["attn"][name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "is_stacked"),
    [("int8", False), ("int8", True), ("nf4", True), pytest.param("nvfp4", True, marks=pytest.mark.slow)],
    ids=["int8-list", "int8-stacked", "nf4-stacked", "nvfp4-stacked"],
)
def test_quantized_leaves_compute_what_their_decoded_arrays_do(scheme: str, is_stacked: bool):
    config = dataclasses.replace(UNTIED, layers=2)
    params = quantized(random_params(config), scheme)
    tokens = random_tokens(config, 2, 13)
    expected = run(decoded(params), tokens, config)
    held = stack_layers(params) if is_stacked else params
    logits = jax.jit(fb.transparent(functools.partial(forward, config=config)))(held, tokens)
    np.testing.assert_allclose(logits, expected, **ROUNDING)


@pytest.mark.slow
def test_quantized_leaves_compute_token_by_token():
    params, tokens = stack_layers(quantized(random_params(SMALL), "int8")), random_tokens(SMALL, 2, 8)
    step = fb.transparent(functools.partial(prefill, config=SMALL))
    logits, cache = step(params, tokens[:, :7], empty_cache(SMALL, batch=2, max_length=8))
    logits, _ = step(params, tokens[:, 7:], cache)
    whole = fb.transparent(functools.partial(forward, config=SMALL))(params, tokens)
    np.testing.assert_allclose(logits, whole[:, -1], **ROUNDING)


@pytest.mark.slow
def test_refuses_what_does_not_fit():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 1, SMALL.context + 1)
    with pytest.raises(QuantError, match="tokens has 33 positions, more than the context of the model, 32"):
        forward(params, tokens, SMALL)
    with pytest.raises(QuantError, match=r"config\.tied is False, but params has no 'head'"):
        forward(params, tokens[:, :3], dataclasses.replace(SMALL, tied=False))
    with pytest.raises(QuantError, match=r"config\.tied is True, but params has 'head'"):
        forward(random_params(UNTIED), tokens[:, :3], dataclasses.replace(UNTIED, tied=True))
    with pytest.raises(QuantError, match="stacked already"):
        stack_layers(stack_layers(params))
    with pytest.raises(QuantError, match=r"max_length is 33, must be from 1 to the context of the model, 32"):
        empty_cache(SMALL, batch=1, max_length=33)
    with pytest.raises(QuantError, match="batch is 0"):
        empty_cache(SMALL, batch=0, max_length=3)

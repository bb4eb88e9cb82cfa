"""A rotated network is the same function with other weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.models import (
    DecoderConfig,
    Experts,
    forward,
    params_from_paths,
    paths_of_params,
    random_rotation,
    rotate_residual,
    rotated_weight,
    stack_layers,
)
from fewbit.models.rotate import mean_preserving_rotation
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
    PARALLEL,
    SHARED_KEYS,
    SHORT_CONV,
    SINGLE_BLOCKS,
    SMALL,
    SUB_NORMS,
    TWO_WIDTHS,
    UNTIED,
    random_params,
    random_tokens,
)
from tests.nets.random_decoder import OTHERS as INTERLEAVED

KEY = jax.random.key(0)
run = jax.jit(forward, static_argnums=2)


OTHER = dataclasses.replace(
    SMALL,
    layers=2,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    qk_norm="head",
    norm_offset=1.0,
    experts=Experts(3, 2, 12, layers=(1,), shared_hidden=10),
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS.values(),
        OTHER,
        LATENT,
        LINEAR,
        BY_KEY_HEAD,
        MAMBA,
        SHORT_CONV,
        dataclasses.replace(INTERLEAVED, norms="pre"),
        SUB_NORMS,
        dataclasses.replace(PARALLEL, norm_kind="rms"),
        PARALLEL,
        LEARNED_POSITIONS,
        BY_HEAD,
        SINGLE_BLOCKS,
        CORRECTED,
        CHUNKS,
    ],
    ids=[
        *CONFIGS,
        "other",
        "latent",
        "linear",
        "linear by key head",
        "mamba",
        "short conv",
        "interleaved experts",
        "sub norms",
        "parallel",
        "layer norms",
        "learned positions",
        "by head",
        "single blocks",
        "corrected",
        "chunks",
    ],
)
def test_logits_stay_what_they_are(config: DecoderConfig):
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    rotated, rotated_config = rotate_residual(params, config, key=KEY)
    assert rotated_config == dataclasses.replace(config, tied=False)
    # Every weight is rounded to float32 once more: the rounding of the forward itself, as in test_decoder.
    np.testing.assert_allclose(run(rotated, tokens, rotated_config), run(params, tokens, config), atol=4e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "config",
    [FEATURES, INTERLEAVED, TWO_WIDTHS, SHARED_KEYS],
    ids=["norms on both sides", "norms on outputs", "two widths", "shared keys"],
)
def test_logits_stay_with_norms_on_the_outputs_of_blocks(config: DecoderConfig):
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    rotated, rotated_config = rotate_residual(params, config, key=KEY)
    assert rotated_config == dataclasses.replace(config, tied=False, rotated_outputs=True)
    assert DecoderConfig.from_json(rotated_config.to_json()) == rotated_config
    np.testing.assert_allclose(run(rotated, tokens, rotated_config), run(params, tokens, config), atol=4e-5)
    before = paths_of_params(params, config)
    for path, array in paths_of_params(rotated, rotated_config).items():
        name = path.rsplit("/", 1)[-1]
        if name == "post_norm":
            gain = before[path] + config.norm_offset
            np.testing.assert_allclose(np.abs(array + config.norm_offset), np.abs(gain), rtol=1e-6)
        elif name.removesuffix("_bias") in ("o", "down"):
            np.testing.assert_array_equal(array, before[path])
    with pytest.raises(QuantError, match="the residual stream is rotated already"):
        rotate_residual(rotated, rotated_config, key=KEY)


@pytest.mark.parametrize("width", [1, 2, 24])
def test_the_mean_is_preserved(width: int):
    q = mean_preserving_rotation(width, key=KEY)
    np.testing.assert_allclose(q.T @ q, np.eye(width), atol=1e-14)
    np.testing.assert_allclose([q.sum(0), q.sum(1)], np.ones((2, width)), atol=1e-14)


def test_a_bias_after_a_gain_of_zero_is_refused():
    params = random_params(BY_HEAD)
    params["layers"][1]["mlp"]["norm"] = jnp.full(BY_HEAD.width, -BY_HEAD.norm_offset)
    with pytest.raises(QuantError, match="layers/1/mlp/norm has a gain of zero, by which the bias after it"):
        rotate_residual(params, BY_HEAD, key=KEY)


ROTATED = {
    **CONFIGS,
    "other": OTHER,
    "latent": LATENT,
    "linear": LINEAR,
    "mamba": MAMBA,
    "short conv": SHORT_CONV,
    "interleaved experts": INTERLEAVED,
    "sub norms": SUB_NORMS,
}


# Both products in every network; one without the other in three.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "products"),
    [
        *((name, ("o", "down")) for name in ROTATED),
        *((name, (one,)) for name in ("half-tied", "linear", "interleaved experts") for one in ("o", "down")),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_rotated_inputs_of_rotated_weights(name: str, products):
    config = ROTATED[name]
    params, tokens = random_params(config), random_tokens(config, 2, 13)
    turning = dataclasses.replace(config, rotated_inputs=products)
    before = paths_of_params(params, config)
    after = {path: rotated_weight(path, jnp.asarray(array), turning) for path, array in before.items()}
    assert {path for path in after if not np.array_equal(after[path], before[path])} == {
        path for path in before if path.rsplit("/", 1)[-1].replace("out", "o") in products
    }
    found = run(params_from_paths(after, turning), tokens, turning)
    np.testing.assert_allclose(found, run(params, tokens, config), atol=4e-5)
    assert not np.allclose(run(params, tokens, turning), found, atol=1e-3)
    assert DecoderConfig.from_json(turning.to_json()) == turning


def test_weights_move_and_gains_become_one():
    params = random_params(SMALL)
    rotated, config = rotate_residual(params, SMALL, key=KEY)
    before = paths_of_params(params, SMALL)
    for path, array in paths_of_params(rotated, config).items():
        if path.endswith("norm"):
            assert (array == 1).all(), path
        elif path != "head" and not path.endswith("attn/v"):
            assert not np.allclose(array, before[path], atol=0.01), path
    # What is written to the stream turns alone, so its length stays; what is read has its gain folded in.
    turned = np.linalg.norm(rotated["layers"][1]["mlp"]["down"], axis=0)
    np.testing.assert_allclose(turned, np.linalg.norm(params["layers"][1]["mlp"]["down"], axis=0), rtol=1e-6)


def test_a_tied_head_stays_tied_without_a_last_gain():
    params = {**random_params(SMALL), "norm": jnp.ones(SMALL.width)}
    rotated, config = rotate_residual(params, SMALL, key=KEY)
    assert config == SMALL
    assert "head" not in rotated
    tokens = random_tokens(SMALL, 1, 9)
    np.testing.assert_allclose(run(rotated, tokens, config), run(params, tokens, SMALL), atol=4e-5)


def test_rotations_are_orthogonal_and_follow_the_key():
    q = random_rotation(96, key=KEY)
    assert np.abs(q @ q.T - np.eye(96)).max() < 1e-14 * 96
    assert np.array_equal(q, random_rotation(96, key=KEY))
    assert not np.allclose(q, random_rotation(96, key=jax.random.key(1)))
    # Uniform over all rotations: elements of mean 0 and variance 1/n, so the trace has mean 0 and variance 1.
    traces = [np.trace(random_rotation(16, key=jax.random.key(i))) for i in range(64)]
    assert abs(np.mean(traces)) < 5 / 8
    assert 0.4 < np.var(traces) < 1.9


def test_refuses():
    params = random_params(UNTIED)
    with pytest.raises(QuantError, match=r"needs params\['layers'\] to be a list of layers; rotate before stack_layers"):
        rotate_residual(stack_layers(params), UNTIED, key=KEY)
    with pytest.raises(QuantError, match=r"embed is QArray .*; rotate the float parameters, then quantize them"):
        rotate_residual({**params, "embed": fb.quantize(params["embed"], "int8")}, UNTIED, key=KEY)
    with pytest.raises(QuantError, match="norm is ArrayImpl of int32"):
        rotate_residual({**params, "norm": jnp.ones(UNTIED.width, jnp.int32)}, UNTIED, key=KEY)

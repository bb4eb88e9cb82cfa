"""Both layouts of rotary positions turn the same pairs by the same angles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.models import DecoderConfig, forward
from fewbit.models.attention.rope import apply_rotary, rotary_tables
from tests.nets.random_decoder import SMALL, random_params, random_tokens

HEAD = DecoderConfig(vocab=8, layers=1, width=8, heads=1, kv_heads=1, head_dim=64, hidden=8, context=8192)
# Row i of a head in the "half" layout is row `TO_INTERLEAVED[i]` of it in the interleaved one.
TO_INTERLEAVED = np.arange(64).reshape(32, 2).T.ravel()


def heads(seed: int) -> jnp.ndarray:
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=(2, 3, 16, 64))))


def test_layouts_differ_by_the_permutation_of_rows_exactly():
    x, (cos, sin) = heads(0), rotary_tables(HEAD, 16)
    interleaved = apply_rotary(x, cos, sin, "interleaved")
    half = apply_rotary(x[..., TO_INTERLEAVED], cos, sin, "half")
    assert np.array_equal(np.asarray(interleaved)[..., TO_INTERLEAVED], np.asarray(half))


@pytest.mark.slow
def test_layouts_make_the_same_network_when_the_rows_are_permuted():
    params, tokens = random_params(SMALL), random_tokens(SMALL, 2, 20)
    rows = np.arange(SMALL.head_dim).reshape(-1, 2).T.ravel()

    def permuted(weight: jnp.ndarray) -> jnp.ndarray:
        return weight.reshape(-1, SMALL.head_dim, SMALL.width)[:, np.argsort(rows)].reshape(weight.shape)

    layers = [
        {**layer, "attn": {**layer["attn"], "q": permuted(layer["attn"]["q"]), "k": permuted(layer["attn"]["k"])}}
        for layer in params["layers"]
    ]
    interleaved = forward({**params, "layers": layers}, tokens, dataclasses.replace(SMALL, rope="interleaved"))
    # The scores sum the same products in another order: a few eps (6e-8) of logits of size 1 to 10.
    np.testing.assert_allclose(interleaved, forward(params, tokens, SMALL), atol=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_lengths_stay_and_products_depend_on_the_distance_alone(layout: str):
    x, y = heads(1), heads(2)
    cos, sin = rotary_tables(HEAD, 8192)
    near = [apply_rotary(a, cos[i : i + 16], sin[i : i + 16], layout) for a, i in ((x, 5), (y, 0))]
    far = [apply_rotary(a, cos[i : i + 16], sin[i : i + 16], layout) for a, i in ((x, 8005), (y, 8000))]
    # Angles are rounded from float64, so position 8000 is as exact as position 0: sums of 64 products of size 1.
    products = [np.sum(np.asarray(a, np.float64) * np.asarray(b, np.float64), axis=-1) for a, b in (near, far)]
    np.testing.assert_allclose(products[0], products[1], atol=64 * 6e-8 * 4)
    np.testing.assert_allclose(np.linalg.norm(near[0], axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_position_zero_does_not_turn():
    x, (cos, sin) = heads(3)[:, :, :1], rotary_tables(HEAD, 1)
    for layout in ("interleaved", "half"):
        assert np.array_equal(np.asarray(apply_rotary(x, cos, sin, layout)), np.asarray(x))


def test_dtype_stays():
    cos, sin = rotary_tables(HEAD, 16)
    assert apply_rotary(heads(0).astype(jnp.bfloat16), cos, sin, "half").dtype == jnp.bfloat16

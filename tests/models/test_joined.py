"""Joined matrices hold the codes of their parts, and the network computes the same with them."""

import functools

import jax
import numpy as np
import pytest

import fewbit as fb
from fewbit.models import forward, fuse_weights, stack_layers
from tests.nets.random_decoder import SMALL, random_params, random_tokens

quantize = jax.jit(fb.quantize, static_argnames="scheme")
dequantize = jax.jit(fb.dequantize)


def quantized(schemes: dict[str, str | fb.Scheme]):
    """The layers with each named matrix in a scheme of its own."""

    def of(path, leaf):
        name = path[-1].key
        return quantize(leaf, scheme=schemes[name]) if name in schemes else leaf

    return jax.tree_util.tree_map_with_path(of, random_params(SMALL))


ALIKE = {name: fb.scheme("q4_1") for name in ("q", "k", "v", "gate", "up")}


@pytest.mark.slow
def test_joined_matrices_compute_what_their_parts_do():
    params, tokens = quantized(ALIKE), random_tokens(SMALL, 2, 8)
    joined = fuse_weights(params)
    layer, held = joined["layers"][1], params["layers"][1]
    assert set(layer["attn"]) == {"norm", "q+k+v", "o"} and set(layer["mlp"]) == {"norm", "gate+up", "down"}
    for part, names in (("attn", "qkv"), ("mlp", ("gate", "up"))):
        parts = [dequantize(held[part][name]) for name in names]
        assert np.array_equal(dequantize(layer[part]["+".join(names)]), np.concatenate(parts))
    run = jax.jit(fb.transparent(functools.partial(forward, config=SMALL)))
    # As in test_llama: what the rounding of float32 leaves of three layers.
    np.testing.assert_allclose(run(stack_layers(joined), tokens), run(params, tokens), atol=2e-5, rtol=0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "schemes",
    [
        {},
        ALIKE | {"v": "int8", "up": "int8"},
        dict.fromkeys(ALIKE, fb.scheme("int8").along(0, 2)),
        dict.fromkeys(ALIKE, fb.scheme("nf4_dq")),
    ],
    ids=["floating", "unlike", "one scale for many rows", "scales that are quantized"],
)
def test_other_matrices_stay_as_they_are(schemes):
    params = quantized(schemes)
    joined = fuse_weights(params)
    assert jax.tree.structure(joined) == jax.tree.structure(params)

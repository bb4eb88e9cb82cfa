"""Quantized arrays made ready to be cut into shards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.qarray import QArray
from fewbit.ops.interpret.evaluator import NoRuleError
from fewbit.ops.interpret.rules.sharding import sharded_ready

X = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)


def shards(q: QArray, axis: int, parts: int) -> list[QArray]:
    """The parts of an array whose leaves are cut alike; leaves of length 1 go to every part."""

    def part(leaf: jax.Array, i: int) -> jax.Array:
        if leaf.shape[axis] == 1:
            return leaf
        return jnp.split(leaf, parts, axis)[i]

    return [jax.tree.map(lambda leaf: part(leaf, i), q) for i in range(parts)]


@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "nvfp4", "affine4", "nf4_dq"])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_the_parts(scheme, axis):
    q = fb.quantize(X, scheme)
    ready = sharded_ready(q, jax.P(*[None] * axis, "x"), {"x": 4})
    assert ready.tiles[axis] <= X.shape[axis] // 4, "no tile is longer than a shard"
    for shard, expected in zip(shards(ready, axis, 4), jnp.split(fb.dequantize(q), 4, axis), strict=True):
        np.testing.assert_array_equal(fb.dequantize(shard), expected)


def test_a_tile_or_a_byte_of_two_shards_is_refused():
    with pytest.raises(NoRuleError, match="an axis of 256 with tiles of 32 cannot be cut in 16"):
        sharded_ready(fb.quantize(X, "int4_g32"), jax.P(None, "x"), {"x": 16})
    with pytest.raises(NoRuleError, match="codes share bytes in runs of 2; 256 shards would cut one"):
        sharded_ready(fb.quantize(X, "int4"), jax.P(None, "x"), {"x": 256})

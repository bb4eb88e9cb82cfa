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


def shard(q: QArray, axis: int, parts: int, i: int) -> QArray:
    """One part of an array whose leaves are cut alike; leaves of length 1 go to every part."""

    def part(leaf: jax.Array) -> jax.Array:
        if leaf.shape[axis] == 1:
            return leaf
        return jnp.split(leaf, parts, axis)[i]

    return jax.tree.map(part, q)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("scheme", ["int8", "int4_g32", "nvfp4", "affine4", "nf4_dq"])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_the_parts(scheme, axis):
    q = fb.quantize(X, scheme)
    ready = sharded_ready(q, jax.P(*[None] * axis, "x"), {"x": 4})
    assert ready.tiles[axis] <= X.shape[axis] // 4, "no tile is longer than a shard"
    for i, expected in enumerate(jnp.split(fb.dequantize(q), 4, axis)):
        np.testing.assert_array_equal(fb.dequantize(shard(ready, axis, 4, i)), expected)


def test_a_tile_or_a_byte_of_two_shards_is_refused():
    with pytest.raises(NoRuleError, match="an axis of 256 with tiles of 32 cannot be cut in 16"):
        sharded_ready(fb.quantize(X, "int4_g32"), jax.P(None, "x"), {"x": 16})
    with pytest.raises(NoRuleError, match="codes share bytes in runs of 2; 256 shards would cut one"):
        sharded_ready(fb.quantize(X, "int4"), jax.P(None, "x"), {"x": 256})


@pytest.mark.parametrize("axis", [0, 1])
def test_shard_map_returns_an_array_that_is_cut_on_two_axes(axis):
    mesh, spec = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4]), jax.P("a", "b")
    q = fb.quantize(X, "int8", axis=axis)
    there = fb.transparent(jax.shard_map(lambda w: w, mesh=mesh, in_specs=spec, out_specs=spec))(
        q.with_sharding((mesh, spec))
    )
    assert there.scale.shape[axis] == 2, "a scale for each shard"
    np.testing.assert_array_equal(fb.dequantize(there), fb.dequantize(q))

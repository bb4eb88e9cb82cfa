"""Attention in plain JAX, where the C++ kernel's tests do not compare with it."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.attention import Block, attention
from fewbit.kvcache import kv_policy
from tests.kvcache.formula import draws


@pytest.mark.parametrize("is_quantized", [False, True], ids=["floats", "int8"])
@pytest.mark.parametrize(("seen", "first"), [(6, None), (7, None), (99, None), (6, -1), (99, -5)])
def test_positions_out_of_bounds_count_as_the_nearest(seen, first, is_quantized):
    keys, values = (draws(1, 1, 6, 5, seed=seed) for seed in (1, 2))
    if is_quantized:
        keys, values = (fb.quantize(x, kv_policy("int8").keys) for x in (keys, values))
    q = draws(1, 2, 2, 5, seed=3)

    def attended(seen, first):
        if first is not None:
            first = jnp.array([first, 2], jnp.int32)
        return attention(q, [Block(keys, values, jnp.array([4, seen], jnp.int32), first=first)], backend="reference")

    within = attended(6, None if first is None else 0)
    assert np.isfinite(within).all()
    np.testing.assert_array_equal(attended(seen, first), within)

"""Quantized arrays and caches among the arguments and results of exported programs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, export, kvcache
from fewbit.models.cache import Cache, empty_cache
from tests.nets.random_decoder import LINEAR, MAMBA, SHARED_KEYS, SHORT_CONV

pytest.importorskip("flatbuffers")


def exported(fn, *args):
    return export.deserialize(export.export(jax.jit(fn))(*args).serialize())


def test_the_policy_of_a_quantized_array_is_kept():
    policy = fb.Policy("int8", "int8")
    q = dataclasses.replace(fb.quantize(jnp.ones((64, 128)), policy.weight), policy=policy)
    assert exported(lambda q: q, q).call(q).policy == policy
    other = dataclasses.replace(q, policy="mine")
    with pytest.raises(QuantError, match="a policy of str cannot be serialized"):
        export.export(jax.jit(lambda q: q))(other).serialize()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("policy", [None, kvcache.kv_policy("int8", "int4", per="token", sees_raw=True)])
def test_a_cache_is_an_argument_and_a_result(policy):
    sizes = {"layers": 1, "batch": 1, "heads": 2, "head_dim": 8, "max_length": 4}
    if policy is None:
        cache = Cache(jnp.zeros((1, 1, 2, 4, 8)), jnp.zeros((1, 1, 2, 4, 8)), jnp.int32(0))
    else:
        cache = kvcache.empty_quantized_cache(policy, **sizes)
    new = jnp.arange(16.0).reshape(1, 2, 1, 8)

    def step(cache, keys, values):
        return cache.written(0, keys, values).advanced(1)

    result, expected = exported(step, cache, new, new).call(cache, new, new), step(cache, new, new)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "config", [LINEAR, MAMBA, SHORT_CONV, SHARED_KEYS], ids=["linear", "mamba", "short conv", "two widths"]
)
def test_so_is_one_of_layers_of_different_kinds(config):
    cache = empty_cache(config, batch=1, max_length=4, kv=kvcache.kv_policy("int8"))
    result = exported(lambda cache: cache.advanced(2), cache).call(cache)
    assert jax.tree.structure(result) == jax.tree.structure(cache) and int(result.length) == 2

"""The network over a cache in few bits: what a whole sequence with rounded keys and values gives, and near the float one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.kvcache import KVPolicy, QuantizedCache, kv_policy
from fewbit.models import decode_step, empty_cache, forward, generate, prefill, stack_layers
from tests.nets.random_decoder import SMALL, random_params, random_tokens

PARAMS = stack_layers(random_params(SMALL))
TOKENS = random_tokens(SMALL, 2, 13)
INTEGERS = kv_policy("int8", int8_queries=True)
POLICIES = {
    "int8": kv_policy("int8"),
    "int4-token": kv_policy("int4", per="token", scale="bfloat16"),
    "int8 queries": INTEGERS,
}
run = jax.jit(forward, static_argnames=("config", "dtype", "kv"))


def relative_error(got: jax.Array, expected: jax.Array) -> float:
    """The deviation of the difference over that of the logits."""
    return float(jnp.std(got - expected) / jnp.std(expected))


@functools.cache
def float_logits() -> jax.Array:
    return run(PARAMS, TOKENS, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_reading_in_parts_gives_the_logits_of_the_whole(policy: KVPolicy):
    whole = run(PARAMS, TOKENS, SMALL, kv=policy)
    cache = empty_cache(SMALL, batch=2, max_length=14, kv=policy)
    assert isinstance(cache, QuantizedCache)
    logits, cache = prefill(PARAMS, TOKENS[:, :6], cache, SMALL)
    got = [logits]
    for t in range(6, 13):
        logits, cache = decode_step(PARAMS, TOKENS[:, t], cache, SMALL)
        got.append(logits)
    assert int(cache.length) == 13
    # The sums of the layers before run over other shapes and round otherwise (1e-6), which turns one code in thousands
    # over to its neighbour: a step of 2 / 15 (int4) of one coordinate of one token.
    assert relative_error(jnp.stack(got, axis=1), whole[:, 5:]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "low", "high"), [("int8", 1e-3, 0.02), ("fp8", 5e-3, 0.08), ("int4", 0.02, 0.3)])
def test_the_error_is_that_of_the_bits(name: str, low: float, high: float):
    # A rounding to n steps of a Gaussian of 8 coordinates errs by about 1 / (sqrt(12) n / 3), n = 127, 16 and 7: 0.7 %,
    # 5 % and 12 %; a mixture of several tokens averages it, three layers add theirs.
    assert low < relative_error(run(PARAMS, TOKENS, SMALL, kv=kv_policy(name)), float_logits()) < high


@pytest.mark.slow
def test_int8_queries_cost_no_more_than_the_cache_itself():
    """Queries and softmax weights have the steps of the keys and values. A mixed block of raw tokens stays float."""
    cached, integers = (run(PARAMS, TOKENS, SMALL, kv=kv_policy("int8", int8_queries=flag)) for flag in (False, True))
    assert 1e-4 < relative_error(integers, cached) < 0.02
    raw = kv_policy("int8", sees_raw=True, int8_queries=True)
    logits, _ = prefill(PARAMS, TOKENS[:, :6], empty_cache(SMALL, batch=2, max_length=14, kv=raw), SMALL)
    assert relative_error(logits, float_logits()[:, 5]) < 0.02


@pytest.mark.slow
def test_raw_tokens_of_one_call_see_each_other_as_floats():
    raw = kv_policy("int4", sees_raw=True)
    logits, cache = prefill(PARAMS, TOKENS[:, :6], empty_cache(SMALL, batch=2, max_length=14, kv=raw), SMALL)
    assert relative_error(logits, float_logits()[:, 5]) < 1e-5
    later, _ = prefill(PARAMS, TOKENS[:, 6:], cache, SMALL)
    assert relative_error(later, float_logits()[:, -1]) > 1e-3


@pytest.mark.slow
def test_a_full_cache_gives_nan():
    logits, cache = prefill(PARAMS, TOKENS[:, :6], empty_cache(SMALL, batch=2, max_length=6, kv=kv_policy("int8")), SMALL)
    assert np.isfinite(logits).all()
    logits, _ = decode_step(PARAMS, TOKENS[:, 6], cache, SMALL)
    assert np.isnan(logits).all()


@pytest.mark.parametrize("kv", [None, kv_policy("int8")], ids=["float", "int8"])
def test_more_tokens_than_the_whole_room_are_refused(kv: KVPolicy | None):
    with pytest.raises(QuantError, match="tokens has 13 positions, more than the max length of the cache, 12"):
        prefill(PARAMS, TOKENS, empty_cache(SMALL, batch=2, max_length=12, kv=kv), SMALL)


@pytest.mark.slow
def test_greedy_generation_begins_as_with_a_float_cache():
    write = functools.partial(generate, PARAMS, TOKENS[:, :5], SMALL, max_new_tokens=8)
    plain, rounded = write().rows(), write(kv=kv_policy("int8")).rows()
    assert [row[:3] for row in rounded] == [row[:3] for row in plain]


@pytest.mark.slow
def test_coarse_keys_and_values_write_something_else():
    write = functools.partial(generate, PARAMS, TOKENS[:, :5], SMALL, max_new_tokens=8)
    assert write(kv=kv_policy("ternary")).rows() != write().rows()


@pytest.mark.slow
def test_a_cache_goes_through_transparent_beside_quantized_weights():
    config = dataclasses.replace(SMALL, layers=1)
    quantize = jax.jit(lambda tree: jax.tree.map(lambda a: fb.quantize(a, "int8") if a.ndim == 2 else a, tree))
    params = quantize(random_params(config))
    plain = jax.jit(
        lambda tree: jax.tree.map(lambda a: fb.dequantize(a) if fb.is_qarray(a) else a, tree, is_leaf=fb.is_qarray)
    )(params)
    read = functools.partial(prefill, config=config)
    empty = functools.partial(empty_cache, config, batch=2, max_length=13, kv=kv_policy("int8"))
    logits, cache = fb.transparent(read)(stack_layers(params), TOKENS, empty())
    expected, other = read(stack_layers(plain), TOKENS, empty())
    assert relative_error(logits, expected) < 1e-3
    assert isinstance(cache, QuantizedCache)
    assert int(cache.length) == int(other.length) == 13
    assert np.mean(np.asarray(cache.key_codes) != np.asarray(other.key_codes)) < 1e-2


@pytest.mark.slow
def test_bfloat16_computes_near_float32():
    policy = kv_policy("int8", scale="bfloat16")
    rough = run(PARAMS, TOKENS, SMALL, kv=policy, dtype=jnp.bfloat16)
    assert relative_error(rough, run(PARAMS, TOKENS, SMALL, kv=policy)) < 2e-2  # as without, in test_llama.py


def test_a_policy_that_would_do_nothing_is_refused():
    with pytest.raises(QuantError, match="sees_raw attends to unquantized keys and values"):
        forward(PARAMS, TOKENS, SMALL, kv=kv_policy("int8", sees_raw=True))

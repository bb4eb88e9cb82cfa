"""Attention over codes is attention over the numbers they stand for, and multiplies no cache by its scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from fewbit.errors import QuantError
from fewbit.kernels.attention import window_start
from fewbit.kvcache import Block, QuantizedCache, attention, empty_quantized_cache, kv_policy, seen_positions
from tests.kvcache.formula import by_formula, decoded, draws

B, K, G, S = 2, 2, 3, 11


def filled(policy, count: int, h: int, size: float = 1.0) -> QuantizedCache:
    cache = empty_quantized_cache(policy, layers=1, batch=B, heads=K, head_dim=h, max_length=S)
    return cache.written(0, draws(B, K, count, h, seed=1), draws(B, K, count, h, seed=2, size=size)).advanced(count)


attend = jax.jit(lambda q, cache, T: attention(q, cache.blocks(0, *([draws(B, K, T, q.shape[-1])] * 2))), static_argnums=2)


@pytest.mark.parametrize(
    ("name", "per", "scale", "h"),
    [
        ("int8", "head", "float32", 7),
        ("int8", "token", "bfloat16", 16),
        ("int4", "head", "bfloat16", 16),
        ("int4", "token", "float32", 7),
        ("fp8", "token", "float16", 16),
        ("nf4", "head", "float32", 7),
    ],
)
@pytest.mark.slow
def test_it_is_the_formula_over_the_decoded_cache(name: str, per: str, scale: str, h: int):
    cache = filled(kv_policy(name, per=per, scale=scale), 6, h)
    q = draws(B, K * G, 3, h, seed=3)
    blocks = [Block(*cache.layer(0), seen_positions(6, 3))]
    expected, bound = by_formula(q, blocks)
    got = attend(q, cache, 3)
    assert got.shape == q.shape
    assert np.abs(np.asarray(got, np.float64) - expected).max() < bound


def test_floating_keys_and_values_are_taken_as_they_are():
    q, k, v = draws(B, K * G, 4, 8), draws(B, K, 4, 8, seed=1), draws(B, K, 4, 8, seed=2)
    block = Block(k, v, seen_positions(0, 4))
    expected, bound = by_formula(q, [block])
    assert np.abs(np.asarray(attention(q, [block]), np.float64) - expected).max() < bound


def test_windows_soft_caps_and_sinks():
    q, k, v = draws(B, K * G, 3, 8), draws(B, K, S, 8, seed=1), draws(B, K, S, 8, seed=2)
    seen, sinks = seen_positions(6, 3), draws(K * G, seed=3)
    for settings in ({}, {"soft_cap": 0.5}, {"sinks": sinks}, {"sinks": sinks, "soft_cap": 0.5}):
        block = Block(k, v, seen, first=window_start(seen, 4))
        expected, bound = by_formula(q, [block], **settings)
        assert np.abs(np.asarray(attention(q, [block], **settings), np.float64) - expected).max() < bound


@pytest.mark.usefixtures("unchecked")
def test_windows_and_sinks_of_another_length_are_refused():
    q, k, seen = draws(B, K * G, 3, 8), draws(B, K, S, 8, seed=1), seen_positions(6, 3)
    with pytest.raises(QuantError, match=r"sinks has shape \(3,\) and must have a number for each of 6 heads"):
        attention(q, [Block(k, k, seen)], sinks=draws(3))
    with pytest.raises(QuantError, match=r"first has shape \(2,\) and must have a number for each of 3 tokens"):
        attention(q, [Block(k, k, seen, first=seen[:2])])


@pytest.mark.parametrize("tokens", [1, 3])
def test_positions_before_the_window_add_nothing_even_where_they_are_odd(tokens: int):
    q, k, v = draws(B, K * G, tokens, 8), draws(B, K, S, 8, seed=1), draws(B, K, S, 8, seed=2)
    seen = seen_positions(6, tokens)  # the windows are positions 3-6, 4-7, 5-8
    block = Block(k, v.at[:, :, 2, 1].set(jnp.nan).at[:, :, 4, 5].set(jnp.inf), seen, first=window_start(seen, 4))
    got = np.asarray(attention(q, [block]))
    inf = np.zeros(got.shape, bool)
    inf[:, :, : min(tokens, 2), 5] = True  # position 4 is in the first two windows
    assert np.array_equal(np.isposinf(got), inf)
    expected, bound = by_formula(q, [Block(k, v, seen, first=block.first)])
    assert np.abs(np.where(inf, 0, got - expected)).max() < bound


@pytest.mark.parametrize("sees_raw", [False, True])
def test_chunks_over_a_quantized_cache(sees_raw: bool):
    """Positions 6 and 7 are in the chunk from 4 on, position 8 begins another."""
    cache = filled(kv_policy("int8", sees_raw=sees_raw), 6, 8)
    k, v = draws(B, K, 3, 8, seed=5), draws(B, K, 3, 8, seed=6)
    blocks = cache.written(0, k, v).blocks(0, k, v, 4, is_chunk=True)
    assert [b.first.tolist() for b in blocks] == ([[4, 4, 8], [0, 0, 2]] if sees_raw else [[4, 4, 8]])


@pytest.mark.parametrize("sees_raw", [False, True])
def test_a_window_over_a_quantized_cache(sees_raw: bool):
    cache = filled(kv_policy("int8", sees_raw=sees_raw), 6, 8)
    k, v, q = draws(B, K, 3, 8, seed=5), draws(B, K, 3, 8, seed=6), draws(B, K * G, 3, 8, seed=3)
    blocks = cache.written(0, k, v).blocks(0, k, v, 4)
    assert [b.first.tolist() for b in blocks] == ([[3, 4, 5], [0, 0, 0]] if sees_raw else [[3, 4, 5]])
    expected, bound = by_formula(q, blocks)
    assert np.abs(np.asarray(attention(q, blocks), np.float64) - expected).max() < bound


@pytest.mark.slow
def test_blocks_share_one_softmax():
    cache = filled(kv_policy("int4", sees_raw=True), 6, 8)
    k, v, q = draws(B, K, 3, 8, seed=5), draws(B, K, 3, 8, seed=6), draws(B, K * G, 3, 8, seed=3)
    blocks = cache.written(0, k, v).blocks(0, k, v)
    assert [b.seen.tolist() for b in blocks] == [[6, 6, 6], [1, 2, 3]]
    assert blocks[1].keys is k
    expected, bound = by_formula(q, blocks)
    assert np.abs(np.asarray(attention(q, blocks), np.float64) - expected).max() < bound


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_values_keep_their_precision_in_narrow_dtypes(dtype):
    # Weights of 1/9 times scales of 1e-5 / 127 would be subnormal in float16, or zero.
    cache = filled(kv_policy("int8"), 6, 16, size=1e-5)
    q = draws(B, K * G, 3, 16, seed=3).astype(dtype)
    blocks = [Block(*cache.layer(0), seen_positions(6, 3))]
    expected, _ = by_formula(q.astype(jnp.float32), blocks)
    got = attention(q.astype(dtype), blocks)
    assert got.dtype == dtype
    # Each weight is rounded once to the dtype, the result once more; float16's result is subnormal, a multiple of 2**-24.
    roundings = float(jnp.finfo(dtype).eps) * np.abs(decoded(blocks[0].values)).max()
    subnormal = 2.0**-25 if dtype == jnp.float16 else 0.0
    assert np.abs(np.asarray(got, np.float64) - expected).max() < 1.01 * roundings + subnormal


def test_what_is_written_later_changes_no_bit():
    cache = filled(kv_policy("int8"), 4, 8)
    q = draws(B, K * G, 1, 8, seed=3)
    later = cache.advanced(4).written(0, 1e3 * draws(B, K, 3, 8), 1e3 * draws(B, K, 3, 8))
    seen = seen_positions(3, 1)
    before, after = (np.asarray(attention(q, [Block(*c.layer(0), seen)])) for c in (cache, later))
    assert np.array_equal(before, after)


@pytest.mark.slow
def test_all_zero_keys_and_values_give_zero():
    for name in ("int8", "int4", "fp8"):
        cache = empty_quantized_cache(kv_policy(name), layers=1, batch=B, heads=K, head_dim=8, max_length=S)
        zeros = jnp.zeros((B, K, 2, 8))
        out = attention(draws(B, K * G, 2, 8), cache.written(0, zeros, zeros).blocks(0, zeros, zeros))
        assert np.array_equal(np.asarray(out), np.zeros((B, K * G, 2, 8)))


@pytest.mark.slow
def test_batches_of_caches_under_vmap():
    policy = kv_policy("int4")
    caches = [filled(policy, n, 8) for n in (3, 5)]
    many = jax.tree.map(lambda *a: jnp.stack(a), *caches)
    q = draws(2, B, K * G, 1, 8, seed=3)
    k = jnp.zeros((B, K, 1, 8))
    together = jax.vmap(lambda q, cache: attention(q, cache.blocks(0, k, k)))(q, many)
    for i, cache in enumerate(caches):
        expected, bound = by_formula(q[i], [Block(*cache.layer(0), seen_positions(cache.length, 1))])
        assert np.abs(np.asarray(together[i], np.float64) - expected).max() < bound


def touched(jaxpr, inputs: list[bool], found: list) -> list[bool]:
    """Which outputs of a jaxpr depend on the marked inputs; every equation that does so is appended to `found`."""
    marked = {v for v, mark in zip(jaxpr.invars, inputs, strict=True) if mark}
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and v in marked for v in eqn.invars]
        inner = next((p for p in eqn.params.values() if hasattr(p, "jaxpr") and hasattr(p, "consts")), None)
        if inner is not None:
            marks_out = touched(inner.jaxpr, marks, found)
            marked |= {v for v, mark in zip(eqn.outvars, marks_out, strict=True) if mark}
        elif any(marks):
            marked |= set(eqn.outvars)
            found.append(eqn)
    return [not isinstance(v, Literal) and v in marked for v in jaxpr.outvars]


@pytest.mark.parametrize(("name", "per"), [("int8", "head"), ("int4", "token"), ("fp8", "head")])
def test_no_scale_meets_a_coordinate_of_the_cache(name: str, per: str):
    cache = filled(kv_policy(name, per=per), 6, 16)
    q = draws(B, K * G, 1, 16)

    def read(key_scale, value_scale, q, key_codes, value_codes):
        held = QuantizedCache(key_codes, key_scale, value_codes, value_scale, cache.length, cache.policy, 16)
        return attention(q, held.blocks(0, q[:, :K], q[:, :K]))

    closed = jax.make_jaxpr(read)(cache.key_scale, cache.value_scale, q, cache.key_codes, cache.value_codes)
    equations: list = []
    touched(closed.jaxpr, [True, True, False, False, False], equations)
    assert sum(eqn.primitive.name == "mul" for eqn in equations) >= 3  # the keys' scale, the values' and their unit
    for eqn in equations:
        for out in eqn.outvars:
            assert out.aval.size < B * K * S * 16, eqn  # smaller than the keys: scores, weights, scales


def test_the_walk_of_the_trace_sees_a_cache_that_is_multiplied():
    q = filled(kv_policy("int8"), 6, 16).layer(0)[0]
    closed = jax.make_jaxpr(jax.jit(lambda scale, codes: codes.astype(jnp.float32) * scale))(q.scale, q.codes)
    equations: list = []
    touched(closed.jaxpr, [True, False], equations)
    assert max(eqn.outvars[0].aval.size for eqn in equations) == B * K * S * 16


@pytest.mark.parametrize(("heads", "h"), [(5, 8), (6, 4)])
def test_heads_that_do_not_fit_are_refused(heads: int, h: int):
    cache = filled(kv_policy("int8"), 2, 8)
    with pytest.raises(QuantError, match=rf"q has shape \(2, {heads}, 1, {h}\) and the keys \(2, 2, 11, 8\)"):
        attention(draws(B, heads, 1, h), [Block(*cache.layer(0), seen_positions(1, 1))])


def test_reading_is_traced_once():
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, q):
        traces.append(1)
        k = q[:, :K]
        cache = cache.written(0, k, k)
        return cache.advanced(1), attention(q, cache.blocks(0, k, k))

    cache = filled(kv_policy("int8"), 2, 8)
    for t in range(4):
        cache, out = step(cache, draws(B, K * G, 1, 8, seed=t))
    assert len(traces) == 1
    assert np.isfinite(np.asarray(out)).all()

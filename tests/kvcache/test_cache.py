"""What a cache holds: the codes of fb.quantize token by token, the same bytes however they arrive, in place and without NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.formats import FORMATS
from fewbit.kvcache import KVPolicy, QuantizedCache, empty_quantized_cache, kv_policy

L, B, K, S = 2, 2, 3, 9
POLICIES = {
    "int8": kv_policy("int8"),
    "int8-token": kv_policy("int8", per="token"),
    "int4": kv_policy("int4", scale="bfloat16"),
    "fp8-token": kv_policy("fp8", per="token", scale="bfloat16"),
    "int8-int3": kv_policy("int8", "int3", scale=FORMATS["e8m0"]),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def empty(policy: KVPolicy, h: int = 7, max_length: int = S) -> QuantizedCache:
    return empty_quantized_cache(policy, layers=L, batch=B, heads=K, head_dim=h, max_length=max_length)


def tokens(count: int, h: int = 7, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    """Keys or values of `count` tokens, of different sizes from token to token and head to head."""
    draw = np.random.default_rng(seed)
    return jnp.asarray(draw.normal(size=(B, K, count, h)) * 4.0 ** draw.integers(-2, 3, size=(B, K, count, 1)), dtype)


write = jax.jit(lambda cache, k, v: cache.written(1, k, v).advanced(k.shape[2]), donate_argnums=0)


def leaves(cache: QuantizedCache) -> dict[str, np.ndarray]:
    names = ("key_codes", "key_scale", "value_codes", "value_scale")
    return {name: np.asarray(getattr(cache, name)).view(np.uint8) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "h"), [*((name, 7) for name in POLICIES), ("int8", 1), ("int8-int3", 1), ("int4", 16)])
def test_it_holds_what_quantize_gives(name: str, h: int):
    policy = POLICIES[name]
    k, v = tokens(4, h), tokens(4, h, seed=1)
    cache = write(empty(policy, h), k, v)
    for held, x, scheme in zip(cache.layer(1), (k, v), (policy.keys, policy.values), strict=True):
        assert held.shape == (B, K, S, h)
        np.testing.assert_array_equal(fb.dequantize(held)[:, :, :4], fb.dequantize(fb.quantize(x, scheme)))
        assert not np.asarray(fb.dequantize(held)[:, :, 4:]).any()
    assert not np.asarray(fb.dequantize(cache.layer(0)[0])).any()
    assert int(cache.length) == 4


@pytest.mark.slow
@every_policy
def test_one_by_one_gives_the_bytes_of_all_at_once(policy: KVPolicy):
    k, v = tokens(5), tokens(5, seed=1)
    at_once = leaves(write(empty(policy), k, v))
    appended = empty(policy)
    for t in range(5):
        appended = write(appended, k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert int(appended.length) == 5
    for name, held in leaves(appended).items():
        assert np.array_equal(held, at_once[name]), name


def test_it_does_not_matter_whether_writing_is_compiled():
    k, policy = tokens(5), POLICIES["int4"]
    at_once = leaves(write(empty(policy), k, -k))
    eager = empty(policy).written(1, k[:, :, :2], -k[:, :, :2]).advanced(2).written(1, k[:, :, 2:], -k[:, :, 2:])
    for name, held in leaves(eager).items():
        assert np.array_equal(held, at_once[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("per", ["head", "token"])
def test_the_largest_number_and_its_negative_come_back_alike_and_no_row_of_zeros_is_nan(name: str, per: str):
    k = tokens(3).at[:, :, 1].set(0.0)
    k = k.at[:, :, 0, 0].set(96.0).at[:, :, 0, 1].set(-96.0)
    cache = write(empty(kv_policy(name, per=per)), k, -k)
    keys, values = (np.asarray(fb.dequantize(q)) for q in cache.layer(1))
    # The scale 96 / max is rounded once, and so is its product with max: two roundings of 2**-24.
    np.testing.assert_allclose(keys[:, :, 0, :2], np.broadcast_to([96.0, -96.0], (B, K, 2)), rtol=2.0**-23)
    assert np.array_equal(keys, -values)
    assert not keys[:, :, 1].any()
    assert np.isfinite(keys).all()


def test_rounded_scales_clip_instead_of_wrapping():
    k = tokens(6)
    policy = kv_policy("int8", scale="bfloat16")
    kept = np.asarray(fb.dequantize(write(empty(policy), k, k).layer(1)[0]))[:, :, :6]
    step = np.abs(np.asarray(k)).max(-1, keepdims=True) / 127
    # Half a step, and what the scale's rounding to 8 bits takes of the largest code.
    assert (np.abs(kept - np.asarray(k)) <= step * (0.5 + 127 * 2.0**-8)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("per", ["head", "token"])
def test_a_number_that_is_not_finite_spoils_what_shares_its_scale(bad: float, per: str):
    k = tokens(3).at[0, 1, 2, 3].set(bad)
    keys = np.asarray(fb.dequantize(write(empty(kv_policy("int8", per=per)), k, k).layer(1)[0]))
    spoiled = np.zeros((B, K, S, 7), bool)
    spoiled[(0, 1, 2) if per == "head" else (0, slice(None), 2)] = True
    assert np.array_equal(np.isnan(keys), spoiled)


@pytest.mark.parametrize(
    ("policy", "of_token"),
    [
        (kv_policy("int8"), 2 * K * (7 + 4)),
        (kv_policy("int8", per="token"), 2 * (K * 7 + 4)),
        (kv_policy("int4", scale="bfloat16"), 2 * K * (4 + 2)),
        (kv_policy("int8", "int3"), K * (7 + 4) + K * (3 + 4)),
    ],
    ids=["int8", "int8-token", "int4-bfloat16", "int8-int3"],
)
def test_its_bytes_are_those_of_packed_codes_and_scales(policy: KVPolicy, of_token: int):
    cache = empty(policy)
    assert cache.nbytes == L * B * S * of_token
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) - cache.length.nbytes


@pytest.mark.parametrize("policy", [POLICIES["int8"], POLICIES["int8-int3"]], ids=["int8", "int8-int3"])
def test_steps_are_traced_once_and_take_the_memory_of_the_cache(policy: KVPolicy):
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache: QuantizedCache, k: jax.Array) -> QuantizedCache:
        traces.append(1)
        return cache.written(0, k, k).advanced(1)

    cache = empty(policy)
    for t in range(4):
        before = cache
        cache = step(cache, tokens(1, seed=t))
        assert before.key_codes.is_deleted() and before.value_scale.is_deleted()
    assert len(traces) == 1
    assert int(cache.length) == 4


def test_caches_are_written_under_vmap():
    policy = POLICIES["int4"]
    k = jnp.stack([tokens(2, seed=s) for s in range(3)])
    many = jax.tree.map(lambda a: jnp.stack([a] * 3), empty(policy))
    together = jax.vmap(lambda cache, k: cache.written(0, k, -k).advanced(2))(many, k)
    for s in range(3):
        alone = empty(policy).written(0, k[s], -k[s]).advanced(2)
        for one, all_of_them in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(all_of_them[s]))


def test_bfloat16_keys_are_taken():
    k = tokens(2, dtype=jnp.bfloat16)
    held = write(empty(kv_policy("int8")), k, k).layer(1)[0]
    expected = fb.dequantize(fb.quantize(k.astype(jnp.float32), kv_policy("int8").keys))
    np.testing.assert_array_equal(fb.dequantize(held, jnp.float32)[:, :, :2], expected)


@pytest.mark.parametrize("name", ["layers", "batch", "heads", "head_dim", "max_length"])
def test_a_cache_of_nothing_is_refused(name: str):
    numbers = {"layers": 1, "batch": 1, "heads": 1, "head_dim": 1, "max_length": 1}
    with pytest.raises(QuantError, match=f"{name} is 0, must be at least 1"):
        empty_quantized_cache(kv_policy("int8"), **{**numbers, name: 0})


@pytest.mark.finding(38)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"keys": (B, K, 2, 4)},
            r"keys has shape \(2, 3, 2, 4\); this cache takes \[batch=2, heads=3, tokens, head_dim=7\]",
        ),
        ({"keys": (1, K, 2, 7)}, r"keys has shape \(1, 3, 2, 7\)"),
        ({"values": (B, 1, 2, 7)}, r"values has shape \(2, 1, 2, 7\)"),
        ({"values": (B, K, 3, 7)}, "keys has 2 tokens and values 3"),
        ({"layer": 5}, "layer is 5, but the cache has 2 layers"),
        ({"layer": -3}, "layer is -3, but the cache has 2 layers"),
        ({"keys": (B, K, 10, 7), "values": (B, K, 10, 7)}, "10 tokens do not fit a cache of 9 positions"),
        ({"filled": 8}, "2 more tokens do not fit: 8 of 9 positions are filled"),
    ],
    ids=["head_dim", "batch", "heads", "tokens", "layer", "negative-layer", "too-long", "full"],
)
def test_tokens_that_do_not_fit_are_refused(change: dict, message: str, unchecked):
    case = {"layer": 1, "filled": 0, "keys": (B, K, 2, 7), "values": (B, K, 2, 7)} | change
    cache = empty(POLICIES["int8"]).advanced(case["filled"])
    with pytest.raises(QuantError, match=message):
        cache.written(case["layer"], jnp.zeros(case["keys"]), jnp.zeros(case["values"]))


@pytest.mark.finding(38)
def test_a_cache_is_filled_to_its_last_position_and_no_further():
    k = tokens(S)
    cache = empty(POLICIES["int8"]).written(-1, k, k).advanced(S)
    np.testing.assert_array_equal(fb.dequantize(cache.layer(1)[0]), fb.dequantize(fb.quantize(k, POLICIES["int8"].keys)))
    with pytest.raises(QuantError, match="1 more tokens do not fit: 9 of 9 positions are filled"):
        cache.advanced(1)

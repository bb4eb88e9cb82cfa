"""Attention in C++ is the formula over the numbers that a cache stands for, and reads it where it lies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.attention import AttentionProblem, Block, Cpu, attention, seen_positions, window_start
from fewbit.kernels.extension import Extension, extension
from fewbit.kvcache import kv_policy
from tests.kvcache.formula import by_formula, draws

BUILT = extension("fewbit.kernels.attention.cpu._attention")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason="the C++ extension is not built")
LEVELS = ("portable", "avx2", "avx512")
HERE = LEVELS[: LEVELS.index(BUILT.isa) + 1] if BUILT.isa in LEVELS else LEVELS[:1]  # arm64 has one of its own

POLICIES = {
    "float32": None,
    "int8": kv_policy("int8"),
    "int4": kv_policy("int4", per="token", scale="bfloat16"),
    "fp8 and int8": kv_policy("fp8", "int8", scale="float16"),
    "nf4": kv_policy("nf4", scale=fb.FORMATS["e8m0"]),
    "e5m2": kv_policy("e5m2"),
    "int5 and mxfp6's": kv_policy("int5", fb.FORMATS["e2m3"]),
}
# Rows below, at and beyond a chunk's 96; positions below 64, around it, and beyond a run's 512; widths that fill no vector.
SHAPES = {  # batch, key heads, queries of each, positions, new tokens, width, position of the first token
    "one token": (2, 2, 3, 70, 1, 64, 40),
    "odd": (1, 3, 1, 11, 3, 7, 6),
    "one wide": (1, 1, 1, 1, 1, 1, 0),
    "long": (1, 2, 2, 1300, 2, 80, 1200),
    "prompt": (1, 2, 3, 130, 130, 17, 0),
}


def cache(policy: str, shape: str, dtype: str = "float32") -> tuple[jax.Array, Block]:
    """Queries, and the middle one of three layers."""
    B, K, G, S, T, h, start = SHAPES[shape]
    k, v = draws(3, B, K, S, h, seed=1), draws(3, B, K, S, h, seed=2)
    if POLICIES[policy] is None:
        k, v = k.astype(dtype), v.astype(dtype)
    else:
        k, v = fb.quantize(k, POLICIES[policy].keys), fb.quantize(v, POLICIES[policy].values)
    return draws(B, K * G, T, h, seed=3).astype(dtype), Block(k, v, seen_positions(start, T), jnp.int32(1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def attended(isa: str | None, soft_cap: float, q: jax.Array, keys, values, seen, first, sinks, layer) -> jax.Array:
    backend, blocks = Cpu(isa), [Block(keys, values, seen, layer, first)]
    problem = AttentionProblem.of(q, blocks, sinks, soft_cap)
    assert backend.unsupported(problem) is None
    return backend.run(problem, q, blocks, sinks)


def by_kernel(q: jax.Array, block: Block, isa: str | None = None, sinks=None, soft_cap: float = 0.0) -> jax.Array:
    return attended(isa, soft_cap, q, block.keys, block.values, block.seen, block.first, sinks, block.layer)


def beyond_rounding(got: jax.Array, q: jax.Array, block: Block, sinks=None, soft_cap: float = 0.0) -> float:
    """The largest error in units of what rounding explains: float32's within, and that of the result."""
    expected, bound = by_formula(q, [block], sinks, soft_cap)
    last = float(jnp.finfo(got.dtype).eps) * np.abs(expected).max() if got.dtype != jnp.float32 else 0.0
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    return float(np.abs(np.asarray(got, np.float64) - expected).max() / (bound + last))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_the_formula(policy, shape):
    q, block = cache(policy, shape)
    assert beyond_rounding(by_kernel(q, block), q, block) < 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("isa", HERE)
def test_every_instruction_set_and_dtype(isa, dtype):
    for policy, shape in (("float32", "odd"), ("int4", "long"), ("int5 and mxfp6's", "prompt")):
        q, block = cache(policy, shape, dtype)
        assert beyond_rounding(by_kernel(q, block, isa), q, block) < 1


WINDOWS = {"one token": (1, 17, 40), "odd": (1, 4), "one wide": (1,), "long": (100, 600, 1201), "prompt": (1, 64, 100)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", ["float32", "int4"])
def test_windows_sinks_and_soft_caps(policy, shape):
    q, block = cache(policy, shape)
    sinks = draws(q.shape[1], seed=4, size=3.0)
    for window in WINDOWS[shape]:
        windowed = dataclasses.replace(block, first=window_start(block.seen, window))
        assert beyond_rounding(by_kernel(q, windowed), q, windowed) < 1
        for settings in ({"sinks": sinks}, {"soft_cap": 2.0}, {"sinks": sinks, "soft_cap": 0.5}):
            assert beyond_rounding(by_kernel(q, windowed, **settings), q, windowed, **settings) < 1
    assert beyond_rounding(by_kernel(8 * q, block, soft_cap=1.5), 8 * q, block, soft_cap=1.5) < 1


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_sinks_and_soft_caps_by_every_instruction_set(isa, dtype):
    for shape in ("odd", "prompt"):
        q, block = cache("float32", shape, dtype)
        windowed = dataclasses.replace(block, first=window_start(block.seen, 3))
        settings = {"sinks": draws(q.shape[1], seed=4), "soft_cap": 4.0}
        assert beyond_rounding(by_kernel(q, windowed, isa, **settings), q, windowed, **settings) < 1


def test_what_is_before_a_window_does_not_reach_it():
    """Positions before the window may hold NaN and infinities: where all tokens' windows begin later, and where some do."""
    for shape in ("one token", "prompt"):
        q, block = cache("float32", shape)
        windowed = dataclasses.replace(block, first=window_start(block.seen, 20))
        clean = np.asarray(by_kernel(q, windowed))
        for bad, end in ((jnp.nan, int(windowed.first[0]) or 50), (jnp.inf, int(windowed.first[-1]))):
            keys, values = (x.at[..., :end, :].set(bad) for x in (block.keys, block.values))
            got = np.asarray(by_kernel(q, dataclasses.replace(windowed, keys=keys, values=values)))
            untouched = np.asarray(windowed.first) >= end
            np.testing.assert_array_equal(got[:, :, untouched], clean[:, :, untouched])
            assert untouched.any() and not np.isfinite(got[:, :, ~untouched]).any()


def test_a_sink_alone_gives_zeros():
    q, block = cache("float32", "odd")
    hidden = dataclasses.replace(block, seen=jnp.zeros_like(block.seen))
    assert not np.asarray(by_kernel(q, hidden, sinks=jnp.zeros(q.shape[1]))).any()


def test_a_token_that_sees_nothing_gets_nan_and_what_nobody_sees_is_not_read():
    q, block = cache("float32", "odd")  # three tokens, eleven positions
    keys, values = (
        jnp.concatenate([x[..., :9, :], jnp.full_like(x[..., 9:, :], jnp.nan)], axis=-2) for x in (block.keys, block.values)
    )
    hidden = dataclasses.replace(block, keys=keys, values=values, seen=jnp.array([0, 1, 9], jnp.int32))
    got = np.asarray(by_kernel(q, hidden))
    assert np.isnan(got[:, :, 0]).all()
    expected = np.asarray(by_kernel(q, dataclasses.replace(block, seen=hidden.seen)))
    np.testing.assert_array_equal(got[:, :, 1:], expected[:, :, 1:])
    beyond = dataclasses.replace(block, seen=jnp.array([-5, 1, 99], jnp.int32))
    np.testing.assert_array_equal(
        np.asarray(by_kernel(q, beyond)),
        np.asarray(by_kernel(q, dataclasses.replace(block, seen=jnp.array([0, 1, 11], jnp.int32)))),
    )


def test_nan_and_infinities_are_the_references():
    q, block = cache("float32", "odd")
    for at, bad in ((0, jnp.nan), (2, jnp.inf), (2, -jnp.inf)):
        keys = block.keys.at[1, 0, 0, at, 0].set(bad)
        values = block.values.at[1, 0, 1, at, 0].set(bad)
        odd = dataclasses.replace(block, keys=keys, values=values)
        got, expected = (np.asarray(f(q, odd)) for f in (by_kernel, lambda q, b: attention(q, [b], backend="reference")))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))


def odd_from(block: Block, at: int, bad: float) -> Block:
    """The block with keys and values that are not finite from a position on: stale memory, or tokens yet to come."""

    def spoiled(held):
        if isinstance(held, fb.QArray):
            return dataclasses.replace(held, scale=held.scale.at[..., at:, :].set(bad))
        return held.at[..., at:, :].set(bad)

    return dataclasses.replace(block, keys=spoiled(block.keys), values=spoiled(block.values))


@pytest.mark.finding(40)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("policy", ["float32", "int8", "e5m2"])
def test_what_a_token_does_not_see_does_not_reach_it(policy, backend):
    """NaN and infinities beyond what a token sees change no bit of it, at any place of a run of 64 and in several tokens at once."""
    run = jax.jit(lambda q, block: attention(q, [Block(*block)], backend=backend))
    for shape in ("one token", "prompt"):
        q, block = cache(policy, shape)

        def attended_to(block, q=q):
            return np.asarray(run(q, (block.keys, block.values, block.seen, block.layer)))

        clean = attended_to(block)
        for bad, at in ((jnp.nan, int(block.seen[-1])), (-jnp.inf, int(block.seen[-1]) - q.shape[2] // 2)):
            odd, sees = attended_to(odd_from(block, at, bad)), np.asarray(block.seen) > at
            np.testing.assert_array_equal(odd[:, :, ~sees], clean[:, :, ~sees])
            assert not np.isfinite(odd[:, :, sees]).any()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_large_value_that_a_token_does_not_see_changes_no_bit_of_float16(backend):
    q, block = cache("int8", "prompt")
    last = int(block.seen[-1]) - 1
    larger = fb.dequantize(block.values).at[..., last, :].multiply(1e6)
    later = dataclasses.replace(block, values=fb.quantize(larger, block.values.scheme))
    clean, odd = (np.asarray(attention(q.astype(jnp.float16), [b], backend=backend)) for b in (block, later))
    sees = np.asarray(block.seen) > last
    np.testing.assert_array_equal(odd[:, :, ~sees], clean[:, :, ~sees])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sinks", [None, jnp.zeros(1)], ids=["", "sinks"])
def test_scores_of_minus_infinity_before_finite_ones(backend, sinks):
    keys = jnp.where(jnp.arange(70).reshape(1, 1, 70, 1) < 64, -1e20, 0.0) * jnp.ones((1, 1, 70, 4))
    block = Block(keys, jnp.ones_like(keys), seen_positions(69, 1))
    y = attention(jnp.full((1, 1, 1, 4), 1e20), [block], sinks=sinks, backend=backend)
    np.testing.assert_allclose(y, 1.0 if sinks is None else 6 / 7, rtol=1e-6)


@pytest.mark.finding(40)
def test_an_infinite_value_is_itself_for_those_that_see_it():
    q, block = cache("float32", "odd")  # three tokens, which see 7, 8 and 9 positions
    values = block.values.at[1, 0, 1, 7, 2].set(jnp.inf).at[1, 0, 1, 8, 2].set(-jnp.inf).at[1, 0, 2, 8, 3].set(-jnp.inf)
    for backend in ("cpu", "reference"):
        y = np.asarray(attention(q, [dataclasses.replace(block, values=values)], backend=backend))
        assert np.isfinite(y[0, 1, 0]).all() and y[0, 1, 1, 2] == np.inf and np.isnan(y[0, 1, 2, 2])
        assert y[0, 2, 2, 3] == -np.inf and np.isfinite(y[0, 2, :2]).all() and np.isfinite(y[0, 0]).all()


def test_scores_far_apart_and_all_alike():
    q, block = cache("float32", "one token")
    for factor in (
        0.0,
        1e3,
        1e30,
    ):  # weights of 1/41, of 0 and 1; scores beyond float32's range would be NaN in the formula, too
        scaled = q * factor / (1 if factor < 1e30 else jnp.abs(q).max())
        assert beyond_rounding(by_kernel(scaled, block), scaled, block) < 1


@pytest.mark.slow
def test_derivatives_and_maps_are_the_references():
    q, block = cache("float32", "odd")

    def loss(backend, q, keys):
        y = attention(q, [dataclasses.replace(block, keys=keys)], backend=backend)
        return jnp.sum(jnp.sin(y))

    for got, expected in zip(
        *(jax.grad(functools.partial(loss, b), (0, 1))(q, block.keys) for b in ("cpu", "reference")), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    many = jnp.stack([q, 2 * q])
    mapped = jax.vmap(lambda q: attention(q, [block], backend="cpu"))(many)
    np.testing.assert_array_equal(mapped[0], by_kernel(q, block))
    np.testing.assert_array_equal(mapped[1], by_kernel(2 * q, block))


def test_a_layer_is_read_where_it_lies():
    q, block = cache("int8", "one token")

    def through(q, keys, values):
        def layer(i, q):
            return attention(q, [Block(keys, values, block.seen, i)], backend="cpu")

        return jax.lax.fori_loop(0, 3, layer, q)

    text = jax.jit(through).lower(q, block.keys, block.values).compile().as_text()
    assert "fewbit_attention" in text
    assert not [line for line in text.splitlines() if "u8[" in line and ("dynamic-slice" in line or "copy(" in line)]


def test_what_it_does_not_take_is_said(monkeypatch):
    q, block = cache("float32", "odd")
    pair = [block, dataclasses.replace(block)]
    with pytest.raises(fb.UnsupportedError, match="come in 2 blocks; it takes one"):
        attention(q, pair, backend="cpu")
    problem = AttentionProblem.of(q, [block.of_layer()])
    assert "no layer of a KV cache" in str(Cpu().not_chosen(problem))
    assert "CPU devices" in str(Cpu().not_chosen(AttentionProblem.of(q, [block])))  # as many as the tests have
    monkeypatch.setattr(
        "fewbit.kernels.attention.cpu.backend.extension", lambda module: Extension(missing="it is not built")
    )
    with pytest.raises(fb.UnsupportedError, match="it is not built"):
        attention(q, [block], backend="cpu")


def test_a_named_kernel_is_not_replaced_on_another_platform():
    q, block = cache("float32", "odd")
    traced = jax.jit(lambda q, keys: attention(q, [dataclasses.replace(block, keys=keys)], backend="cpu")).trace(
        q, block.keys
    )
    assert "fewbit_attention" in traced.lower(lowering_platforms=("cpu",)).as_text()
    with pytest.raises(fb.UnsupportedError, match="it runs on cpu, and the program is compiled for tpu"):
        traced.lower(lowering_platforms=("tpu",))


def test_a_layer_counts_from_the_end_as_xla_does():
    q, block = cache("float32", "odd")  # the middle one of three layers
    for layer in (-2, -9, 7, 2):
        there = dataclasses.replace(block, layer=jnp.int32(layer))
        expected = attention(q, [there], backend="reference")
        np.testing.assert_allclose(by_kernel(q, there), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_does_not_go_together_is_refused(backend):
    q, block = cache("int4", "odd")  # 1 batch row, 3 key heads, 3 tokens, 11 positions, width 7
    other = jax.tree.map(lambda a: a[..., :5, :], block.values)
    for odd, message in (
        ({"values": other}, r"the keys have shape \(3, 1, 3, 11, 7\) and the values \(3, 1, 3, 5, 7\)"),
        ({"seen": block.seen[:2]}, r"seen has shape \(2,\) and must have a number for each of 3 tokens"),
        ({"layer": None}, "the key heads must divide the heads"),
    ):
        with pytest.raises(fb.QuantError, match=message):
            attention(q, [dataclasses.replace(block, **odd)], backend=backend)
    with pytest.raises(fb.QuantError, match="batches be the same"):
        attention(jnp.concatenate([q, q]), [block], backend=backend)

"""Attention with int8 queries: integer products within their rounding of the formula, in C++ at every level as in plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from fewbit.kernels.attention import QUERIES, AttentionProblem, Block, Cpu, attention, seen_positions, window_start
from fewbit.kernels.attention.reference import RUN
from fewbit.kvcache import kv_policy
from tests.kernels.attention.cpu.test_backend import BUILT, HERE, SHAPES, odd_from
from tests.kvcache.formula import by_formula, draws, visible

BACKENDS = [
    pytest.param("reference", id="reference"),
    *(
        pytest.param(Cpu(isa), id=isa, marks=pytest.mark.skipif(BUILT.missing is not None, reason="not built"))
        for isa in HERE
    ),
]


def operands(shape: str, per: str = "head", dtype: str = "float32") -> tuple[fb.QArray, Block]:
    """Quantized queries, and the middle one of three layers of an int8 cache."""
    B, K, G, S, T, h, start = SHAPES[shape]
    policy = kv_policy("int8", per=per)
    held = (fb.quantize(draws(3, B, K, S, h, seed=seed), policy.keys) for seed in (1, 2))
    q = draws(B, K * G, T, h, seed=3, size=2.0).astype(dtype)
    return fb.quantize(q, QUERIES), Block(*held, seen_positions(start, T), jnp.int32(1))


@functools.partial(jax.jit, static_argnames=("backend", "soft_cap"))
def attended(q, keys, values, seen, layer, first, sinks, *, backend, soft_cap):
    return attention(q, [Block(keys, values, seen, layer, first)], sinks=sinks, soft_cap=soft_cap, backend=backend)


def by_backend(q: fb.QArray, block: Block, backend, sinks=None, soft_cap: float = 0.0) -> np.ndarray:
    leaves = block.keys, block.values, block.seen, block.layer, block.first, sinks
    return np.asarray(attended(q, *leaves, backend=backend, soft_cap=soft_cap))


def weights_of(q: fb.QArray, layer: Block, sinks, soft_cap: float) -> np.ndarray:
    """The softmax weights `[B, H, T, S]` in float64."""
    keys = np.repeat(np.asarray(fb.dequantize(layer.keys), np.float64), q.shape[1] // layer.keys.shape[1], axis=1)
    logits = np.asarray(fb.dequantize(q), np.float64) @ keys.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    exponentials = np.exp(np.where(visible(layer), logits, -np.inf))
    total = exponentials.sum(-1, keepdims=True)
    return exponentials / (total if sinks is None else total + np.exp(np.asarray(sinks, np.float64))[:, None, None])


def rounding_of_weights(weights: np.ndarray, values: fb.QArray) -> np.ndarray:
    """How far weights in int8 can take each number of the result: half a unit of a run for each position, times its code."""
    codes = np.abs(np.asarray(jax.lax.bitcast_convert_type(values.codes, jnp.int8), np.float64))
    scale = np.broadcast_to(np.asarray(values.scale, np.float64), (*codes.shape[:3], 1))
    codes, scale = (np.repeat(x, weights.shape[1] // x.shape[1], axis=1) for x in (codes, scale))
    bound = np.zeros((*weights.shape[:3], codes.shape[-1]))
    for start in range(0, weights.shape[-1], RUN):
        run = slice(start, start + RUN)
        units = (weights[..., run] * scale[:, :, None, run, 0]).max(-1, keepdims=True) / 127
        bound += 0.5 * units * ((weights[..., run] > 0) @ codes[:, :, run])
    return bound


def excess(q: fb.QArray, block: Block, backend, sinks=None, soft_cap: float = 0.0) -> float:
    """The largest error in units of what the roundings, to int8 and in float32, explain."""
    got = by_backend(q, block, backend, sinks, soft_cap)
    dense = fb.dequantize(q)
    expected, rounding = by_formula(dense, [block], sinks, soft_cap)
    layer = block.of_layer()
    bound = rounding_of_weights(weights_of(q, layer, sinks, soft_cap), layer.values) + 2 * rounding
    last = float(jnp.finfo(got.dtype).eps) * np.abs(expected).max() if got.dtype != np.float32 else 0.0
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    return float(np.max(np.abs(got.astype(np.float64) - expected) / (bound + last)))


@pytest.mark.once
@pytest.mark.slow_after(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula_within_its_roundings(shape, backend):
    for per in ("head", "token"):
        q, block = operands(shape, per)
        assert excess(q, block, backend) < 1


@pytest.mark.once
@pytest.mark.slow_after(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_sinks_soft_caps_and_narrow_dtypes(backend):
    for shape, window in (("one token", 17), ("long", 600), ("prompt", 64)):
        q, block = operands(shape)
        windowed = dataclasses.replace(block, first=window_start(block.seen, window))
        sinks = draws(q.shape[1], seed=4, size=3.0)
        for settings in ({}, {"sinks": sinks}, {"soft_cap": 2.0}, {"sinks": sinks, "soft_cap": 0.5}):
            assert excess(q, windowed, backend, **settings) < 1
    q, block = operands("prompt", dtype="bfloat16")
    assert excess(q, block, backend) < 1


@pytest.mark.once
@pytest.mark.skipif(BUILT.missing is not None, reason="the C++ extension is not built")
@pytest.mark.parametrize("isa", HERE)
def test_every_level_rounds_as_the_reference_does(isa):
    """Where a weight is between two integers, float32 decides, and both ways are within the bound above. Measured: never here."""
    for shape in SHAPES:
        q, block = operands(shape)
        got, expected = by_backend(q, block, Cpu(isa)), by_backend(q, block, "reference")
        bound = 2 * by_formula(fb.dequantize(q), [block])[1]
        assert np.mean(np.abs(got - expected) > bound) < 1e-3, shape


@pytest.mark.once
def test_the_weights_are_rounded_in_runs():
    """Two positions with weights of 1 and 0.001: the smaller counts nothing in the run of the larger, and itself in the next run."""
    h, S = 4, RUN + 1
    keys = jnp.zeros((1, 1, S, h)).at[0, 0, 0, 0].set(1.0).at[0, 0, 1, 0].set(-1.0).at[0, 0, RUN, 0].set(-1.0)
    keys = keys.at[0, 0, 2:RUN, 0].set(-9.0)  # the others weigh nothing
    values = jnp.zeros((1, 1, S, h)).at[0, 0, 1, 1].set(1.0).at[0, 0, RUN, 2].set(1.0)
    q = fb.quantize(jnp.zeros((1, 1, 1, h)).at[..., 0].set(2 * 3.4), QUERIES)
    scheme = kv_policy("int8").keys
    block = Block(fb.quantize(keys, scheme), fb.quantize(values, scheme), jnp.array([S], jnp.int32))
    assert 5e-4 < weights_of(q, block, None, 0.0)[0, 0, 0, 1] < 2e-3
    for backend in ("reference", "cpu") if BUILT.missing is None else ("reference",):
        y = np.asarray(attention(q, [block], backend=backend))[0, 0, 0]
        assert y[1] == 0
        assert y[2] == pytest.approx(weights_of(q, block, None, 0.0)[0, 0, 0, RUN], rel=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_token_does_not_see_does_not_reach_it(backend):
    for shape in ("one token", "prompt"):
        q, block = operands(shape)
        clean = by_backend(q, block, backend)
        for bad, at in ((jnp.nan, int(block.seen[-1])), (jnp.inf, int(block.seen[-1]) - q.shape[2] // 2)):
            odd, sees = by_backend(q, odd_from(block, at, bad), backend), np.asarray(block.seen) > at
            np.testing.assert_array_equal(odd[:, :, ~sees], clean[:, :, ~sees])
            assert not np.isfinite(odd[:, :, sees]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_nan_and_tiny_values(backend):
    q, block = operands("odd")
    zeros = dataclasses.replace(block, values=jax.tree.map(jnp.zeros_like, block.values))
    assert not by_backend(q, zeros, backend).any()
    tiny = dataclasses.replace(block, values=dataclasses.replace(block.values, scale=block.values.scale * 2.0**-100))
    np.testing.assert_allclose(by_backend(q, tiny, backend) * 2.0**100, by_backend(q, block, backend), rtol=1e-5, atol=1e-6)
    spoiled = dataclasses.replace(q, scale=q.scale.at[0, 1, 0].set(jnp.nan))
    got = by_backend(spoiled, block, backend)
    assert np.isnan(got[0, 1, 0]).all() and np.isfinite(got[0, 0]).all() and np.isfinite(got[0, 1, 1:]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_is_not_lost(backend):
    """A width of 20 and 21 runs: in such layouts XLA's maximum on CPU loses a NaN."""
    scheme = kv_policy("int8").keys
    keys, values = (fb.quantize(draws(2, 2, 1300, 20, seed=seed), scheme) for seed in (1, 2))
    q = fb.quantize(draws(2, 6, 1, 20, seed=3), QUERIES)
    for bad in (jnp.nan, jnp.inf):
        spoiled = dataclasses.replace(values, scale=values.scale.at[1, 0, 3].set(bad))
        got = by_backend(q, Block(keys, spoiled, jnp.array([600], jnp.int32)), backend)
        expected = np.zeros(got.shape, bool)
        expected[1, :3] = True
        np.testing.assert_array_equal(np.isnan(got), expected)


def test_a_block_of_floats_takes_the_dequantized_queries():
    q, block = operands("odd")
    layer = block.of_layer()
    dense = [dataclasses.replace(layer, keys=fb.dequantize(layer.keys), values=fb.dequantize(layer.values))]
    np.testing.assert_array_equal(attention(q, dense), attention(fb.dequantize(q), dense))


def test_other_schemes_are_refused():
    q, block = operands("odd")
    other = fb.quantize(fb.dequantize(q), "int8")
    with pytest.raises(QuantError, match=r"the queries are int8.*quantize them with .*QUERIES"):
        AttentionProblem.of(other, [block])
    coarse = dataclasses.replace(block, values=fb.quantize(fb.dequantize(block.values), kv_policy("int4").values))
    with pytest.raises(QuantError, match=r"the queries are int8 and the values int4_narrow; .* as of kv_policy"):
        AttentionProblem.of(q, [coarse])

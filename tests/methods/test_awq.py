"""AWQ: the searches of the paper in plain numpy, less output error than rounding, every layout and scheme."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import Observation
from fewbit.methods import AWQ, AWQScaling, ScaledProduct
from fewbit.methods.awq import quantize_clipped
from tests.each_scheme import each_scheme
from tests.methods.test_gptq import K, N, inputs, moments, output_error, weight

GROUP = 32
RATIOS = tuple(1 - i / 20 for i in range(10))
clipped = functools.partial(quantize_clipped, axis=(-1,), ratios=RATIOS)


def observation(x: np.ndarray) -> Observation:
    """The statistics of inputs `[*E, T, K]`."""
    hessian, sums = jnp.einsum("...tk,...tl->...kl", x, x, precision="highest"), jnp.sum(jnp.abs(x), -2)
    return Observation(abssum=sums, hessian=hessian, count=jnp.full(x.shape[:-2], float(x.shape[-2])))


def rounded(w: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """INT4 in groups, float64: `amax` of each group is 7.5 steps (the scheme's "full" range)."""
    groups = w.reshape(len(w), -1, GROUP).astype(np.float64)
    step = amax[..., None] / 7.5
    return (np.clip(np.round(groups / step), -8, 7) * step).reshape(w.shape)


def amax_of(w: np.ndarray) -> np.ndarray:
    return np.abs(w.reshape(len(w), -1, GROUP)).max(-1)


def published_scales(weights: list[np.ndarray], x: np.ndarray, grid: int = 20) -> tuple[np.ndarray, list[float]]:
    """The scale search of the paper, on stored activations."""
    magnitude, losses, found = np.abs(x).mean(0), [], []
    for ratio in range(grid):
        s = np.maximum(magnitude ** (ratio / grid), 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        losses.append(sum(np.square((x / s) @ rounded(w * s, amax_of(w * s)).T - x @ w.T).sum() for w in weights))
        found.append(s)
    return found[int(np.argmin(losses))], losses


def published_clipping(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The amax of each group after the clip search of the paper, on stored activations; none for rows that it makes worse."""
    best, least = amax_of(w), np.full(amax_of(w).shape, np.inf)
    by_group = x.reshape(len(x), -1, GROUP)  # [T, groups, g]
    for ratio in RATIOS:
        amax = ratio * amax_of(w)
        error = (rounded(w, amax) - w).reshape(len(w), -1, GROUP)
        loss = np.square(np.einsum("tbg,nbg->tnb", by_group, error)).sum(0)
        best, least = np.where(loss < least, amax, best), np.minimum(loss, least)
    errors = [np.square(x @ (rounded(w, amax) - w).T).sum(0) for amax in (best, amax_of(w))]
    return np.where((errors[0] < errors[1])[:, None], best, amax_of(w))


def scaled(weights, x, axis=-1, **options):
    products = [ScaledProduct(w, fb.scheme("int4_g32"), axis, observation(x)) for w in weights]
    return AWQScaling().scales(products, jnp.arange(x.shape[-1]), x.shape[-1], **options)


def test_the_scales_are_those_of_the_published_search():
    x, q, k = inputs(), weight(N, K), weight(24, K, seed=2)
    expected, losses = published_scales([np.asarray(q, np.float64), np.asarray(k, np.float64)], x.astype(np.float64))
    first, second = np.sort(losses)[:2]
    assert second > 1.001 * first and np.argmin(losses) > 0, "the best power is clear, and not 0"
    np.testing.assert_allclose(scaled([q, k], x), expected, rtol=1e-5)


def test_scales_of_heads_that_share_values_and_of_experts():
    x, w = inputs(), weight(N, K)
    channels = jnp.arange(K) % (K // 2)
    shared = AWQScaling().scales([ScaledProduct(w, fb.scheme("int4_g32"), -1, observation(x))], channels, K // 2)
    magnitude = np.abs(x).mean(0).reshape(2, -1).mean(0)
    (power, _), residuals, *_ = np.polyfit(np.log(magnitude), np.log(shared), 1, full=True)
    assert 0 < power < 1 and residuals[0] < 1e-8, "a power of the mean over the heads"
    experts, each = weight(2, N, K), np.stack([x, inputs(seed=5)])
    found = scaled([experts], each, by_expert=True)
    for i in range(2):
        np.testing.assert_allclose(found[i], scaled([experts[i]], each[i]), rtol=1e-5)
    np.testing.assert_allclose(
        scaled([experts.swapaxes(1, 2)], each, axis=-2, by_expert=True), found, rtol=1e-5
    )  # experts [in, out]
    unseen = scaled([experts], each * np.float32([1, 0])[:, None, None], by_expert=True)
    np.testing.assert_array_equal(unseen[1], np.ones(K))


def test_the_clipping_is_that_of_the_published_search():
    x, w = inputs(), weight(N, K)
    q = clipped(w, fb.scheme("int4_g32"), moments(x))
    expected = published_clipping(np.asarray(w, np.float64), x.astype(np.float64)) / 7.5
    assert np.mean(np.isclose(q.scale, expected, rtol=1e-5)) > 0.98, "but for ties in float32"
    assert np.mean(expected < 0.99 * amax_of(np.asarray(w)) / 7.5) > 0.3


FAST = ("int4_g64", "q4_1")


@each_scheme(FAST)
def test_no_more_error_than_rounding_for_every_scheme(name):
    w, x, scheme = weight(N, K), inputs(), fb.scheme(name)
    q, start = clipped(w, scheme, moments(x)), fb.quantize(w, scheme)
    assert jax.tree.structure(q) == jax.tree.structure(start)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(q)] == [(a.shape, a.dtype) for a in jax.tree.leaves(start)]
    most = 0.9 if name in ("int4_g64", "nf4", "nvfp4", "q4_1", "nf4_dq") else 1 + 1e-5
    assert output_error(q, w, x) <= most * output_error(start, w, x)
    nothing = clipped(w, scheme, jnp.zeros((K, K)))
    for leaf, expected in zip(jax.tree.leaves(nothing), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_every_layout():
    """`[in, out]`, experts with moments each, a short last tile, tiles of rows."""
    w, x, scheme = weight(N, K), inputs(), fb.scheme("int4_g64")  # tiles of 64 and 32
    plain = fb.dequantize(clipped(w, scheme, moments(x)))
    np.testing.assert_array_equal(fb.dequantize(clipped(w.T, scheme, moments(x), axis=(-2,))).T, plain)
    heads = fb.dequantize(clipped(w.T.reshape(3, 32, N), fb.scheme("int4_g32"), moments(x), axis=(-3, -2)))
    np.testing.assert_array_equal(heads.reshape(K, N).T, fb.dequantize(clipped(w, fb.scheme("int4_g32"), moments(x))))
    experts, each = weight(3, N, K), jnp.stack([moments(inputs(seed=i)) for i in range(3)])
    found = fb.dequantize(clipped(experts, scheme, each))
    for i in range(3):
        alone = fb.dequantize(clipped(experts[i], scheme, each[i]))
        assert np.mean(np.asarray(alone == found[i])) > 0.98, "but for ties in sums of another order"
    blocks = fb.Scheme(fb.scheme("int4").format, {-1: 32, -2: 16})
    assert output_error(clipped(w, blocks, moments(x)), w, x) < 0.99 * output_error(fb.quantize(w, blocks), w, x)


def test_any_function():
    x = jnp.asarray(inputs())
    params = {"w": weight(N, K)}
    stats = fb.observe(lambda p, x: x @ p["w"].T, params, [x], "int4", collect=AWQ.collect)
    plan = fb.plan(lambda p, x: x @ p["w"].T, params, x, recipe="int4")
    q = fb.quantize_params(params, plan, method=AWQ(), stats=stats)["w"]
    assert output_error(q, params["w"], np.asarray(x)) < 0.9 * output_error(
        fb.quantize_params(params, plan)["w"], params["w"], np.asarray(x)
    )


@pytest.mark.parametrize("name", ["int4_g32", "nvfp4"])
def test_a_weight_without_rows(name):
    q = AWQ().quantized(jnp.zeros((0, K)), fb.scheme(name), (-1,), Observation(hessian=jnp.eye(K), count=jnp.float32(1)))
    assert q.shape == (0, K) and jax.tree.structure(q) == jax.tree.structure(fb.quantize(jnp.zeros((0, K)), name))


def test_an_all_zero_block_leaves_quantized_scales_alone():
    w, x = 2.0**-12 * weight(N, K).at[1].set(0), inputs()
    q = clipped(w, fb.scheme("nf4_dq"), moments(x))
    assert np.all(np.asarray(fb.dequantize(q))[1] == 0)
    assert output_error(q, w, x) < output_error(fb.quantize(w, "nf4_dq"), w, x)


def test_what_is_refused():
    with pytest.raises(fb.QuantError, match=r"grid is 0, must be 1 or more"):
        AWQScaling(grid=0)
    with pytest.raises(fb.QuantError, match=r"grid is 20 and shrink 1; grid must be 1 or more, shrink from 0 to below 1"):
        AWQ(shrink=1)
    with pytest.raises(
        fb.QuantError, match=r'awq needs the second moments of the inputs; fb.observe with collect=\("hessian",\)'
    ):
        AWQ().quantized(weight(N, K), fb.scheme("int4"), (-1,), None)
    with pytest.raises(fb.QuantError, match="the statistics have shape"):
        clipped(weight(N, K), fb.scheme("int4"), jnp.zeros((3, 3)))

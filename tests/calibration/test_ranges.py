"""Static ranges: what each rule makes of batches, how states merge, and the scales they give."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.calibration import AbsMaxRange, EMARange, MeanRange, MinMaxRange, PercentileRange, RangeState
from fewbit.calibration.ranges import AbstractRange
from fewbit.errors import QuantError

RULES = (AbsMaxRange(), MinMaxRange(), MeanRange(), EMARange(0.8), PercentileRange(90.0))
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)

BATCHES = (
    np.random.default_rng(0).standard_normal((7, 6, 4)).astype(np.float32) * np.arange(1, 8, dtype=np.float32)[:, None, None]
)
update = jax.jit(lambda state, x: state.update(x))
merge = jax.jit(lambda a, b: a.merge(b))


def expected(rule: AbstractRange, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ends by NumPy, one batch after the other, in float64."""
    within = tuple(a for a in range(1, 3) if a - 3 not in rule.axes)
    batches = batches.astype(np.float64)
    amax = np.abs(batches).max(within)
    if isinstance(rule, MinMaxRange):
        return np.minimum(batches.min(within), 0).min(0), np.maximum(batches.max(within), 0).max(0)
    if isinstance(rule, AbsMaxRange):
        high = amax.max(0)
    elif isinstance(rule, MeanRange):
        high = amax.mean(0)
    elif isinstance(rule, PercentileRange):
        high = np.percentile(np.abs(batches), rule.percent, axis=within).mean(0)
    else:
        assert isinstance(rule, EMARange)
        weights = rule.decay ** np.arange(len(batches))[::-1]
        high = np.average(amax, axis=0, weights=weights)
    return -high, high


def after(rule: AbstractRange, batches: np.ndarray) -> RangeState:
    return functools.reduce(update, batches, rule.init(batches.shape[1:]))


def assert_range(state: RangeState, rule: AbstractRange, batches: np.ndarray) -> None:
    low, high = expected(rule, batches)
    # Each batch adds a few roundings of the running average.
    np.testing.assert_allclose(state.low, low, rtol=len(batches) * 2.0**-22)
    np.testing.assert_allclose(state.high, high, rtol=len(batches) * 2.0**-22)
    assert state.count == len(batches)


@each_rule
def test_batches_one_after_the_other(rule: AbstractRange):
    assert_range(after(rule, BATCHES), rule, BATCHES)
    assert_range(after(rule, BATCHES[:1]), rule, BATCHES[:1])


@each_rule
def test_merging_is_as_if_the_batches_had_followed(rule: AbstractRange):
    parts = [after(rule, part) for part in (BATCHES[:1], BATCHES[1:5], BATCHES[5:])]
    assert_range(merge(merge(parts[0], parts[1]), parts[2]), rule, BATCHES)
    assert_range(merge(parts[0], merge(parts[1], parts[2])), rule, BATCHES)
    empty = rule.init()
    jax.tree.map(np.testing.assert_array_equal, merge(parts[1], empty), parts[1])
    jax.tree.map(np.testing.assert_array_equal, merge(empty, parts[1]), parts[1])


@each_rule
def test_carried_through_scan_and_stacked_by_vmap(rule: AbstractRange):
    scanned, _ = jax.lax.scan(lambda state, x: (state.update(x), None), rule.init(), BATCHES)
    assert_range(scanned, rule, BATCHES)
    stacked = jax.vmap(lambda x: rule.init().update(x))(BATCHES)
    assert stacked.high.shape == stacked.count.shape == (7,)
    doubled = merge(stacked, stacked)
    np.testing.assert_allclose(doubled.high, stacked.high, rtol=2.0**-22)
    assert (doubled.count == 2).all()


@pytest.mark.parametrize("kind", [MinMaxRange, MeanRange])
def test_a_range_for_each_channel(kind: type[AbstractRange]):
    rule = kind(axes=(-1,))
    state = after(rule, BATCHES)
    assert state.high.shape == (4,)
    assert_range(state, rule, BATCHES)
    # Another number of rows, another number of axes in front.
    wider = update(update(rule.init((4,)), BATCHES), BATCHES[0, 0])
    assert wider.high.shape == (4,) and wider.count == 2
    halves = jax.vmap(lambda x: rule.init((4,)).update(x))(BATCHES)
    assert merge(halves, halves).high.shape == (7, 4)
    scale, offset = jax.jit(lambda s: s.scale("uint8"))(halves)
    assert scale.shape == offset.shape == (7, 4)


def test_two_axes_that_are_kept():
    state = update(AbsMaxRange(axes=(-3, -1)).init(BATCHES.shape), BATCHES)
    np.testing.assert_array_equal(state.high, np.abs(BATCHES).max(1, keepdims=True))


def test_scales_of_symmetric_and_asymmetric_schemes():
    state = after(MinMaxRange(), np.array([[[-1.0, 3.0]], [[0.5, 2.0]]], np.float32))
    assert state.scale("int8_narrow") == (np.float32(3) / np.float32(127), None)
    scale, offset = state.scale("uint8")
    np.testing.assert_array_equal([scale, offset], np.float32([4 / 255, -1]))
    scale, _ = state.scale("mxfp4")
    assert scale == 0.5  # 3 / 6, a power of two already
    assert (
        after(AbsMaxRange(), np.full((1, 1, 2), 3.1, np.float32)).scale("mxfp4")[0] == 1.0
    )  # rounded up: nothing saturates


@pytest.mark.parametrize("name", ["int8", "fp8", "mxfp8", "nvfp4_absmax", "uint8", "q4_1", "nf4"])
def test_the_scale_serves_quantize_at_every_length(name: str):
    state = after(MinMaxRange(), BATCHES)

    @jax.jit
    def error(x: jax.Array) -> jax.Array:
        scale, offset = state.scale(name)
        return jnp.abs(fb.fake_quant(x, name, scale=scale, offset=offset) - x)

    scheme = fb.SCHEMES[name]
    numbers = np.unique(scheme.format.values())
    low, high = (float(end) for end in (state.low, state.high))
    span = high - low if scheme.zero_point is not None else 2 * max(-low, high)
    # Half the widest step, in units of the format's span, and the roundings of scales (of E4M3: three bits) and offsets.
    step = np.nanmax(np.diff(numbers)) / (np.nanmax(numbers) - np.nanmin(numbers))
    for x in (BATCHES[0], BATCHES[3, 0]):
        assert error(x).max() <= span * step * (0.501 + 0.5 * (name == "uint8")) + span / 32 * (name == "nvfp4_absmax")


def test_a_range_of_zeros_quantizes_to_zeros():
    scale, _ = after(AbsMaxRange(), np.zeros((2, 1, 3), np.float32)).scale("int8")
    assert scale == 0
    assert (fb.fake_quant(jnp.zeros((2, 4)), "int8", scale=scale) == 0).all()


def test_no_batch_raises_outside_jit_and_is_nan_inside():
    for rule in RULES:
        with pytest.raises(QuantError, match="the range has no batch; call update before scale"):
            rule.init().scale("int8")
    assert jnp.isnan(jax.jit(lambda s: s.scale("int8")[0])(AbsMaxRange().init()))


@each_rule
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_poison_is_not_lost(rule: AbstractRange, poison: float):
    batches = BATCHES.copy()
    batches[2, 3, 1] = poison
    state = after(rule, batches)
    assert not np.isfinite([state.low, state.high]).all()
    with pytest.raises(QuantError, match="the range is not finite: a batch had a NaN or an infinity"):
        state.scale("int8")


def test_half_precision_is_widened_and_nothing_is_differentiated():
    state = update(MeanRange().init(), jnp.asarray(BATCHES[0], jnp.bfloat16))
    assert state.high.dtype == jnp.float32
    slope = jax.grad(lambda x: AbsMaxRange().init().update(x).scale("int8")[0])(jnp.ones(3))
    assert (slope == 0).all()


def test_what_is_refused():
    for make, message in (
        (lambda: AbsMaxRange(axes=(0,)), r"axes is \(0,\), must be different negative axes"),
        (lambda: MeanRange(axes=(-1, -1)), "must be different negative axes"),
        (lambda: EMARange(1.0), r"decay is 1.0, must be between 0 and 1 \(MeanRange weighs all batches equally\)"),
        (lambda: PercentileRange(0.0), r"percent is 0.0, must be above 0 and at most 100"),
        (lambda: AbsMaxRange(axes=(-1,)).init(), r"init needs the shape of the arrays, got \(\)"),
        (lambda: AbsMaxRange(axes=(-2,)).init((3, 4)).update(jnp.ones(4)), r"x has shape \(4,\); the range needs elements"),
        (lambda: AbsMaxRange().init().update(jnp.ones((0, 4))), r"x has shape \(0, 4\); the range needs elements"),
        (
            lambda: AbsMaxRange(axes=(-1,)).init((3,)).update(jnp.ones(4)),
            r"x has ranges of shape \(4,\) .* the state has \(3,\)",
        ),
        (lambda: AbsMaxRange().init().merge(MeanRange().init()), "states of two rules cannot be merged: AbsMaxRange"),
        (
            lambda: jax.vmap(AbsMaxRange().init().update)(jnp.ones((2, 3))).update(jnp.ones(3)),
            r"the state is stacked .* under jax\.vmap",
        ),
    ):
        with pytest.raises(QuantError, match=message):
            make()


@each_rule
def test_an_array_that_is_sharded_is_one_batch(rule: AbstractRange):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(BATCHES[:, :4].reshape(4, -1), jax.NamedSharding(mesh, jax.P("data")))
    state = update(rule.init(), x)
    assert_range(state, rule, np.asarray(x)[None])


@each_rule
def test_states_are_float32_where_float64_is_on(rule: AbstractRange):
    with jax.enable_x64(True):
        state = rule.init().update(jnp.asarray(BATCHES[0], jnp.float64)).update(jnp.asarray(BATCHES[1], jnp.float64))
        scale, _ = state.scale("int8")
    assert state.low.dtype == state.high.dtype == scale.dtype == jnp.float32 and state.count.dtype == jnp.int32


@each_rule
def test_a_scalar_is_a_batch(rule):
    state = rule.init().update(jnp.float32(-2.0))
    assert float(state.low) == -2.0

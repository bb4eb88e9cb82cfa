"""quantize's arguments: what is refused, several axes, tiles in two directions, weights, keys, zero points."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.quantize import scale_values
from fewbit.array.scales import MSE, MX, MinMax, parse_calibration
from fewbit.errors import QuantError, UnsupportedError
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws

_quantize = jax.jit(fb.quantize, static_argnums=1, static_argnames="axis")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.ones(4, np.int32), "x is int32; only floating arrays are quantized"),
        (np.ones(4, np.complex64), "x is complex64; only floating arrays are quantized"),
        (np.ones(4, bool), "x is bool; only floating arrays are quantized"),
        (np.float32(1), r"x has shape \(\), expected at least one axis"),
    ],
    ids=["int", "complex", "bool", "0-d"],
)
def test_arrays_that_are_refused(x: np.ndarray, message: str):
    with pytest.raises(QuantError, match=message):
        fb.quantize(x, "int8")


@pytest.mark.usefixtures("unchecked")
def test_a_qarray_is_refused():
    with pytest.raises(QuantError, match=r"x is quantized already; fb\.dequantize it first"):
        fb.quantize(fb.quantize(jnp.ones((1, 4)), "int8"), "int4")


def test_weights_for_a_rule_that_ignores_them_are_refused():
    x = jnp.ones((2, 32))
    with pytest.raises(QuantError, match="calibration absmax ignores error_weights; use one that searches"):
        fb.quantize(x, "int8", error_weights=x)
    with pytest.raises(QuantError, match="calibration mx ignores error_weights"):
        fb.quantize(x, fb.Scheme(FORMATS["e2m1"], {-1: 32}, scale=FORMATS["e8m0"], calibration=MX("floor")), error_weights=x)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(QuantError, match=r"error_weights have shape \(3,\), which does not broadcast to \(2, 32\)"):
        fb.quantize(jnp.ones((2, 32)), "nvfp4", error_weights=jnp.ones(3))


def test_a_tile_on_an_axis_that_is_not_there_is_refused():
    with pytest.raises(QuantError, match="a tile is given on axis -2, but the array has 1 axes"):
        fb.quantize(jnp.ones(8), "fp8_block128")


def test_float64_is_kept_as_dtype_and_rounded_to_float32():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32)))
        assert x.dtype == jnp.float64
        q = fb.quantize(x, "int8")
        assert q.dtype == jnp.float64 and q.scale.dtype == jnp.float32
        assert fb.dequantize(q).dtype == jnp.float64
        assert np.array_equal(q.codes, fb.quantize(x.astype(jnp.float32), "int8").codes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "tile"), [("fp8_block128", (300, 200), (128, 128)), ("nvfp4_16x16", (40, 50), (16, 16))]
)
def test_tiles_in_two_directions(name: str, shape: tuple[int, int], tile: tuple[int, int]):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = _quantize(jnp.asarray(x), name)
    assert q.scale.shape == tuple(-(-n // t) for n, t in zip(shape, tile, strict=True))
    # Each tile by itself, with the tensor scale of the whole array, has the same codes.
    unit = np.float32(1 if q.tensor_scale is None else np.asarray(q.tensor_scale).item())
    codes = laws.unpacked(q)
    holder, fmt = q.scheme.scale, q.scheme.format
    ratio, ideal = np.empty_like(x), np.empty(q.scale.shape, np.float32)
    for i, j in np.ndindex(*q.scale.shape):
        part = np.s_[i * tile[0] : (i + 1) * tile[0], j * tile[1] : (j + 1) * tile[1]]
        ideal[i, j] = np.abs(x[part]).max() / np.float32(fmt.max)
        scale = np.asarray(q.scale)[i, j]
        ratio[part] = x[part] / (scale if unit == 1 else np.float32(holder.values()[scale]) * unit)
    stored = ideal if unit == 1 else holder.encode(jnp.asarray(ideal / unit))
    np.testing.assert_array_equal(q.scale, stored)
    assert np.array_equal(codes, fmt.encode(jnp.asarray(ratio)))
    np.testing.assert_array_equal(fb.dequantize(q), laws.numpy_dequantize(q))


@pytest.mark.parametrize("axis", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"])
def test_no_poison_is_lost_wherever_it_stands(axis: int | tuple[int, ...], poison: float):
    # XLA's maximum on CPU loses a NaN in some layouts, depending on the place.
    def is_nan(x: jax.Array) -> jax.Array:
        return jnp.isnan(fb.dequantize(fb.quantize(x, "int8", axis=axis)))

    compiled = jax.jit(is_nan)
    for place in range(0, 32 * 48, 61):
        x = np.ones((32, 48), np.float32)
        x.flat[place] = poison
        expected = np.broadcast_to(~np.isfinite(x).all(axis, keepdims=True), x.shape)
        np.testing.assert_array_equal(compiled(x), expected)


def test_several_contracted_axes():
    x = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
    q = _quantize(jnp.asarray(x), "int8", axis=(0, 2))
    assert q.scale.shape == (1, 3, 1)
    np.testing.assert_array_equal(q.scale[0, :, 0], np.abs(x).max((0, 2)) / np.float32(127.5))


@pytest.mark.slow
def test_an_axis_is_a_transposition():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 5, 40)).astype(np.float32))
    for axis in range(3):
        moved = _quantize(jnp.moveaxis(x, axis, -1), "int4_g32")
        q = _quantize(x, "int4_g32", axis=axis)
        order = [0, 1]
        order.insert(axis, 2)
        back = moved.transpose(tuple(order))
        assert back.scheme == q.scheme
        assert np.array_equal(back.codes, q.codes) and np.array_equal(back.scale, q.scale)


def test_whole_zero_points_against_numpy():
    x = np.random.default_rng(0).uniform(-1, 3, (8, 40)).astype(np.float32)
    q = _quantize(jnp.asarray(x), "uint8")
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scale = (high - low) / np.float32(255)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    np.testing.assert_array_equal(q.scale, scale)
    np.testing.assert_array_equal(q.zero_point, zero)
    codes = np.clip(np.rint((x + zero * scale) / scale), 0, 255)
    assert np.array_equal(q.codes, codes)
    assert np.array_equal(fb.dequantize(q) == 0, codes == zero), "zero is exact"


def test_a_range_on_one_side_keeps_zero_exact():
    x = jnp.asarray(np.random.default_rng(0).uniform(5, 6, (2, 32)).astype(np.float32))
    q = _quantize(x.at[:, 0].set(0.0), "uint4")
    assert (np.asarray(fb.dequantize(q))[:, 0] == 0).all() and (np.asarray(q.zero_point) == 0).all()


def test_float_offsets_against_numpy():
    scheme = fb.Scheme(FORMATS["uint4"], {...: 1, -1: 32}, zero_point="float32", calibration=MinMax(1.0, 0))
    x = np.random.default_rng(0).uniform(2, 3, (4, 40)).astype(np.float32)
    q = _quantize(jnp.asarray(x), scheme)
    for tile, (start, stop) in enumerate(((0, 32), (32, 40))):
        part = x[:, start:stop]
        low, high = part.min(1), part.max(1)
        scale = (high - low) / np.float32(15)
        np.testing.assert_array_equal(np.asarray(q.scale)[:, tile], scale)
        np.testing.assert_array_equal(np.asarray(q.zero_point)[:, tile], low)
        codes = np.rint((part - low[:, None]) / scale[:, None])
        assert np.array_equal(laws.unpacked(q)[:, start:stop], codes)


def test_a_key_changes_codes_only_and_averages_to_the_array():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))

    def dense(key: jax.Array) -> jax.Array:
        return fb.dequantize(fb.quantize(x, "int4_narrow", key=key))

    draws = np.asarray(jax.jit(jax.vmap(dense))(jax.random.split(jax.random.key(0), 4096)), np.float64)
    scale = np.abs(np.asarray(x)).max(1, keepdims=True) / 7
    # A rounding by chance has a variance of at most a quarter of a squared step.
    assert (np.abs(draws.mean(0) - np.asarray(x)) <= 6 * 0.5 * scale / np.sqrt(4096)).all()


def test_double_quantization_of_scales():
    x = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    q = _quantize(jnp.asarray(x), "nf4_dq")
    assert isinstance(q.scale, fb.QArray) and q.scale.shape == (16, 4) and q.scale.codes.dtype == jnp.uint8
    assert q.scale.zero_point.shape == (1, 1) and q.scale.scale.shape == (1, 1)
    absmax = np.abs(x.reshape(16, 4, 64)).max(-1)
    np.testing.assert_allclose(q.scale.zero_point.item(), absmax.mean(), rtol=64 * 2.0**-23)
    step = np.diff(np.sort(FORMATS["dynamic8"].values())).max() * q.scale.scale.item()
    assert np.abs(laws.scale_of(q) - absmax).max() <= step / 2 * (1 + 1e-5)
    # The codes are chosen with the scales as they are read back.
    ratio = x / np.repeat(laws.scale_of(q), 64, axis=1)
    nearest = np.abs(ratio[..., None] - FORMATS["nf4"].values()).min(-1)
    got = np.abs(ratio - FORMATS["nf4"].values()[laws.unpacked(q)])
    assert (got <= nearest + 1e-6).all()


@pytest.mark.parametrize("spec", ["nf4_dq", {"format": "int4", "tile": {"*": 1, "-1": 64}, "scale": {"format": "int8"}}])
def test_all_zero_tiles_hardly_change_quantized_scales(spec):
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32) * np.float32(1e-4)
    x[0, :64] = 0
    rest = np.asarray(fb.dequantize(_quantize(x, spec if isinstance(spec, str) else fb.scheme(spec))))
    assert (rest[0, :64] == 0).all()
    with_float_scales = fb.dequantize(_quantize(x, "nf4" if spec == "nf4_dq" else "int4_g64"))
    assert np.linalg.norm(rest - x) <= 1.02 * np.linalg.norm(with_float_scales - x)


def test_asymmetric_mx_is_refused():
    scheme = fb.Scheme(
        FORMATS["uint4"], {-1: 32}, scale=FORMATS["e8m0"], zero_point=FORMATS["uint4"], calibration=MX("rceil")
    )
    with pytest.raises(UnsupportedError, match="mx scales are symmetric; use another calibration with a zero point"):
        fb.quantize(jnp.ones((1, 32)), scheme)


def test_error_weights_broadcast():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    scheme = fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, calibration=MSE())
    weights = jnp.linspace(0.0, 1.0, 64)
    row = fb.quantize(x, scheme, error_weights=weights[None])
    full = fb.quantize(x, scheme, error_weights=jnp.broadcast_to(weights, (4, 64)))
    assert np.array_equal(row.scale, full.scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_g32", "fp8_block128", "mxfp4", "q4_0", "nvfp4_absmax", "uint4", "q4_1"])
def test_the_scale_that_was_found_gives_the_same_array_again(name: str):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 70)).astype(np.float32))
    q = _quantize(x, name)
    scale, offset = laws.scale_of(q).astype(np.float32), None
    if q.zero_point is not None:
        zero = np.asarray(q.zero_point, np.float32)
        offset = zero if isinstance(q.scheme.zero_holder, np.dtype) else -zero * scale
    again = jax.jit(lambda x: fb.quantize(x, name, scale=scale, offset=offset))(x)
    if q.tensor_scale is None:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(again), jax.tree.leaves(q))
    # A tensor scale is chosen for the scales that are given, so these are rounded anew, to three bits.
    np.testing.assert_allclose(laws.scale_of(again), scale, rtol=2.0**-4)


def test_a_given_scale_is_not_looked_for_in_the_array():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    q = fb.quantize(x, "int8", scale=0.5)
    assert (q.scale == 0.5).all() and q.scale.shape == (4, 1)
    np.testing.assert_array_equal(laws.unpacked(q).astype(np.int8), np.rint(np.asarray(x) / 0.5))
    rows = fb.quantize(x, "int4_g32", scale=jnp.array([[0.5], [0.25], [0.125], [1.0]]))
    np.testing.assert_array_equal(rows.scale, [[0.5] * 2, [0.25] * 2, [0.125] * 2, [1.0] * 2])


def test_a_given_scale_is_stored_as_the_scheme_stores_scales():
    x = jnp.ones((1, 32))
    assert laws.scale_of(_quantize(x, "mxfp4", scale=0.3)).item() == 0.25
    q = _quantize(x, "nvfp4", scale=jnp.array([[0.3, 0.1]]))
    assert q.tensor_scale.item() == np.float32(0.3) / np.float32(448)
    np.testing.assert_allclose(laws.scale_of(q), [[0.3, 0.1]], rtol=2.0**-4)


def test_zeros_tiny_scales_and_poison_with_a_given_scale():
    x = jnp.array([[0.0, 0.0], [1.0, jnp.inf], [3.0, 4.0]])
    dense = fb.dequantize(fb.quantize(x, "int8", scale=jnp.array([[1e-40], [1.0], [jnp.nan]])))
    np.testing.assert_array_equal(dense, [[0, 0], [jnp.nan] * 2, [jnp.nan] * 2])


@pytest.mark.parametrize(("name", "decoded"), [("int8", [2.0, -1.0]), ("binary", [0.0, 0.0])])
def test_a_given_scale_of_zero_is_1_or_0_in_a_format_without_zero(name, decoded):
    for scale in (0.0, 1e-39):
        np.testing.assert_array_equal(fb.fake_quant(jnp.array([2.1, -1.3]), name, scale=scale), decoded)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("int8", {"offset": 0.0}, "offset is given without scale; pass both, or neither to calibrate"),
        ("int8", {"scale": 1.0, "offset": 0.0}, "scale is given and scheme int8 has no zero point: leave offset out"),
        ("uint4", {"scale": 1.0}, r"scale is given and scheme uint4 has a zero point: pass offset= as well"),
        ("int8", {"scale": np.ones(3, np.float32)}, r"must be .* broadcast to the tiles \(4, 1\); got float32\(3,\)"),
        ("int8", {"scale": np.ones((1, 4, 1), np.float32)}, r"broadcast to the tiles \(4, 1\); got float32\(1, 4, 1\)"),
        ("int8", {"scale": 1}, r"scale and offset must be floating .*; got int32\(\)"),
        ("mxfp4", {"scale": 1.0, "error_weights": np.ones(8, np.float32)}, "have no effect when scale is given"),
    ],
    ids=["offset-alone", "offset", "no-offset", "shape", "rank", "int", "weights"],
)
def test_given_scales_that_are_refused(name: str, given: dict, message: str):
    with pytest.raises(QuantError, match=message):
        fb.quantize(jnp.ones((4, 8)), name, **given)


def test_a_tensor_scale_over_powers_of_two_is_one():
    q = fb.quantize(jnp.array([[1.0, -3.0]]), fb.scheme({"format": "int8", "scale": "e8m0", "tensor_scale": True}))
    assert q.tensor_scale.item() == 1
    np.testing.assert_array_equal(fb.dequantize(q), [[1.0, -3.0]])


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38, -3e38], ids=str)
def test_the_tensor_scale_is_that_of_the_largest_finite_magnitude(odd: float, backend: str | None):
    """Wherever what is not finite stands, beside, before or after the largest; and where the sum of finite numbers overflows."""
    scheme = dataclasses.replace(fb.scheme("nvfp4"), calibration=MSE(tensor="amax"))
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    x[1, 33] = -7.0
    for row, column in ((0, 0), (1, 32), (1, 34), (2, 67)):
        y = x.copy()
        y[row, [column, column + 2]] = odd
        largest = np.abs(y[np.isfinite(y)]).max()
        q = fb.quantize(jnp.asarray(y), scheme, backend=backend)
        np.testing.assert_allclose(q.tensor_scale.item(), largest / np.float32(6 * 448), rtol=2.0**-23)


@pytest.mark.parametrize("calibration", ["fixed,6", "absmax,2", "rms,4"])
def test_a_tensor_scale_is_large_enough_for_a_range_beyond_the_amax(calibration: str):
    scheme = dataclasses.replace(fb.scheme("nvfp4"), calibration=parse_calibration(calibration))
    x = jnp.ones((2, 32)).at[0].set(jnp.nan).at[1, 16:].set(0.25)
    expected = {"fixed,6": [1, 1], "absmax,2": [2 / 6, 0.5 / 6], "rms,4": [4 / 6, 1 / 6]}[calibration]
    np.testing.assert_allclose(scale_values(fb.quantize(x, scheme))[1], expected, rtol=2.0**-4)


def test_a_known_range_has_the_same_tensor_scale_for_every_array():
    scheme = dataclasses.replace(fb.scheme("nvfp4"), calibration=parse_calibration("fixed,6"))
    small, large = (fb.quantize(jnp.full((1, 16), amax), scheme) for amax in (1.0, 60.0))
    assert small.tensor_scale == large.tensor_scale


@pytest.mark.parametrize(("calibration", "zero_point"), [("minmax", FORMATS["uint4"]), ("mse", "float32")])
def test_a_tensor_scale_is_large_enough_for_a_range_on_both_sides_of_zero(calibration, zero_point):
    scheme = fb.Scheme(
        FORMATS["uint4"], {...: 1, -1: 16}, FORMATS["e4m3fn"], True, zero_point, parse_calibration(calibration)
    )
    x = jnp.linspace(-1, 1, 16)[None]
    rounded, stochastic = (fb.dequantize(fb.quantize(x, scheme, key=key)) for key in (None, jax.random.key(0)))
    assert np.abs(rounded - x).max() <= 2 / 15 * (1 + 2.0**-4)  # a step, of a scale that is rounded to E4M3
    assert np.abs(stochastic - x).max() <= 2 / 14 * (1 + 2.0**-3)  # of one that is rounded up


def test_a_scheme_may_pack_another_axis_than_its_tiles():
    x = jax.random.normal(jax.random.key(0), (8, 64))
    q = fb.quantize(x, fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, pack_axis=-2))
    assert q.codes.shape == (4, 64)
    np.testing.assert_array_equal(fb.dequantize(q), fb.dequantize(fb.quantize(x, "int4_g32")))

"""quantize and dequantize in C++ give the bytes that the reference gives, for every scheme, dtype, axis and odd number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import AbsMax, AbsMean
from fewbit.array.scales.search import tensor_scale
from fewbit.kernels.backend import select
from fewbit.kernels.extension import HOW_TO_BUILD, Extension, extension
from fewbit.kernels.quantize import QUANTIZERS, CpuDequantizer, CpuQuantizer, Decoding, Quantization, dequantize, quantize
from fewbit.kernels.quantize.cpu import backend as cpu
from fewbit.kernels.quantize.cpu.view import Geometry, geometry
from tests.conformance import array_laws as laws

pytestmark = pytest.mark.skipif(
    extension("fewbit.kernels.quantize.cpu._quantize").missing is not None, reason="the C++ extension is not built"
)

# Each rule, each kind of format, each holder of scales; the other schemes differ from these in numbers only.
KINDS = (
    *(
        "int8",
        "int4_narrow",
        "int3",
        "uint4",
        "fp8_tensor",
        "fp8_block128",
        "nf4",
        "bnb_fp4",
        "nf4_dq",
        "q4_0",
        "q4_1",
        "q8_0",
    ),
    *("ternary", "binary", "mxfp4", "mxfp8_e5m2", "mxint8", "mxfp8_rceil", "nvfp4", "nvfp4_16x16", "nvint4", "fp8_e4m3fnuz"),
)
OTHERS = tuple(sorted(set(fb.SCHEMES.names()) - set(KINDS)))


MOST, TINY = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
# Finite rows near both ends of float32: ranges beyond it, mixed signs, one sign, what rounds up beyond it, subnormal numbers.
EXTREME = (
    *(
        (3e38, -3e38, 1e38, 0),
        (MOST, -MOST, MOST / 3, 0),
        (MOST,),
        (-MOST,),
        (MOST, 0),
        (0, -MOST),
        (MOST, MOST / 2),
        (MOST, -1),
    ),
    *(
        (MOST / 2, -MOST / 2),
        (MOST / 2 * 1.0001, -MOST / 2),
        (MOST * 0.75, -MOST * 0.6),
        (2.0**127, -(2.0**127)),
        (MOST, TINY, -TINY),
    ),
    *(
        (TINY, -TINY, 0),
        (TINY * 15, -TINY * 15, TINY),
        (TINY / 2, -TINY / 4),
        (-TINY / 2,),
        (TINY * 0.99, -TINY * 1.5),
        (0.0, -0.0),
    ),
    *((-3e-38, -1e-38, 1e-42), (7e4, -7e4), (1e30, 1e30 * (1 + 1e-6)), (TINY * 2688, TINY)),
)


def hard(shape, axis, seed=0):
    """Normal numbers, and rows along `axis` that are extreme, huge, tiny, zero, subnormal, or hold a NaN or an infinity."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, size=shape))
    rows = np.moveaxis(x, axis, -1).reshape(-1, shape[axis])
    rows[1], rows[2] = 0.0, -0.0
    rows[3] *= 2.0**120
    rows[4] *= 2.0**-125
    rows[5] *= 2.0**-140
    rows[6, 2:5] = -0.0, 1e-42, -1e-42
    rows[7, 40], rows[8, -1] = np.nan, -np.inf
    for i, extreme in enumerate(EXTREME):
        rows[9 + i] = np.resize(extreme, shape[axis])
    return np.moveaxis(rows.reshape(np.moveaxis(x, axis, -1).shape), -1, axis).astype(np.float32)


def assert_same_bytes(x, scheme, axis=-1, **given):
    """Both backends' leaves are the same to the bit, and so are the numbers that they decode to."""
    reference = quantize(x, scheme, axis=axis, backend="reference", **given)
    native = quantize(x, scheme, axis=axis, backend="cpu", **given)
    assert jax.tree.structure(reference) == jax.tree.structure(native)
    for path, expected in jax.tree_util.tree_leaves_with_path(reference):
        got = dict(jax.tree_util.tree_leaves_with_path(native))[path]
        assert got.dtype == expected.dtype and got.shape == expected.shape
        got, expected = (np.asarray(leaf).copy() for leaf in (got, expected))
        if got.dtype != np.uint8:  # which NaN is not told
            got[np.isnan(got)], expected[np.isnan(expected)] = np.nan, np.nan
        different = got.view(np.uint8) != expected.view(np.uint8)
        assert not different.any(), f"{path}: {different.sum()} bytes differ, the first at {np.argwhere(different)[0]}"
    assert_same_numbers(*(dequantize(reference, backend=name) for name in ("reference", "cpu")))


def assert_same_numbers(one, two):
    """The same dtype, and the same numbers with the same signs of zeros."""
    assert one.dtype == two.dtype
    one, two = (np.asarray(y).astype(np.float32) for y in (one, two))
    np.testing.assert_array_equal(one, two)
    is_number = ~np.isnan(one)
    np.testing.assert_array_equal(np.signbit(one[is_number]), np.signbit(two[is_number]))


# The reference takes most of the time, to compile: each kind on one axis here, on the other in the whole suite.
TURNED = [(scheme, -1 - place % 2) for place, scheme in enumerate(KINDS)]
OTHER_AXES = [
    *((scheme, -3 - axis) for scheme, axis in TURNED),
    *(pytest.param(scheme, axis, marks=pytest.mark.long) for scheme in OTHERS for axis in (-1, -2)),
]


def assert_near(x, q, y):
    """Finite numbers, each within two steps of its tile of what it was, as long as float16 holds the scale.

    Half a step is rounding; a power of two that ends where its largest code is finite takes up to two from what saturates.
    """
    assert np.isfinite(y).all()
    if q.scheme.scale == np.float16 or isinstance(q.scheme.scale, fb.Scheme) or isinstance(q.scheme.calibration, AbsMean):
        return
    numbers = np.unique(q.scheme.format.values()[np.isfinite(q.scheme.format.values())])
    step = np.diff(numbers).max() * np.abs(laws.spread(laws.scale_of(q), q))
    vanishing = 2.0**-40 * np.abs(x).max() if q.scheme.tensor_scale else TINY  # below the smallest scale of such a tensor
    assert (np.abs(y.astype(np.float64) - x) <= 2.0001 * step + vanishing).all()


@pytest.mark.finding(19)
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "axis"), TURNED)
def test_every_kind_of_scheme(scheme, axis):
    x = hard((36, 101) if axis == -1 else (101, 36), axis)
    assert_same_bytes(jnp.asarray(x), scheme, axis)
    finite = np.where(np.isfinite(x), x, 0)  # tiles that are whole arrays lose all to one NaN
    assert_same_bytes(jnp.asarray(finite), scheme, axis)
    q = quantize(jnp.asarray(finite), scheme, axis=axis, backend="cpu")
    assert_near(finite, q, np.asarray(dequantize(q, backend="cpu")))


@pytest.mark.finding(19)
@pytest.mark.parametrize("scheme", ["uint2", "uint8", "q4_1"])
def test_a_range_beyond_float32(scheme):
    x = np.resize(np.float32([3e38, -3e38, 1e38, 0]), (1, 32))
    assert_same_bytes(jnp.asarray(x), scheme)
    q = quantize(jnp.asarray(x), scheme, backend="reference")
    assert_near(x, q, np.asarray(dequantize(q, backend="reference")))


def test_the_offset_of_a_tile_below_the_normal_range_is_plus_zero():
    x = np.resize(np.float32([TINY / 2, -TINY / 4]), (1, 32))
    for backend in ("reference", "cpu"):
        zero = np.asarray(quantize(jnp.asarray(x), "q4_1", backend=backend).zero_point)
        assert (zero == 0).all() and not np.signbit(zero).any()


@pytest.mark.finding(19)
@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "axis"), OTHER_AXES)
def test_every_other_scheme(scheme, axis):
    x = hard((36, 101) if axis == -1 else (101, 36), axis)
    assert_same_bytes(jnp.asarray(x), scheme, axis)
    assert_same_bytes(jnp.asarray(np.where(np.isfinite(x), x, 0)), scheme, axis)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "fields",
    [
        {"format": "e4m3fn", "calibration": "absmax"},
        {"format": "e2m1", "calibration": "absmax,0.7"},
        {"format": "nf4", "calibration": "absmax,1.5"},
        {"format": "int4", "calibration": "minmax"},
        {"format": "uint4", "calibration": "minmax", "zero_point": "float32"},
        {"format": "uint8", "calibration": "absmax", "zero_point": "int8"},
    ],
)
def test_ranges_under_powers_of_two(fields, axis):
    scheme = fb.scheme({"tile": {"-1": 32}, "scale": "e8m0", **fields})
    assert_same_bytes(hard((96, 96), axis), scheme, axis)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["int8", "q4_1", "nvfp4", "nf4"])
def test_half_precision_is_widened_first(scheme, dtype):
    x = jnp.asarray(np.clip(hard((36, 101), -1), -60000, 60000)).astype(dtype)
    assert_same_bytes(x, scheme)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int8_narrow", "fp8", "fp8_e5m2", "fp8_e4m3fnuz", "mxint8"])
def test_every_bfloat16_number_in_units_of_a_given_scale(scheme):
    every = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(256, 256)
    tiles = np.where(np.isfinite(every.astype(np.float32)), every, 0)
    scale = jnp.full((256, 8 if scheme == "mxint8" else 1), 0.37)
    assert_same_bytes(jnp.asarray(tiles), scheme, scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shape", "axis"),
    [
        ("int4_g32", (3, 5, 7, 40), -1),
        ("int4_g32", (3, 40, 9), -2),
        ("int3", (40, 3, 5), 0),
        ("nvfp4", (3, 40, 9), -2),
        ("fp8_tensor", (3, 5, 8), -1),
        ("uint5_g10", (3, 37, 9), -2),
        ("mxfp6", (64,), -1),
        ("int4", (1, 1), -1),
        ("nvfp4_16x16", (2, 37, 45), -1),
    ],
)
def test_odd_shapes(scheme, shape, axis):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    assert_same_bytes(jnp.asarray(x), scheme, axis)


# Tiles too large for the cache are read twice, and longer rows than a thread takes are cut; small tiles go sixteen at a time.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shape", "axis"),
    [
        ("uint4", (3000, 300), -2),
        ("fp8_tensor", (700, 1500), -1),
        ("int8", (2, 600_001), -1),
        ("int4_g64", (640, 2100), -2),
        ("int4_g64", (9, 2100), -1),
        ("nvfp4_absmax", (9, 300), -1),
    ],
)
def test_large_arrays(scheme, shape, axis):
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    x.flat[x.size // 2] = np.nan
    assert_same_bytes(jnp.asarray(x), scheme, axis)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "avx2"])
@pytest.mark.parametrize("scheme", ["int4", "uint4", "fp8", "nf4", "q4_0", "q4_1", "mxfp4", "nvfp4"])
def test_other_instruction_sets_give_the_same(scheme, isa):
    x = jnp.asarray(hard((36, 101), -1))
    for axis in (-1, -2):
        bound = fb.scheme(scheme).along(axis, 2)
        problem = Quantization(x.shape, "float32", bound)
        best, other = (CpuQuantizer(isa=name).run(problem, x, None, None, None, None) for name in (None, isa))
        for one, two in zip(jax.tree.leaves(best), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(one, two)
        decoding = Decoding(best.shape, "bfloat16", bound, best.tiles)
        assert_same_numbers(*(CpuDequantizer(isa=name).run(decoding, best) for name in (None, isa)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["int3", "q4_1", "mxfp4", "nf4_dq", "fp8_e5m2"])
def test_decoding_into_every_dtype(scheme, dtype):
    q = quantize(jnp.asarray(hard((36, 101), -1)), scheme, backend="reference")
    for array in (q, q.T):
        one, two = (dequantize(array, dtype, backend=name) for name in ("reference", "cpu"))
        assert one.dtype == jnp.dtype(dtype)
        assert_same_numbers(one, two)


def test_decoding_a_signed_single_bit():
    """Its code 1 is -1."""
    scheme = fb.Scheme(fb.FORMATS["int1"], {...: 1, -1: None})
    q = quantize(jnp.asarray([[-1.0, -0.8, 0.3, 0.9]]), scheme, scale=1.0)
    assert dequantize(q, backend="cpu").tolist() == dequantize(q, backend="reference").tolist() == [[-1.0, -1.0, 0.0, 0.0]]


@pytest.mark.slow
def test_scales_chosen_in_jax_meet_the_same_codes():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(6, 64)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(4).uniform(size=(6, 64)), jnp.float32)
    assert_same_bytes(x, "mxfp4", error_weights=weights)
    assert_same_bytes(x, "uint4", scale=0.3, offset=-2.0)
    assert_same_bytes(x, {"format": "int4", "tile": {"*": 1, "-1": 16}, "calibration": "percentile,90"})


def test_vmap_gives_each_matrix_its_own_tensor_scale():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(3, 4, 48)), jnp.float32) * jnp.arange(1.0, 4)[:, None, None]
    mapped = jax.vmap(lambda x: quantize(x, "nvfp4", backend="cpu"))(x)
    for i in range(3):
        alone = quantize(x[i], "nvfp4", backend="reference")
        for one, two in zip(
            jax.tree.leaves(jax.tree.map(lambda leaf, i=i: leaf[i], mapped)), jax.tree.leaves(alone), strict=True
        ):
            np.testing.assert_array_equal(one, two)
    decoded = jax.vmap(lambda q: dequantize(q, backend="cpu"))(mapped)
    np.testing.assert_array_equal(decoded[1], dequantize(quantize(x[1], "nvfp4")))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_row_magnitudes(isa: str):
    x = np.random.default_rng(6).normal(size=(5, 3, 37)).astype(np.float32)
    x[1, 1, 36], x[2, 0, 4], x[3, 2] = np.nan, -np.inf, 0
    found = cpu._row_magnitudes(CpuQuantizer(isa=isa), jnp.asarray(x))
    finite = np.where(np.isfinite(x), np.abs(x), 0).max(axis=-1)
    np.testing.assert_array_equal(found[..., 0], finite)
    np.testing.assert_array_equal(found[..., 1], np.where(np.isfinite(x).all(axis=-1), finite, np.inf))


@pytest.mark.once
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_sampled_tensor_scale_is_the_reference_s(axis: int, monkeypatch: pytest.MonkeyPatch):
    """Rows that are not finite are none of the sample's, whoever finds them."""
    monkeypatch.setattr(tensor_scale, "JUDGED_WHOLE", 2**9)
    monkeypatch.setattr(tensor_scale, "SAMPLE", 2**9)
    x = np.random.default_rng(7).lognormal(0, 2, (64, 1)) * np.random.default_rng(8).normal(size=(64, 48))
    x[3, 7], x[9, 40] = np.inf, np.nan
    jax.clear_caches()
    assert_same_bytes(jnp.asarray(x.astype(np.float32)), "nvfp4", axis=axis)
    jax.clear_caches()


# Each kind of format and of stored scale; scales from the kernel, and scales from JAX (zero points, given, clipped on purpose).
@pytest.mark.parametrize(
    ("scheme", "axis"),
    [
        *(("int8", -1), ("nvfp4", -2), ("mxfp4", -1), ("uint4", -2), ("nf4", -1)),
        *(
            pytest.param(scheme, axis, marks=pytest.mark.slow)
            for scheme, axis in TURNED
            if scheme not in ("nf4_dq", "int8", "mxfp4", "uint4", "nf4", "nvfp4", "nvfp4_16x16", "fp8_block128")
        ),
    ],
)
def test_stochastic_rounding_draws_the_random_numbers_of_the_reference(scheme, axis):
    x = hard((36, 101) if axis == -1 else (101, 36), axis)
    assert_same_bytes(jnp.asarray(np.where(np.isfinite(x), x, 0)), scheme, axis, key=jax.random.key(3))


@pytest.mark.slow
def test_stochastic_rounding_of_non_finite_tiles_and_given_scales():
    x, key = jnp.asarray(hard((36, 96), -1)), jax.random.key(5)
    for scheme in ("int4_g32", "nvfp4_absmax", "mxfp8"):
        assert_same_bytes(x, scheme, key=key)
    assert_same_bytes(jnp.where(jnp.isfinite(x), x, 0), "int8", key=key, scale=0.25)
    assert_same_bytes(x.astype(jnp.bfloat16), dataclasses.replace(fb.scheme("int4_g32"), calibration=AbsMax(0.9)), key=key)
    square = jnp.asarray(np.random.default_rng(1).normal(size=(32, 48)), jnp.float32)
    assert_same_bytes(square, "nvfp4_16x16", key=key)


def test_stochastic_rounding_under_vmap():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4, 32)), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 3)
    for in_axes, given in (((0, None), keys[0]), ((None, 0), keys), ((0, 0), keys)):
        arrays = x if in_axes[0] == 0 else x[0]
        native, reference = (
            jax.vmap(lambda x, key, name=name: quantize(x, "int4_g16", key=key, backend=name), in_axes)(arrays, given)
            for name in ("cpu", "reference")
        )
        for one, two in zip(jax.tree.leaves(native), jax.tree.leaves(reference), strict=True):
            np.testing.assert_array_equal(one, two)


def test_stochastic_rounding_at_every_level():
    """Counters are those of the whole array, so an array is rounded alike at any width of the vectors."""
    x, key = jnp.asarray(np.random.default_rng(3).normal(size=(5, 77)), jnp.float32), jax.random.key(9)
    expected = quantize(x, "int8", key=key, backend="reference")
    for isa in ("portable", "avx2", "avx512", None):
        np.testing.assert_array_equal(quantize(x, "int8", key=key, backend=CpuQuantizer(isa)).codes, expected.codes)


def test_derivatives_are_the_references():
    x = jnp.asarray(np.random.default_rng(6).normal(size=(4, 32)), jnp.float32)

    def loss(x, name):
        q = quantize(x, "int4", backend=name)
        return jnp.sum(dequantize(q, backend=name) ** 2)

    one, two = (jax.jit(jax.grad(loss), static_argnums=1)(x, name) for name in ("reference", "cpu"))
    assert jnp.any(one != 0)
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_what_it_cannot_do_is_said():
    x = jnp.ones((4, 32))
    with pytest.raises(fb.UnsupportedError, match="the random key is rbg; the kernel draws the numbers of threefry2x32"):
        quantize(x, "int8", key=jax.random.key(0, impl="rbg"), backend="cpu")
    with pytest.raises(fb.UnsupportedError, match="elements share random numbers"):
        quantize(x, "int8", key=jax.random.key(0), shared_noise=(0,), backend="cpu")
    with pytest.raises(fb.UnsupportedError, match="where a short last tile is one of several axes"):
        quantize(jnp.ones((20, 32)), "nvfp4_16x16", key=jax.random.key(0), backend="cpu")
    with pytest.raises(fb.UnsupportedError, match="cannot encode dynamic8"):
        quantize(x, {"format": "dynamic8"}, backend="cpu")
    with pytest.raises(fb.UnsupportedError, match="cannot encode e3m0; it encodes integers, minifloats with mantissa bits"):
        quantize(x, fb.Scheme(fb.formats.Minifloat("e3m0", 3, 0, 3)), backend="cpu")
    interleaved = fb.scheme({"format": "int4", "packing": {"interleave": [0, 2, 1, 3]}})
    with pytest.raises(fb.UnsupportedError, match="codes are interleaved"):
        quantize(x, interleaved, backend="cpu")


def test_neighbouring_axes_that_are_cut_alike_are_one():
    assert geometry((2, 3, 4, 5), (1, 1, 1, None), 3) == Geometry(1, 24, 5, 1, 5, False)
    assert geometry((2, 3, 4), (None, None, None), 2) == Geometry(1, 6, 4, 6, 4, False)
    assert geometry((6, 2, 3), (4, 1, 1), 0) == Geometry(1, 6, 6, 4, 1, True)
    assert geometry((2, 3, 4), (None, 1, None), None) is None


def test_without_the_extension_the_reference_runs_and_the_refusal_says_how_to_build(monkeypatch):
    monkeypatch.setattr(cpu, "extension", lambda module: Extension(missing=f"not built here; {HOW_TO_BUILD}"))
    x = jnp.ones((4, 32))
    assert quantize(x, "int8").shape == (4, 32)
    with pytest.raises(fb.UnsupportedError, match="cpu: not built here; install a C"):
        quantize(x, "int8", backend="cpu")


def test_beside_other_devices_it_runs_only_by_name():
    problem = Quantization((4, 32), "float32", fb.scheme("int8"))
    choice = select(QUANTIZERS, problem)
    assert choice.backend.name == "reference"
    assert "XLA cannot split its calls" in choice.reasons["cpu"]


@pytest.mark.parametrize("named", ["quantize", "dequantize"])
def test_a_named_backend_is_not_replaced_on_another_platform(named):
    there, back = ("cpu", None) if named == "quantize" else (None, "cpu")
    traced = jax.jit(lambda x: dequantize(quantize(x, "int8", backend=there), backend=back)).trace(jnp.ones((4, 8)))
    traced.lower(lowering_platforms=("cpu",))
    with pytest.raises(fb.UnsupportedError, match="it runs on cpu, and the program is compiled for tpu"):
        traced.lower(lowering_platforms=("tpu",))

"""Calibrations: their text forms, what they refuse, and each rule against its formula in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import (
    CALIBRATIONS,
    MSE,
    MX,
    NVFP4,
    RMS,
    SNR,
    AbsMax,
    AbsMean,
    AbstractCalibration,
    CentredAbsMax,
    Exact,
    Fixed,
    MinMax,
    Percentile,
    SignedMax,
    parse_calibration,
)
from fewbit.array.scales.calibration import is_lower
from fewbit.errors import QuantError, UnsupportedError
from fewbit.formats import FORMATS

# One object with other than default values for each registered calibration; a new one adds a line here.
EXAMPLES: dict[str, AbstractCalibration] = {
    "absmax": AbsMax(0.9),
    "centred": CentredAbsMax(),
    "fixed": Fixed(-0.123456789, 0.6),
    "minmax": MinMax(0.87654321, 0),
    "rms": RMS(1e-7),
    "absmean": AbsMean(2.5),
    "mse": MSE(20, 0.123456789),
    "snr": SNR(0.25, 0.0125),
    "mx": MX("rceil"),
    "exact": Exact(),
    "nvfp4": NVFP4("four_over_six"),
    "percentile": Percentile(99.999999),
    "signed_max": SignedMax(),
}


@pytest.mark.parametrize("name", CALIBRATIONS.names())
def test_text_round_trip(name: str):
    calibration = EXAMPLES[name]
    assert calibration.name == name
    assert parse_calibration(str(calibration)) == calibration
    assert hash(parse_calibration(str(calibration))) == hash(calibration)
    if all(f.default is not dataclasses.MISSING for f in dataclasses.fields(calibration)):
        default = CALIBRATIONS[name]()
        assert str(default) == name and parse_calibration(name) == default


def test_texts_of_other_programs():
    assert parse_calibration("absmax,0.9") == AbsMax(0.9)
    assert parse_calibration("fixed,-0.6,0.6") == parse_calibration("fixed, 0.6") == Fixed(-0.6, 0.6)
    assert parse_calibration("rms,7") == RMS(7)
    assert str(Fixed(-0.6, 0.6)) == "fixed,-0.6,0.6" and str(RMS(7.0)) == "rms,7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absmx", "unknown calibration 'absmx'; did you mean 'absmax'"),
        ("", "unknown calibration ''"),
        ("absmax,1,2", r"calibration 'absmax' takes at most 1 values \(factor\), got 2"),
        ("centred,1", r"calibration 'centred' takes at most 0 values \(none\), got 1"),
        ("absmax,big", "absmax: factor is 'big', must be a positive number"),
        ("absmax,0", "absmax: factor is 0.0, must be a positive number"),
        ("absmax,-1", "absmax: factor is -1.0"),
        ("absmax,nan", "absmax: factor is nan"),
        ("absmax,inf", "absmax: factor is inf"),
        ("minmax,0", "minmax: factor is 0.0"),
        ("minmax,1,0.5", "minmax: contains_zero is 0.5, must be 0 or 1"),
        ("rms", "calibration 'rms' needs a value for factor"),
        ("rms,x", "rms: factor is 'x'"),
        ("absmean,-2", "absmean: factor is -2.0"),
        ("percentile", "calibration 'percentile' needs a value for percent"),
        ("percentile,0", "percentile: percent is 0.0, must be above 0 and at most 100"),
        ("percentile,101", "percentile: percent is 101.0"),
        ("fixed", r"fixed takes one value \(the magnitude\) or two \(low, high\), got 0"),
        ("fixed,1,2,3", "got 3"),
        ("fixed,1,2", "fixed: the range is 1.0 .. 2.0, must be finite and contain 0"),
        ("fixed,-inf,inf", "must be finite and contain 0"),
        ("fixed,-0.6,x", "fixed: the range is -0.6 .. 'x'"),
        ("fixed,0,0", "fixed: the range is empty"),
        ("mse,1", "mse: steps is 1.0, must be an integer of at least 2"),
        ("mse,2.5", "mse: steps is 2.5"),
        ("mse,inf", "mse: steps is inf"),
        ("mse,nan", "mse: steps is nan"),
        ("mse,8,1", "mse: low is 1.0, must be a fraction between 0 and 1"),
        ("snr,0", "snr: low is 0.0 and step 0.05; both must be fractions between 0 and 1"),
        ("mx,round", "mx: rule is 'round', must be one of floor, rceil, even, threshold, optimal"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_texts_that_are_refused(text: str, message: str):
    with pytest.raises(QuantError, match=message):
        parse_calibration(text)


X = np.random.default_rng(0).standard_normal((16, 70)).astype(np.float32)
TILES = (slice(0, 32), slice(32, 64), slice(64, 70))

_quantize = jax.jit(fb.quantize, static_argnums=1)


def scales_of(calibration: AbstractCalibration, fmt: str, zero_point: object = None, x: np.ndarray = X) -> fb.QArray:
    scheme = fb.Scheme(FORMATS[fmt], {...: 1, -1: 32}, calibration=calibration, zero_point=zero_point)
    return _quantize(jnp.asarray(x), scheme)


def by_tile(rule) -> np.ndarray:
    """The rule on each tile in float64; the last tile has 6 elements only."""
    return np.stack([rule(X[:, tile].astype(np.float64)) for tile in TILES], axis=1)


SYMMETRIC = {
    "absmax": (AbsMax(), lambda t: np.abs(t).max(1)),
    "absmax-factor": (AbsMax(0.75), lambda t: 0.75 * np.abs(t).max(1)),
    "minmax": (MinMax(0.5), lambda t: 0.5 * np.abs(t).max(1)),
    "fixed": (Fixed(-0.5, 2.0), lambda t: np.full(len(t), 2.0)),
    "rms": (RMS(3.0), lambda t: 3 * np.sqrt((t**2).mean(1))),
    "absmean": (AbsMean(2.0), lambda t: 2 * np.abs(t).mean(1)),
    "percentile": (Percentile(90.0), lambda t: np.percentile(np.abs(t), 90, axis=1)),
    "percentile-100": (Percentile(100.0), lambda t: np.abs(t).max(1)),
}


@pytest.mark.parametrize("case", SYMMETRIC)
@pytest.mark.parametrize("fmt", ["int4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("int8_narrow", "nf4", "e2m1"))])
def test_symmetric_rules(case: str, fmt: str):
    calibration, rule = SYMMETRIC[case]
    q = scales_of(calibration, fmt)
    # At most: 31 roundings of a sum, those of a square root, a product and a quotient, each of half a unit in the last place.
    np.testing.assert_allclose(q.scale, by_tile(rule) / FORMATS[fmt].bound, rtol=36 * 2.0**-24)


@pytest.mark.parametrize("calibration", [AbsMax(), MinMax()], ids=str)
def test_absmax_is_exactly_rounded(calibration: AbstractCalibration):
    expected = by_tile(lambda t: np.abs(t).max(1)).astype(np.float32) / np.float32(7.5)
    np.testing.assert_array_equal(scales_of(calibration, "int4").scale, expected)


ASYMMETRIC = {
    "absmax": (AbsMax(0.5), lambda t: -0.5 * np.abs(t).max(1), lambda t: 0.5 * np.abs(t).max(1)),
    "minmax": (MinMax(), lambda t: np.minimum(t.min(1), 0), lambda t: np.maximum(t.max(1), 0)),
    "minmax-free": (MinMax(1.0, 0), lambda t: t.min(1), lambda t: t.max(1)),
    "fixed": (Fixed(-0.5, 2.0), lambda t: np.full(len(t), -0.5), lambda t: np.full(len(t), 2.0)),
    "rms": (RMS(2.0), lambda t: -2 * np.sqrt((t**2).mean(1)), lambda t: 2 * np.sqrt((t**2).mean(1))),
    "percentile": (
        Percentile(80.0),
        lambda t: np.minimum(np.percentile(t, 10, axis=1), 0),
        lambda t: np.maximum(np.percentile(t, 90, axis=1), 0),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASYMMETRIC)
def test_asymmetric_rules(case: str):
    calibration, low_rule, high_rule = ASYMMETRIC[case]
    low, high = by_tile(low_rule), by_tile(high_rule)
    offset = scales_of(calibration, "uint4", "float32")
    # The range is a difference of two rounded numbers, so the roundings count against the larger of them.
    tolerance = 40 * 2.0**-24 * np.maximum(np.abs(low), np.abs(high))
    assert (np.abs(offset.scale - (high - low) / 15) <= tolerance).all()
    assert (np.abs(offset.zero_point - low) <= tolerance).all()
    whole = scales_of(calibration, "uint4", FORMATS["uint4"])
    expected = np.clip(np.rint(-low / ((high - low) / 15)), 0, 15)
    is_tie = np.abs(-low / ((high - low) / 15) % 1 - 0.5) < 1e-4
    assert np.array_equal(np.asarray(whole.zero_point)[~is_tie], expected[~is_tie])


def test_signed_max_takes_the_first_largest_with_its_sign():
    x = np.zeros((3, 32), np.float32)
    x[0, 5], x[0, 9] = -2.0, 2.0
    x[1, 5], x[1, 9] = 2.0, -2.0
    q = scales_of(SignedMax(), "int4", x=x)
    assert np.asarray(q.scale)[:, 0].tolist() == [0.25, -0.25, 1.0]
    expected = by_tile(lambda t: t[np.arange(len(t)), np.abs(t).argmax(1)]).astype(np.float32) / np.float32(-8)
    np.testing.assert_array_equal(scales_of(SignedMax(), "int4").scale, expected)


def test_centred_is_around_the_mean_of_all():
    scheme = fb.Scheme(FORMATS["dynamic8"], {...: 1, -1: 32}, calibration=CentredAbsMax(), zero_point="float32")
    q = _quantize(jnp.asarray(X + 5), scheme)
    mean = (X + 5).astype(np.float64).mean()
    assert q.zero_point.shape == (1, 1)
    np.testing.assert_allclose(q.zero_point.item(), mean, rtol=X.size * 2.0**-24)
    np.testing.assert_allclose(
        q.scale, np.stack([np.abs((X + 5)[:, t] - mean).max(1) for t in TILES], 1), atol=X.size * 2.0**-24 * 5
    )
    assert np.abs(fb.dequantize(q) - (X + 5)).max() < 0.1


@pytest.mark.parametrize(
    ("calibration", "fmt", "zero_point", "message"),
    [
        (CentredAbsMax(), "int8", None, "centred needs a scheme with a float offset"),
        (SignedMax(), "uint4", None, "signed_max needs a signed format without a zero point, not uint4"),
        (SignedMax(), "int4", "float32", "signed_max needs a signed format without a zero point"),
    ],
    ids=["centred", "signed_max-unsigned", "signed_max-offset"],
)
def test_unsuited_targets_are_refused(calibration: AbstractCalibration, fmt: str, zero_point: object, message: str):
    with pytest.raises(UnsupportedError, match=message):
        fb.quantize(
            jnp.ones((1, 32)), fb.Scheme(FORMATS[fmt], {...: 1, -1: 32}, calibration=calibration, zero_point=zero_point)
        )


def test_signed_max_of_tiles_of_one_element_is_that_element():
    x = jnp.asarray([[3.0, -5.0, 0.0]])
    np.testing.assert_array_equal(fb.dequantize(fb.quantize(x, "q4_0_g1", axis=-2)), x)


def test_signed_max_needs_one_tiled_axis():
    with pytest.raises(UnsupportedError, match="signed_max needs a tile on one axis only"):
        fb.quantize(jnp.ones((32, 32)), fb.Scheme(FORMATS["int4"], {-1: 32, -2: 32}, calibration=SignedMax()))


def test_fixed_ranges_saturate():
    q = scales_of(Fixed(-0.5, 0.5), "int8_narrow")
    assert np.abs(fb.dequantize(q)).max() <= 0.5 * (1 + 2.0**-23)
    inside = np.abs(X) <= 0.5
    assert np.abs(fb.dequantize(q) - X)[inside].max() <= 0.5 / 127 / 2 * (1 + 1e-5)


@pytest.mark.parametrize("magnitude", [1e38, 1e-30])
@pytest.mark.parametrize("calibration", [RMS(2.0), AbsMean(1.5)], ids=str)
def test_means_neither_overflow_nor_underflow(calibration: AbstractCalibration, magnitude: float):
    q = scales_of(calibration, "int8_narrow", x=np.full((2, 64), magnitude, np.float32))
    np.testing.assert_allclose(q.scale, magnitude * calibration.factor / 127, rtol=2.0**-20)


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["float32", "bfloat16", "float16", "e4m3fn", "e5m2", "ue4m3", "ue5m3", "ue4m4"])
def test_a_scale_is_the_nearest_that_its_holder_has(holder: str):
    held = FORMATS[holder] if holder in FORMATS else holder  # noqa: SIM401 - a Registry has no get
    q = _quantize(jnp.asarray(X), fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, scale=held))
    ideal = by_tile(lambda t: np.abs(t).max(1)).astype(np.float32) / np.float32(7.5)
    if holder in FORMATS:
        numbers = held.values()[np.isfinite(held.values())]
        got = held.values()[np.asarray(q.scale)]
        assert (np.abs(got - ideal) == np.abs(ideal[..., None] - numbers).min(-1)).all()
    else:
        np.testing.assert_array_equal(np.asarray(q.scale), ideal.astype(jnp.dtype(holder)))


RANGES_AND_MEANS = ("absmax", "minmax", "fixed,-0.5,2", "rms,3", "percentile,90", "absmean")


@pytest.mark.parametrize(
    "text", [*RANGES_AND_MEANS[:2], *(pytest.param(t, marks=pytest.mark.slow) for t in RANGES_AND_MEANS[2:])]
)
def test_powers_of_two_cover_the_range_that_is_mapped_to_the_codes(text: str):
    scheme = fb.Scheme(FORMATS["int8"], {...: 1, -1: 32}, calibration=parse_calibration(text))
    ideal = np.asarray(fb.quantize(X, scheme).scale)
    powers = dataclasses.replace(scheme, scale=FORMATS["e8m0"])
    for backend in (None, "reference"):
        scale = FORMATS["e8m0"].values()[np.asarray(fb.quantize(X, powers, backend=backend).scale)]
        if text == "absmean":  # no range
            assert (np.abs(scale - ideal) <= np.minimum(np.abs(scale * 2 - ideal), np.abs(scale / 2 - ideal))).all()
        else:
            assert ((ideal <= scale) & (scale < 2 * ideal)).all()


def test_powers_of_two_cover_a_range_with_a_zero_point():
    x = np.linspace(0, 22, 32, dtype=np.float32).reshape(1, 32)
    for text in ("minmax", "mse", "snr"):
        scheme = fb.Scheme(
            FORMATS["uint4"], scale=FORMATS["e8m0"], zero_point=FORMATS["uint4"], calibration=parse_calibration(text)
        )
        assert np.abs(fb.dequantize(fb.quantize(x, scheme)) - x).max() <= 1  # steps of 2, since 22 / 15 is above 1


def test_errors_within_2_to_the_minus_16_are_a_tie():
    found = np.float32([1 - 2.0**-14, 1 - 2.0**-18, 1, 1 + 2.0**-18, 0, np.nan])
    assert is_lower(jnp.asarray(found), jnp.ones(6)).tolist() == [True, False, False, False, True, False]
    assert not is_lower(jnp.float32(0), jnp.float32(0))


def test_scales_saturate_and_never_become_zero():
    x = np.float32([[1e-6] * 32, [1e6] * 32, [0.0] * 32])
    q = _quantize(jnp.asarray(x), fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, scale=FORMATS["e4m3fn"]))
    values = FORMATS["e4m3fn"].values()[np.asarray(q.scale)[:, 0]]
    assert values.tolist() == [2.0**-9, 448.0, 1.0]
    half = _quantize(jnp.asarray(x * np.float32(1e-3)), fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, scale="float16"))
    assert np.asarray(half.scale)[0, 0] == np.float16(2.0**-24)

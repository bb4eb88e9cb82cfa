"""Searches over stored scales: no scale that can be stored is better, by float64 brute force over every one of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, MX, NVFP4, AbsMax
from fewbit.array.scales.search.candidates import is_nested, last_useful_scale, needed_doublings, needed_halvings
from fewbit.errors import QuantError, UnsupportedError
from fewbit.formats import FORMATS, Codebook
from tests.array.scales.brute_force import KINDS, SLACK, blocks, every_error, stored

_quantize = jax.jit(fb.quantize, static_argnums=1)
_weighted = jax.jit(lambda x, w, scheme: fb.quantize(x, scheme, error_weights=w), static_argnums=2)

# Format, holder of the scales, tile: the pairs of sections 1 and 3, fast ones first.
CASES = [
    ("e2m1", "e4m3fn", 16),
    ("e2m1", "e8m0", 64),
    ("int8_narrow", "e4m3fn", 32),
    ("nf4", "ue5m3", 16),
    ("e2m1", "e4m3fn", 32),
    ("e2m1", "e4m3fn", 48),
    ("e2m1", "ue5m3", 16),
    ("e2m1", "ue4m4", 16),
    ("int4_narrow", "e4m3fn", 16),
    ("int4_narrow", "e4m3fn", 32),
    ("int4", "e4m3fn", 16),
    ("int8_narrow", "e4m3fn", 64),
    ("int8_narrow", "e4m3fn", 128),
    ("int8_narrow", "e4m3fn", 256),
    ("e2m1", "e8m0", 16),
    ("e2m1", "e8m0", 32),
    ("e2m1", "e8m0", 128),
    ("e2m1", "e8m0", 256),
    ("e2m1", "e8m0", 800),
    ("e2m3", "e8m0", 32),
    ("e3m2", "e8m0", 32),
    ("e4m3fn", "e8m0", 32),
    ("e5m2", "e8m0", 32),
    ("mxint8_element", "e8m0", 32),
    ("mxint8_element", "e8m0", 128),
    ("nf4", "e8m0", 64),
    ("ternary", "e4m3fn", 32),
]


def scheme(fmt: str, holder: str, tile: int, calibration=MSE()) -> fb.Scheme:  # noqa: B008 - frozen
    return fb.Scheme(FORMATS[fmt], {...: 1, -1: tile}, scale=FORMATS[holder], calibration=calibration)


def chosen(q: fb.QArray, holder: str, errors: np.ndarray) -> np.ndarray:
    """The error of each row under the scale that was stored."""
    values = FORMATS[holder].values()[np.asarray(q.scale)[:, 0]]
    return errors[np.arange(len(errors)), np.searchsorted(stored(holder), values).clip(0, errors.shape[1] - 1)]


def every_kind(fmt: str, holder: str, tile: int, count: int) -> np.ndarray:
    scales = stored(holder)
    scales = scales[(scales > 2.0**-30) & (scales < 2.0**30)]
    return np.concatenate([blocks(kind, tile, count, fmt, scales) for kind in KINDS])


def marks(place: int, weighted: bool) -> list[pytest.MarkDecorator]:
    """The first case is fast; with weights three in four are left to `make test-long`."""
    return [pytest.mark.slow] * (place > 0) + [pytest.mark.long] * (weighted and place % 4 > 0)


@pytest.mark.parametrize(
    ("case", "weighted"),
    [
        pytest.param(case, weighted, id=f"{'-'.join(map(str, case))}-{kind}", marks=marks(place, weighted))
        for kind, weighted in (("plain", False), ("weighted", True))
        for place, case in enumerate(CASES)
    ],
)
def test_no_stored_scale_is_better(case: tuple[str, str, int], weighted: bool, block_count: int):
    fmt, holder, tile = case
    x, scales = every_kind(fmt, holder, tile, block_count), stored(holder)
    rng = np.random.default_rng(0)
    weights = (rng.exponential(1, x.shape) * (rng.random(x.shape) < 0.8)).astype(np.float32) if weighted else None
    if weights is None:
        q, naive = (
            _quantize(jnp.asarray(x), scheme(*case, c)) for c in (MSE(), MX("rceil") if holder == "e8m0" else AbsMax())
        )
    else:
        q, naive = _weighted(x, weights, scheme(*case)), _quantize(jnp.asarray(x), scheme(*case, AbsMax()))
    shown = np.abs(x).max(1) > 2.0**-100  # below, a tile is zero
    errors = every_error(x, scales, fmt, weights)
    errors = np.where(scales * FORMATS[fmt].max > np.finfo(np.float32).max, np.inf, errors)  # they would decode to infinity
    best = chosen(q, holder, errors)
    slack = 1 + 2.0**-16 + tile * 2.0**-23  # a tie, and the rounding of two sums, as `is_lower` says
    assert (best <= errors.min(1) * slack)[shown].all()
    assert (best <= chosen(naive, holder, errors) * slack)[shown].all()


def test_what_is_proven_about_formats():
    e2m1 = FORMATS["e2m1"]
    # fp4-and-layouts, section 2: one halving up to 145 elements, two up to 721.
    assert [needed_halvings(e2m1, k) for k in (1, 17, 32, 128, 145, 146, 721, 722)] == [1, 1, 1, 1, 1, 2, 2, 3]
    nested = ["e2m1", "e2m3", "e3m2", "e4m3fn", "e5m2", "mxint8_element", "int4", "int8_narrow", "ternary", "uint4"]
    assert all(is_nested(FORMATS[f]) and needed_doublings(FORMATS[f]) == 0 for f in nested)
    assert not is_nested(FORMATS["nf4"]) and needed_doublings(FORMATS["nf4"]) == 5
    reach = last_useful_scale(e2m1, FORMATS["e4m3fn"]) - np.arange(126)
    assert reach[7:100].tolist() == [7] * 93 and (reach[:7] + np.arange(7)).tolist() == [14] * 7


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tile_that_is_not_finite_stops_no_search(value: float):
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    plain = _quantize(jnp.asarray(x), scheme("e2m1", "e4m3fn", 16))
    x[1, 3] = value
    q = _quantize(jnp.asarray(x), scheme("e2m1", "e4m3fn", 16))
    same = np.ones((4, 2), bool)
    same[1, 0] = False
    assert np.array_equal(np.asarray(q.scale)[same], np.asarray(plain.scale)[same])
    assert np.isnan(fb.dequantize(q)).sum() == 16


def test_learned_and_asymmetric_tables_have_their_scales_searched():
    table = Codebook("lopsided", (-1.0, -0.3, 0.0, 0.2, 0.5, 2.0))
    x = np.concatenate([blocks(kind, 16, 50, "nf4", stored("e4m3fn")) for kind in KINDS[:3]])
    spec = fb.Scheme(table, {...: 1, -1: 16}, scale=FORMATS["e4m3fn"], calibration=MSE())
    q = _quantize(jnp.asarray(x), spec)
    numbers = np.unique(table.values())
    middles = (numbers[1:] + numbers[:-1]) / 2
    errors = [((numbers[np.searchsorted(middles, x / s)] * s - x.astype(np.float64)) ** 2).sum(1) for s in stored("e4m3fn")]
    errors = np.stack(errors, 1)
    assert (chosen(q, "e4m3fn", errors) <= errors.min(1) * SLACK)[np.abs(x).max(1) > 0].all()


def test_searches_have_no_gradient_and_stop_none():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 32)), jnp.float32)
    w = jnp.ones_like(x)
    spec = scheme("e2m1", "e4m3fn", 16)
    gradient = jax.grad(lambda x: (fb.dequantize(fb.quantize(x, spec, error_weights=w)) * x).sum())(x)
    np.testing.assert_allclose(gradient, fb.dequantize(fb.quantize(x, spec, error_weights=w)), rtol=1e-6)


# --- the cheap rules ---


def relative_error(x: np.ndarray, spec: fb.Scheme) -> float:
    dense = np.asarray(fb.dequantize(_quantize(jnp.asarray(x), spec)), np.float64)
    return 100 * float(np.linalg.norm(dense - x) / np.linalg.norm(x.astype(np.float64)))


@pytest.mark.slow
def test_cheap6_is_close_to_the_optimum_and_never_below_its_six():
    x = np.random.default_rng(0).standard_normal((1024, 64)).astype(np.float32)
    nvfp4 = fb.scheme("nvfp4")
    cheap = relative_error(x, dataclasses.replace(nvfp4, calibration=NVFP4("cheap6")))
    optimal = relative_error(x, nvfp4)
    assert 1 < (cheap / optimal) ** 2 < 1.008  # section 3.2: 1.004
    assert dataclasses.replace(nvfp4, calibration=NVFP4()).to_json()["calibration"] == "nvfp4"


def four_over_six(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """The codes of the block scales and the tensor scale by the rule, in float64 NumPy."""
    numbers, largest = stored("e4m3fn"), np.abs(x).max()
    unit = np.float32(np.float64(largest) / (6 * 256))

    def nearest(value: np.ndarray) -> np.ndarray:
        upper = np.searchsorted(numbers, value).clip(1, len(numbers) - 1)
        low, high = numbers[upper - 1], numbers[upper]
        even_low = (upper - 1 + 1) % 2 == 0  # codes are places plus one
        goes_up = (value - low > high - value) | ((value - low == high - value) & ~even_low)
        return upper - 1 + goes_up

    six = np.float32(np.abs(x).max(1) / np.float32(6)) / unit
    places = np.stack([nearest(six.astype(np.float64)), nearest(six.astype(np.float64) * 1.5)], 1)
    errors = every_error(x, np.float64(np.float32(numbers * unit)), "e2m1")
    six_error, four_error = np.take_along_axis(errors, places, 1).T
    return np.where(four_error < six_error, places[:, 1], places[:, 0]) + 1, unit


def test_four_over_six_is_its_rule():
    x = np.random.default_rng(0).standard_normal((2000, 16)).astype(np.float32)
    q = _quantize(jnp.asarray(x), dataclasses.replace(fb.scheme("nvfp4"), calibration=NVFP4("four_over_six")))
    codes, unit = four_over_six(x)
    np.testing.assert_allclose(np.asarray(q.tensor_scale).item(), unit, rtol=2.0**-23)
    assert (np.asarray(q.scale)[:, 0] == codes).mean() > 0.998  # the rest lie on a midpoint, or tie
    assert np.asarray(q.scale).max() <= FORMATS["e4m3fn"].encode(jnp.float32(384))
    scale = FORMATS["e4m3fn"].values()[np.asarray(q.scale)[:, 0]] * unit
    top = np.abs(x).max(1) / scale
    assert ((np.abs(top - 6) < 0.4) | (np.abs(top - 4) < 0.3)).all()


def test_without_a_tensor_scale():
    x = (np.random.default_rng(0).standard_normal((2048, 64)) * 0.02).astype(np.float32)
    plain = fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 16}, scale=FORMATS["e4m3fn"], calibration=AbsMax())
    errors = [
        relative_error(x, dataclasses.replace(plain, calibration=c)) for c in (AbsMax(), NVFP4("four_over_six"), MSE())
    ]
    # fp4-and-layouts 1.6: 10.33 naive, 8.92 optimal; small scales are coarse.
    assert abs(errors[0] - 10.33) < 0.06 and abs(errors[2] - 8.92) < 0.06 and errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (scheme("int4", "e4m3fn", 16, NVFP4("four_over_six")), "nvfp4,four_over_six is a rule for e2m1, not int4"),
        (scheme("e2m1", "e8m0", 16, NVFP4()), "nvfp4,cheap6 needs a symmetric scheme whose scales are stored in E4M3"),
        (scheme("e3m2", "e8m0", 16, MX("threshold")), "mx,threshold is known for e2m1 only, not e3m2"),
    ],
    ids=["format", "holder", "threshold"],
)
def test_rules_refuse_other_schemes(spec: fb.Scheme, message: str):
    with pytest.raises(UnsupportedError, match=message):
        fb.quantize(jnp.ones((1, 16)), spec)


def test_unknown_rules_are_named():
    with pytest.raises(
        QuantError, match="nvfp4: rule is 'best', must be one of cheap6, four_over_six; the exact search is mse"
    ):
        NVFP4("best")


def test_the_threshold_doubles_from_its_mantissa_on():
    below = np.nextafter(np.float32(1.8125), np.float32(0))
    scale = _quantize(jnp.asarray(np.float32([[below], [1.8125], [1.0]])), scheme("e2m1", "e8m0", 1, MX("threshold"))).scale
    assert np.asarray(scale)[:, 0].tolist() == [125, 126, 125]

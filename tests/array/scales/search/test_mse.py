"""Searches for the scale of least squared error: NVFP4 against every E4M3 code, grids against NumPy, published errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, SNR, AbsMax, AbstractCalibration
from fewbit.array.scales.search.stored import proven_window
from fewbit.formats import FORMATS
from tests.array.scales.test_mx import SLACK
from tests.conformance import array_laws as laws

E4M3 = FORMATS["e4m3fn"].values()[1:127]
"""The 126 positive scales of NVFP4, of codes 1 .. 126."""

_quantize = jax.jit(fb.quantize, static_argnums=1)


SEARCH = MSE(tensor="amax")
"""The search of the tiles' scales; the tensor scale is that of the largest element, so that tests know it."""


def nvfp4(tile: int = 16, calibration: AbstractCalibration = SEARCH, fmt: str = "e2m1") -> fb.Scheme:
    return fb.Scheme(FORMATS[fmt], {...: 1, -1: tile}, scale=FORMATS["e4m3fn"], tensor_scale=True, calibration=calibration)


def sweep(x: np.ndarray, unit: float, fmt: str = "e2m1", weights: np.ndarray | None = None) -> np.ndarray:
    """The squared error of each row for each of the 126 scales, float64: `[row, code - 1]`."""
    numbers = np.unique(FORMATS[fmt].values())
    numbers = numbers[numbers >= FORMATS[fmt].min]
    middles = (numbers[1:] + numbers[:-1]) / 2
    errors = np.empty((len(x), len(E4M3)))
    for i, value in enumerate(E4M3):
        scale = np.float64(np.float32(value * unit))
        squared = (numbers[np.searchsorted(middles, x / scale)] * scale - x) ** 2
        errors[:, i] = (squared if weights is None else squared * weights).sum(1)
    return errors


def errors_of(q: fb.QArray, errors: np.ndarray) -> np.ndarray:
    return errors[np.arange(len(errors)), np.asarray(q.scale)[:, 0].astype(int) - 1]


def hard_blocks(tile: int) -> np.ndarray:
    """Rows around every scale there is: the tensor's largest element makes its own scale exactly 1."""
    rng = np.random.default_rng(tile)
    parts = [rng.standard_normal((1500, tile)) * 2.0 ** rng.uniform(-12, 8, (1500, 1))]
    # Elements on the midpoints of the grid of a random scale, where another scale gains most.
    steps = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], (1500, tile))
    parts.append(steps * rng.choice(E4M3, (1500, 1)) * rng.choice([-1, 1], (1500, tile)))
    parts.append(np.full((40, tile), 1.0) * 2.0 ** rng.uniform(-12, 11, (40, 1)))
    top = rng.uniform(0, 2688, (200, tile))
    top[:, 0] = 2688
    x = np.clip(np.concatenate([*parts, top]), -2688, 2688)
    return np.concatenate([x, np.zeros((2, tile))]).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [16, 32])
def test_nvfp4_search_equals_the_sweep_of_all_scales(tile: int):
    x = hard_blocks(tile)
    q = _quantize(jnp.asarray(x), nvfp4(tile))
    assert np.asarray(q.tensor_scale).item() == 1.0
    errors = sweep(x.astype(np.float64), 1.0)
    best = errors_of(q, errors)
    assert (best[:-2] <= errors[:-2].min(1) * SLACK).all()
    naive = errors_of(_quantize(jnp.asarray(x), nvfp4(tile, AbsMax())), errors)
    assert (best <= naive * SLACK).all()


WITNESSES = {  # tiles whose best scale lies at an end of the window of candidates, and that scale
    "16: four below": ([0.40625] * 8 + [4.5] * 2 + [5.0] * 5 + [6.0006], 0.8125),
    "16: four below, another mantissa": ([0.375] * 6 + [1.125] * 3 + [4.375] * 5 + [4.8125, 5.6256], 0.75),
    "16: six above": ([2.34375] * 3 + [2.84375] * 2 + [3.125] * 7 + [4.125] * 3 + [7.5], 2.0),
    "16: code 15 of the lowest": ([2.0**-9 * 7.5] * 5 + [2.0**-9 * 22.5] * 5 + [2.0**-9 * 45] * 6, 15 * 2.0**-9),
    "16: constant": ([0.002] * 16, 2.0**-9),
    "16: smallest": ([2.0**-9 * 6] * 16, 2.0**-9),
    "16: largest": ([448.0 * 6] * 16, 448.0),
    "32: five below": (
        [0.375] * 18 + [2.84375] * 6 + [4.0625] + [4.375] * 2 + [4.6875] + [4.875] * 3 + [6.0006],
        0.75,
    ),
    "32: six above": ([4.0625] * 8 + [6.0] * 11 + [6.5] * 10 + [7.5] * 3, 2.0),
    "32: code 15 of the lowest": ([2.0**-9 * 7.5] * 10 + [2.0**-9 * 22.5] * 10 + [2.0**-9 * 45] * 12, 15 * 2.0**-9),
}


@pytest.mark.finding(33)
@pytest.mark.parametrize("name", WITNESSES)
def test_nvfp4_witnesses(name: str):
    # Both ends of the window are needed for either tile length, and the subnormal scales are not flushed.
    elements, scale = WITNESSES[name]
    tile = len(elements)
    x = np.zeros((2, tile), np.float32)
    x[0], x[1, 0] = elements, 2688
    q = _quantize(jnp.asarray(x), nvfp4(tile))
    assert np.asarray(q.tensor_scale).item() == 1.0
    errors = sweep(x[:1].astype(np.float64), 1.0)[0]
    assert errors[np.searchsorted(E4M3, scale)] <= errors.min() * SLACK  # the witness is one
    assert errors[np.asarray(q.scale)[0, 0].astype(int) - 1] <= errors.min() * SLACK


@pytest.mark.finding(33)
@pytest.mark.parametrize("tile", [16, 32])
def test_every_witness_dies_with_a_narrower_window(tile: int):
    """No candidate at an end of the proven window can be left out: some witness has its best scale there, and only there."""
    first, last = proven_window(FORMATS["e2m1"], FORMATS["e4m3fn"], tile)
    needed = set()
    for elements, _ in WITNESSES.values():
        if len(elements) == tile:
            x = np.asarray([elements], np.float32).astype(np.float64)
            errors = sweep(x, 1.0)[0]
            ceiling = int(np.searchsorted(E4M3, np.float32(x.max()) / np.float32(6)))
            best = [i for i in range(first[ceiling], last[ceiling] + 1) if errors[i] <= errors.min() * SLACK]
            if len(best) == 1:
                needed.add((ceiling < 8, best[0] - ceiling if ceiling >= 8 else best[0]))
    assert {(False, -4 if tile == 16 else -5), (False, 6), (True, 14)} <= needed


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int4_narrow", "e2m1"])
def test_other_formats_and_weights_sweep_every_scale(fmt: str):
    x = hard_blocks(16)[::4]
    weights = np.random.default_rng(1).uniform(0, 1, x.shape).astype(np.float32)
    weights = None if fmt == "int4_narrow" else weights
    spec = nvfp4(16, SEARCH, fmt)
    q = jax.jit(lambda x, w: fb.quantize(x, spec, error_weights=w))(x, weights)
    unit = np.asarray(q.tensor_scale).item()
    errors = sweep(x.astype(np.float64), unit, fmt, weights)
    nonzero = np.abs(x).max(1) > 0
    # The product of a scale and the tensor scale is rounded, which moves an element by at most 2**-24 of itself.
    rounding = 2 * np.sqrt(errors.min(1) * (x.astype(np.float64) ** 2).sum(1)) * 2.0**-22
    assert (errors_of(q, errors) <= errors.min(1) * SLACK + rounding)[nonzero].all()


@pytest.mark.parametrize(
    ("scheme", "expected"), [("nvfp4_absmax", 9.53), ("nvfp4", 8.13), ("nvint4", 8.64)], ids=["absmax", "search", "nvint4"]
)
def test_published_errors_on_gaussian_weights(scheme: str, expected: float):
    # fp4-and-layouts 1.6: relative Frobenius error in percent, the same for any sigma because of the tensor scale. Its
    # own draws differ by 0.03 between sigmas.
    x = np.random.default_rng(0).standard_normal((4096, 128)).astype(np.float32) * np.float32(0.02)
    dense = jax.jit(lambda x: fb.dequantize(fb.quantize(x, scheme)))(x)
    error = 100 * np.linalg.norm(np.asarray(dense, np.float64) - x) / np.linalg.norm(x.astype(np.float64))
    assert abs(error - expected) <= 0.05


def grid_errors(x: np.ndarray, fmt: str, fractions: np.ndarray) -> np.ndarray:
    """The squared error of each row for each fraction of its absmax, float64: `[row, fraction]`."""
    numbers = np.unique(FORMATS[fmt].values())
    numbers = numbers[numbers >= FORMATS[fmt].min]
    middles = (numbers[1:] + numbers[:-1]) / 2
    full = np.abs(x).max(1, keepdims=True) / FORMATS[fmt].bound
    scales = [full * fraction for fraction in fractions]
    return np.stack([((numbers[np.searchsorted(middles, x / s)] * s - x) ** 2).sum(1) for s in scales], axis=1)


GRIDS = {
    "mse": (MSE(), np.linspace(1, 0.3, 64)),
    "snr": (SNR(), np.arange(1, 0.49, -0.05)),
    "mse-few": (MSE(8, 0.5), np.linspace(1, 0.5, 8)),
}


@pytest.mark.parametrize("case", GRIDS)
@pytest.mark.parametrize("fmt", ["int4", *(pytest.param(f, marks=pytest.mark.slow) for f in ("nf4", "int3_narrow"))])
def test_grids_find_the_best_fraction(case: str, fmt: str):
    calibration, fractions = GRIDS[case]
    x = np.random.default_rng(0).standard_t(3, (300, 32)).astype(np.float32)
    q = _quantize(jnp.asarray(x), fb.Scheme(FORMATS[fmt], {...: 1, -1: None}, calibration=calibration))
    errors = grid_errors(x.astype(np.float64), fmt, fractions)
    got = ((laws.numpy_dequantize(q).astype(np.float64) - x) ** 2).sum(1)
    # A scale rounded to float32 moves every number by 2**-23 of itself at most, so the error by at most this.
    rounding = 4 * np.sqrt(errors * (x.astype(np.float64) ** 2).sum(1)[:, None]) * 2.0**-22
    assert (got <= (errors * SLACK + rounding).min(1)).all()
    absmax = laws.numpy_dequantize(_quantize(jnp.asarray(x), fb.Scheme(FORMATS[fmt], {...: 1, -1: None})))
    assert (got <= ((absmax.astype(np.float64) - x) ** 2).sum(1) * SLACK).all()
    assert got.sum() < 0.97 * ((absmax.astype(np.float64) - x) ** 2).sum()


def test_grids_of_asymmetric_schemes_are_never_worse_than_minmax():
    x = np.random.default_rng(0).exponential(1, (200, 32)).astype(np.float32) - np.float32(0.3)
    errors = []
    for calibration in (MSE(), "minmax"):
        spec = (
            fb.SCHEMES["uint4"]
            if calibration == "minmax"
            else fb.Scheme(FORMATS["uint4"], {...: 1, -1: None}, zero_point=FORMATS["uint4"], calibration=calibration)
        )
        dense = np.asarray(fb.dequantize(_quantize(jnp.asarray(x), spec)), np.float64)
        errors.append(((dense - x) ** 2).sum(1))
    assert (errors[0] <= errors[1] * SLACK).all() and errors[0].sum() < 0.97 * errors[1].sum()


def test_weights_move_the_grid():
    x = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    x[:, 0] = 12
    spec = fb.Scheme(FORMATS["int4"], {...: 1, -1: None}, calibration=MSE())
    weights = np.ones_like(x)
    weights[:, 0] = 0
    plain = _quantize(jnp.asarray(x), spec)
    weighted = jax.jit(lambda x, w: fb.quantize(x, spec, error_weights=w))(x, weights)
    # The outlier is worthless, so the smallest fractions of the grid win.
    assert (np.asarray(weighted.scale) < 0.5 * np.asarray(plain.scale)).all()


@pytest.mark.parametrize("exponent", [-60, 60])
@pytest.mark.parametrize("name", ["nvfp4", "mse"])
def test_searches_do_not_depend_on_the_magnitude(name: str, exponent: int):
    # Squares of such numbers would overflow or vanish in float32.
    x = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    spec = fb.SCHEMES["nvfp4"] if name == "nvfp4" else fb.Scheme(FORMATS["int4"], {...: 1, -1: 32}, calibration=MSE())
    a, b = (_quantize(jnp.asarray(x * np.float32(2.0**e)), spec) for e in (0, exponent))
    assert np.array_equal(a.codes, b.codes)
    assert np.array_equal(laws.scale_of(a) * 2.0**exponent, laws.scale_of(b))

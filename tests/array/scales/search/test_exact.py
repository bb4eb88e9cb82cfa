"""The exact search over float scales, against every breakpoint in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, AbsMax, Exact
from fewbit.errors import UnsupportedError
from fewbit.formats import FORMATS
from tests.array.scales.brute_force import KINDS, SLACK, best_continuous, blocks
from tests.conformance import array_laws as laws

FORMATS_WITH_ZERO = ["e2m1", "nf4", "int4", "int3_narrow", "ternary", "bnb_fp4"]

_quantize = jax.jit(fb.quantize, static_argnums=1)


def scheme(fmt: str, calibration=Exact(), scale: str = "float32", tile: int = 16) -> fb.Scheme:  # noqa: B008 - frozen
    return fb.Scheme(FORMATS[fmt], {...: 1, -1: tile}, scale=scale, calibration=calibration)


def error_of(q: fb.QArray, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    squared = (laws.numpy_dequantize(q).astype(np.float64) - x.astype(np.float64)) ** 2
    return (squared if weights is None else squared * weights).sum(1)


def rounding(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """What rounding scale and product to float32 (2**-23 of each number) adds to an error."""
    size = (x.astype(np.float64) ** 2).sum(1)
    return 4 * np.sqrt(error * size) * 2.0**-22 + size * 2.0**-44


@pytest.mark.slow
@pytest.mark.parametrize(
    "fmt", [pytest.param(f, marks=[] if f in ("e2m1", "nf4") else [pytest.mark.slow]) for f in [*FORMATS_WITH_ZERO, "int6"]]
)
def test_no_scale_is_better(fmt: str, block_count: int):
    x = np.concatenate([blocks(kind, 16, block_count, fmt) for kind in KINDS[:4]])
    q = _quantize(jnp.asarray(x), scheme(fmt))
    best = best_continuous(x, fmt)
    assert (error_of(q, x) <= best * SLACK + rounding(x, best)).all()
    naive = error_of(_quantize(jnp.asarray(x), scheme(fmt, AbsMax())), x)
    assert (error_of(q, x) <= naive * SLACK + rounding(x, naive)).all()


def test_weighted():
    x = np.concatenate([blocks(kind, 16, 250, "e2m1") for kind in KINDS[:4]])
    rng = np.random.default_rng(0)
    weights = (rng.exponential(1, x.shape) * (rng.random(x.shape) < 0.8)).astype(np.float32)
    q = jax.jit(lambda x, w: fb.quantize(x, scheme("e2m1"), error_weights=w))(x, weights)
    best = best_continuous(x, "e2m1", weights)
    assert (error_of(q, x, weights) <= best * SLACK + rounding(x, best) * weights.max()).all()


def test_scales_of_half_precision_are_the_best_that_can_be_held():
    x = blocks("gaussian", 8, 40, "e2m1")
    q = _quantize(jnp.asarray(x), scheme("e2m1", scale="bfloat16", tile=8))
    # Every bfloat16 number from a twelfth of the largest element to twice what saturates nothing.
    bits = np.arange(0x7F80, dtype=np.uint16).view(jnp.bfloat16).astype(np.float64)
    for row, error in zip(x, error_of(q, x), strict=True):
        amax = np.abs(row).max()
        tried = bits[(bits > amax / 12) & (bits < amax / 2)]
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        nearest = np.abs(np.abs(row)[:, None, None] / tried[:, None] - numbers).argmin(-1)
        best = ((numbers[nearest] * tried - np.abs(row)[:, None].astype(np.float64)) ** 2).sum(0).min()
        assert error <= best * SLACK


@pytest.mark.parametrize("kind", ["special", "nan"])
def test_special_blocks(kind: str):
    x = blocks("special", 16, 8, "e2m1")
    if kind == "nan":
        x[2, 4] = np.nan
    q = _quantize(jnp.asarray(x), scheme("e2m1"))
    dense = laws.numpy_dequantize(q)
    assert np.isnan(dense).all(1).tolist() == [kind == "nan" and row == 2 for row in range(8)]
    assert (dense[[0, 3]] == 0).all()
    np.testing.assert_allclose(dense[[1, 7]], x[[1, 7]], rtol=2.0**-22)
    assert dense[6, 3] == 7


def test_binary_is_the_mean():
    x = blocks("gaussian", 16, 30, "binary")
    q = _quantize(jnp.asarray(x), scheme("binary"))
    np.testing.assert_allclose(np.asarray(q.scale)[:, 0], np.abs(x).mean(1), rtol=2.0**-18)


@pytest.mark.slow
def test_it_beats_the_grid_and_equals_mse_where_scales_are_few():
    x = jnp.asarray(blocks("gaussian", 16, 64, "e2m1"))
    exact, grid = (error_of(_quantize(x, scheme("e2m1", c)), np.asarray(x)) for c in (Exact(), MSE()))
    assert (exact <= grid * SLACK).all() and exact.sum() < grid.sum()
    nvfp4 = fb.scheme("nvfp4")
    other = fb.Scheme(nvfp4.format, nvfp4.tile, scale=nvfp4.scale, tensor_scale=True, calibration=Exact())
    assert np.array_equal(_quantize(x, nvfp4).scale, _quantize(x, other).scale)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            fb.Scheme(FORMATS["uint4"], {}, zero_point="float32", calibration=Exact()),
            "exact does not support schemes with a zero point",
        ),
        (
            scheme("int8", tile=1024),
            "a tile of 1024 elements has 131072 breakpoints in int8, more than 65536; use a shorter",
        ),
    ],
    ids=["asymmetric", "long"],
)
def test_what_is_out_of_reach_is_refused(spec: fb.Scheme, message: str):
    with pytest.raises(UnsupportedError, match=message):
        fb.quantize(jnp.ones((1, 1024)), spec)

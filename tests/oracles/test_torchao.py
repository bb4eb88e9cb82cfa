"""torchao: MX bytes under three scale rules for every element type, and NVFP4 down to its clamp of small scales."""

import contextlib
import io
import logging
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MX
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws
from tests.oracles.comparing import assert_same_codes, quantize, weights

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
logging.disable(logging.WARNING)
with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
    warnings.simplefilter("ignore")  # it says at import which of its own kernels it could not load
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
logging.disable(logging.NOTSET)

Mode = mx_tensor.ScaleCalculationMode
DTYPES = {
    "e2m1": torch.float4_e2m1fn_x2,
    "e2m3": "fp6_e2m3",
    "e3m2": "fp6_e3m2",
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def mx(element: str, rule: str) -> fb.Scheme:
    return fb.Scheme(FORMATS[element], {...: 1, -1: 32}, scale=FORMATS["e8m0"], calibration=MX(rule))


def theirs(x: np.ndarray, element: str, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """torchao's scale bytes and codes."""
    scale, data = mx_tensor.to_mx(torch.from_numpy(x), DTYPES[element], 32, Mode[rule.upper()])
    data = data.view(torch.uint8).numpy()
    if element == "e2m1":
        data = np.stack([data & 15, data >> 4], axis=-1).reshape(x.shape)
    return scale.view(torch.uint8).numpy().reshape(len(x), -1), data.reshape(x.shape)


@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_mx_bytes(element: str, rule: str):
    x = np.concatenate(
        [weights((32, 128)), weights((8, 128), 1) * np.float32(1e-20), weights((8, 128), 2) * np.float32(1e20)]
    )
    # Every mantissa where a rule turns, at the head of a block, and ties everywhere else.
    heads = np.float32([1, 1.5, 1.75, 1.875, 1.9375, 1.99, 7.5, 448, 449, 480, 57344, 61440])
    ties = np.tile(np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25]), 16)[None] * heads[:, None] / 8
    ties[:, ::32] = heads[:, None]
    x = np.concatenate([x, ties]).astype(np.float32)
    scale, codes = theirs(x, element, rule)
    q = quantize(jnp.asarray(x), mx(element, rule))
    np.testing.assert_array_equal(q.scale, scale)
    np.testing.assert_array_equal(laws.unpacked(q), codes)


def test_zero_and_nan_blocks():
    x = np.zeros((2, 32), np.float32)
    x[1, 5] = np.nan
    for rule in ("floor", "rceil", "even"):
        scale, _ = theirs(x, "e2m1", rule)
        q = quantize(jnp.asarray(x), mx("e2m1", rule))
        # A zero block has the smallest scale there, 1 here; both decode to zeros. NaN is NaN in both.
        assert scale[:, 0].tolist() == [0, 255]
        assert np.asarray(q.scale)[:, 0].tolist() == [127, 255]


def test_nvfp4_bytes():
    x = weights((32, 128))
    unit = nvfp4_tensor.per_tensor_amax_to_scale(torch.tensor(np.abs(x).max().item()))
    scale, data = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16, unit)
    q = quantize(jnp.asarray(x), "nvfp4_absmax")
    assert unit.item() == q.tensor_scale.item()
    scale = scale.view(torch.uint8).numpy()
    np.testing.assert_array_equal(q.scale, scale)
    codes = np.stack([data.numpy() & 15, data.numpy() >> 4], axis=-1).reshape(x.shape)
    # It multiplies by a rounded reciprocal, we divide.
    assert_same_codes(codes, q, x)


def test_nvfp4_small_scales_are_clamped_there():
    # torchao clamps scales to 2**-6, the smallest normal E4M3 number; ours go down to the subnormal 2**-9.
    x = np.full((2, 16), 2688.0, np.float32)
    x[1] = 6 * 2.0**-8
    unit = torch.tensor(1.0)
    scale, _ = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16, unit)
    assert scale.view(torch.uint8).numpy()[:, 0].tolist() == [126, 8]
    q = quantize(jnp.asarray(x), "nvfp4_absmax")
    assert np.asarray(q.scale)[:, 0].tolist() == [126, 2]
    np.testing.assert_array_equal(fb.dequantize(q), x)

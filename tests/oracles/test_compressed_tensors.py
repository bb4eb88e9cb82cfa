"""compressed-tensors: integers by group, NVFP4 and MXFP4 as llm-compressor and vLLM have them."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MX, MinMax
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws
from tests.oracles.comparing import is_clear, quantize, ratios, weights

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages that it imports
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")


def theirs(x: np.ndarray, group: int, unit: object = None, **fields: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Their scale, zero point and quantized numbers, one scale a group of the last axis."""
    args = quantization.QuantizationArgs(group_size=group, **fields)
    groups = torch.from_numpy(x).unflatten(-1, (-1, group))
    scale, zero = helpers.calculate_qparams(groups.amin(-1), groups.amax(-1), args, unit)
    codes = forward.quantize(torch.from_numpy(x), scale.float(), zero, args, global_scale=unit)
    return scale.float().numpy(), zero.float().numpy(), codes.float().numpy()


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_integers(bits: int):
    x = weights()
    scale, _, numbers = theirs(x, 32, num_bits=bits, type="int", symmetric=True, strategy="group")
    q = quantize(jnp.asarray(x), f"int{bits}_g32")
    np.testing.assert_array_equal(q.scale, scale)
    codes = numbers.astype(np.int64) % 2**bits
    np.testing.assert_array_equal(laws.unpacked(q), codes)


def test_asymmetric_integers():
    x = weights()
    scale, zero, numbers = theirs(x, 32, num_bits=4, type="int", symmetric=False, strategy="group")
    spec = fb.Scheme(FORMATS["uint4"], {...: 1, -1: 32}, zero_point=FORMATS["uint4"], calibration=MinMax())
    q = quantize(jnp.asarray(x), spec)
    np.testing.assert_array_equal(q.scale, scale)
    # Its codes and zero points are signed, 8 less than ours.
    np.testing.assert_array_equal(np.rint(zero) + 8, np.asarray(q.zero_point))
    difference = numbers + 8 - laws.unpacked(q)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.001


def test_nvfp4():
    x = weights()
    unit = helpers.generate_gparam(torch.from_numpy(x).amin(), torch.from_numpy(x).amax())
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
    scale, _, numbers = theirs(x, 16, unit, scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn, **fields)
    q = quantize(jnp.asarray(x), "nvfp4_absmax")
    # It holds the reciprocal of our tensor scale, rounded on its own.
    np.testing.assert_allclose(1 / unit.item(), q.tensor_scale.item(), rtol=2.0**-23)
    ours = FORMATS["e4m3fn"].values()[np.asarray(q.scale)]
    same = ours == scale
    assert same.mean() > 0.99, "the E4M3 scales differ only where the two units round to different sides of a midpoint"
    clear = is_clear(ratios(x, q), q.scheme.format) & np.repeat(same, 16, axis=1)
    codes = FORMATS["e2m1"].values()[laws.unpacked(q)]
    np.testing.assert_array_equal(codes[clear], numbers[clear])


def test_mxfp4_is_the_even_rule():
    x = np.concatenate([weights(), np.tile(np.float32([[1.74], [1.75], [1.76], [1.5]]), 128)])
    fields = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group"}
    scale, _, numbers = theirs(x, 32, scale_dtype=torch.uint8, zp_dtype=torch.uint8, **fields)
    spec = fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 32}, scale=FORMATS["e8m0"], calibration=MX("even"))
    q = quantize(jnp.asarray(x), spec)
    np.testing.assert_array_equal(laws.scale_of(q), scale)
    # Scales are powers of two, so nothing is rounded but the elements: ties to even on both sides.
    np.testing.assert_array_equal(FORMATS["e2m1"].values()[laws.unpacked(q)], numbers)

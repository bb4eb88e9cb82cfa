"""bitsandbytes: NF4 and FP4 bytes, and scales that are quantized themselves, in runs of the flattened tensor."""

import contextlib
import io
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import Packing
from fewbit.array.scales import CentredAbsMax
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws
from tests.oracles.comparing import assert_same_codes, is_clear, quantize, ratios, weights

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("ignore")  # it says at import which of its own kernels are missing
    functional = pytest.importorskip("bitsandbytes.functional")


def high_first(fmt: str) -> fb.Scheme:
    return fb.Scheme(FORMATS[fmt], {...: 1, -1: 64}, packing=Packing(high_first=True))


def unpacked(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)


@pytest.mark.parametrize(("kind", "fmt"), [("nf4", "nf4"), ("fp4", "bnb_fp4")])
def test_codes_scales_and_values(kind: str, fmt: str):
    x = weights((32, 128))
    packed, state = functional.quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type=kind)
    q = quantize(jnp.asarray(x.reshape(-1)), high_first(fmt))
    np.testing.assert_array_equal(state.absmax.numpy(), q.scale)
    codes = unpacked(packed.numpy().reshape(-1))
    ours = laws.unpacked(q)
    if kind == "fp4":
        # It has one zero; ours keeps the sign of zero in code 8.
        codes, ours = (np.where(c == 8, 0, c) for c in (codes, ours))
        clear = is_clear(ratios(x.reshape(-1), q), q.scheme.format)
        # Its tree of thresholds is rounded to seven digits.
        clear &= np.abs(ratios(x.reshape(-1), q)) > 1e-6
        assert clear.mean() > 0.999
        np.testing.assert_array_equal(codes[clear], ours[clear])
    else:
        assert_same_codes(codes, q, x.reshape(-1))
    theirs = functional.dequantize_4bit(packed, state).numpy().reshape(-1)
    np.testing.assert_array_equal(fb.dequantize(q)[codes == ours], theirs[codes == ours])


@pytest.mark.finding(32)
def test_dynamic_map_is_theirs():
    table = functional.create_dynamic_map().numpy()
    # Their map is made by torch.linspace and a mean, each rounded as the machine's instruction set has it: two steps of float32.
    np.testing.assert_allclose(np.float32(FORMATS["dynamic8"].table), table, rtol=2.0**-22, atol=0)


def test_nested_scales():
    x = weights((128, 512))
    packed, state = functional.quantize_4bit(torch.from_numpy(x), blocksize=64, quant_type="nf4", compress_statistics=True)
    nested = fb.Scheme(FORMATS["dynamic8"], {-1: 256}, zero_point="float32", calibration=CentredAbsMax())
    spec = fb.Scheme(FORMATS["nf4"], {-1: 64}, scale=nested, packing=Packing(high_first=True))
    q = quantize(jnp.asarray(x.reshape(-1)), spec)
    assert q.scale.shape == (1024,)
    np.testing.assert_allclose(state.offset.item(), q.scale.zero_point.item(), rtol=1024 * 2.0**-24)
    # The means differ by a rounding, and so do the ranges around them.
    np.testing.assert_allclose(state.state2.absmax.numpy(), q.scale.scale, rtol=2.0**-20)
    agree = state.absmax.numpy() == np.asarray(q.scale.codes)
    assert agree.mean() > 0.99
    codes = unpacked(packed.numpy().reshape(-1))
    assert (codes == laws.unpacked(q)).mean() > 0.95
    # It chooses the codes before it quantizes the scales, we after: ours are nearer.
    theirs = functional.dequantize_4bit(packed, state).numpy().reshape(-1)
    error, other = (np.linalg.norm(dense - x.reshape(-1)) for dense in (np.asarray(fb.dequantize(q)), theirs))
    assert error <= other * (1 + 1e-6)


def test_blockwise_8_bit():
    x = weights((4, 1024)).reshape(-1)
    codes, state = functional.quantize_blockwise(torch.from_numpy(x), blocksize=256)
    q = quantize(jnp.asarray(x), fb.Scheme(FORMATS["dynamic8"], {-1: 256}))
    np.testing.assert_array_equal(state.absmax.numpy(), q.scale)
    # Its CPU code looks 8-bit codes up in a coarse table, so a few are not the nearest; ours are.
    ratio, table = ratios(x, q), FORMATS["dynamic8"].values()
    different = codes.numpy() != np.asarray(q.codes)
    assert different.mean() < 0.003
    ours, theirs = (np.abs(table[c] - ratio) for c in (np.asarray(q.codes), codes.numpy()))
    assert (ours <= theirs + np.abs(ratio) * 2.0**-22)[different].all()

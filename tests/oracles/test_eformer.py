"""eFormer: int8 in the narrow range and NF4, where its rule is sound; the rule itself where the package is not installed."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import Packing
from fewbit.formats import FORMATS, nf4
from tests.conformance import array_laws as laws
from tests.oracles.comparing import assert_same_codes, lenient_jax, quantize, weights

pytestmark = pytest.mark.oracle
functions = pytest.importorskip("eformer.ops.quantization.quantization_functions")


def test_int8_codes_and_scales():
    x = weights()
    with lenient_jax():
        codes, scale = functions.quantize_int8(jnp.asarray(x))
    q = quantize(jnp.asarray(x), "int8_narrow")
    # It adds the smallest normal number to amax / 127, which is nothing in float32.
    np.testing.assert_allclose(scale, q.scale, rtol=2.0**-23)
    assert_same_codes(np.asarray(codes).view(np.uint8), q, x)


def test_nf4_bytes_and_scales():
    x = weights((32, 256))
    with lenient_jax():
        packed, absmax = functions.single_quantize_and_pack_nf4(jnp.asarray(x), 64)
    spec = fb.Scheme(nf4, {...: 1, -1: 64}, packing=Packing(high_first=True))
    q = quantize(jnp.asarray(x), spec)
    np.testing.assert_array_equal(np.asarray(absmax).reshape(32, 4), q.scale)
    theirs = np.asarray(packed).reshape(32, 128)
    codes = np.stack([theirs >> 4, theirs & 15], axis=-1).reshape(32, 256)
    assert_same_codes(codes, q, x)


def test_nf4_ties_go_to_the_smaller_number_in_both():
    middles = ((nf4.values()[1:] + nf4.values()[:-1]) / 2).astype(np.float32)
    exact = middles.astype(np.float64) == (nf4.values()[1:] + nf4.values()[:-1]) / 2
    x = np.ones((1, 64), np.float32)
    x[0, : exact.sum()] = middles[exact]
    with lenient_jax():
        packed, _ = functions.single_quantize_and_pack_nf4(jnp.asarray(x), 64)
    theirs = np.asarray(packed).reshape(1, 32)
    codes = np.stack([theirs >> 4, theirs & 15], axis=-1).reshape(1, 64)
    assert exact.sum() > 2
    np.testing.assert_array_equal(laws.unpacked(quantize(jnp.asarray(x), "nf4")), codes)


def test_its_polynomial_decode_differs_and_ours_is_the_table():
    codes = jnp.arange(16, dtype=jnp.uint8)
    with lenient_jax():
        theirs = np.asarray(functions.nf4xf32_to_f32(codes.astype(jnp.float32)))
    ours = np.asarray(nf4.decode(codes))
    assert np.abs(theirs - ours).max() > 0.014
    assert ours[7] == 0 and theirs[7] != 0
    np.testing.assert_array_equal(ours, np.asarray(functions.get_nf4()))


def test_short_tiles_keep_the_shape_here_only():
    x = weights((4, 100))
    q = quantize(jnp.asarray(x), "nf4")
    assert fb.dequantize(q).shape == (4, 100)
    with lenient_jax(), pytest.raises(TypeError):
        functions.single_quantize_and_pack_nf4(jnp.asarray(x), 64)


def test_float16_scales_differ():
    # Its epsilon is the smallest normal number of the array's dtype: 6e-5 in float16, added to the scale.
    x = jnp.asarray(weights() * 1e-4).astype(jnp.float16)
    with lenient_jax():
        codes, scale = functions.quantize_int8(x)
        theirs = np.asarray(functions.dequantize_int8(codes, scale), np.float32)
    wide = np.asarray(x, np.float32)
    ours = np.asarray(fb.dequantize(quantize(x, "int8_narrow"), jnp.float32))
    assert np.linalg.norm(ours - wide) < 0.1 * np.linalg.norm(theirs - wide)
    assert FORMATS["int8_narrow"].bound == 127

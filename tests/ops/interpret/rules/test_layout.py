"""Slices at run-time indices, repeats and scalars of quantized arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fewbit as fb

DRAW = np.random.default_rng(0).normal
ROWS = fb.quantize(np.broadcast_to(np.arange(300, dtype=np.float32)[:, None], (300, 32)), "q8_0")

SLICES = {  # the start's dtype holds less than 300
    "row-int8": lambda w: lax.dynamic_index_in_dim(w, jnp.int8(100), 0),
    "row-uint8": lambda w: lax.dynamic_index_in_dim(w, jnp.uint8(200), 0, keepdims=False)[None],
    "rows-int8": lambda w: lax.dynamic_slice_in_dim(w, jnp.int8(3), 200, 0),
    "rows-uint8": lambda w: lax.dynamic_slice_in_dim(w, jnp.uint8(200), 290, 0),
}


@pytest.mark.parametrize("piece", SLICES.values(), ids=SLICES)
def test_starts_of_8_bits_slice_a_longer_axis(piece):
    found = fb.transparent(piece)(ROWS)
    found = fb.dequantize(found) if fb.is_qarray(found) else found
    np.testing.assert_array_equal(found, piece(fb.dequantize(ROWS)))


@pytest.mark.parametrize("scheme", ["int8", "q8_0"])
def test_codes_of_whole_bytes_are_sliced_along_the_quantized_axis(scheme):
    q = fb.quantize(DRAW(size=(70, 8)).astype(np.float32), scheme, axis=0)

    def piece(w, start):
        return lax.dynamic_slice_in_dim(w, start, 40, 0)

    found = fb.transparent(piece)(q, jnp.int32(5))
    assert fb.is_qarray(found)
    np.testing.assert_array_equal(fb.dequantize(found), piece(fb.dequantize(q), 5))


def with_scales_of_4_bits(spec: fb.Scheme) -> fb.Scheme:
    return dataclasses.replace(spec, scale=dataclasses.replace(fb.scheme("nf4_dq").scale, format=fb.scheme("int4").format))


@pytest.mark.parametrize(
    "scheme", [fb.scheme("int4_g32"), with_scales_of_4_bits(fb.scheme("q8_0"))], ids=["codes", "scales"]
)
def test_shared_bytes_are_not_sliced_at_a_run_time_index(scheme):
    q = fb.quantize(DRAW(size=(64, 8)).astype(np.float32), scheme, axis=0)
    with pytest.raises(fb.UnsupportedError, match="a slice at a run-time index would cut bytes of the packed axis"):
        fb.transparent(lambda w, start: lax.dynamic_slice_in_dim(w, start, 32, 0))(q, jnp.int32(0))


EMPTY_OR_SCALAR = {
    "no copies": (lambda w: jnp.tile(w, (0, 1)), "tile decodes .*no copy is taken along axis 0"),
    "one element": (lambda w: w[0, 0], "cannot reshape .* into a scalar; a QArray has at least one axis"),
}


@pytest.mark.parametrize(("piece", "message"), EMPTY_OR_SCALAR.values(), ids=EMPTY_OR_SCALAR)
def test_empty_and_scalar_results_decode_as_asked(piece, message):
    q = fb.quantize(DRAW(size=(2, 4)).astype(np.float32), "int8")
    with pytest.raises(fb.UnsupportedError, match=message):
        fb.transparent(piece)(q)
    found = fb.transparent(piece, fallback="dequantize")(q)
    expected = jax.jit(piece)(fb.dequantize(q))
    assert found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)

"""What the TPU kernel decodes: every code of every format, and every form of a scale, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul.pallas_decode import (
    NF4_ERROR,
    held_values,
    plane_values,
    undecodable,
    unit,
)

BYTES = jnp.arange(256, dtype=jnp.uint8)
REFUSED = {f"{name}{bits}{end}" for name in ("int", "uint") for bits in (3, 5, 6, 7) for end in ("", "_narrow")}
REFUSED |= {"e3m2", "e2m3", "ue4m3", "dynamic8"}


def test_which_formats_are_decoded():
    refused = {name for name in fb.FORMATS.names() if undecodable(fb.FORMATS[name])}
    assert refused == REFUSED & set(fb.FORMATS.names())
    assert undecodable(fb.FORMATS["int3"]) == "codes of 3 bits straddle bytes; 1, 2, 4 and 8 bits are read"
    assert undecodable(fb.FORMATS["dynamic8"]) == "dynamic8 is a table of 256 numbers; 16 are decoded without a gather"


@pytest.mark.parametrize("name", [n for n in fb.FORMATS.names() if n not in REFUSED and n != "e8m0"])
def test_every_plane_of_every_byte(name: str):
    fmt = fb.FORMATS[name]
    for shift in range(0, 8, fmt.bits):
        values = np.asarray(plane_values(fmt, BYTES, shift)) * np.float32(unit(fmt, shift))
        codes = (np.arange(256) >> shift) % 2**fmt.bits
        expected = np.asarray(fmt.decode(jnp.asarray(codes, jnp.uint8)))
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values[~np.isnan(values)]), np.signbit(expected[~np.isnan(expected)]))


def test_the_polynomial_of_nf4_errs_as_it_says():
    values = np.asarray(plane_values(fb.FORMATS["nf4"], BYTES[:16], 0, nf4_polynomial=True))
    error = np.abs(values - fb.FORMATS["nf4"].values())
    assert NF4_ERROR - 1e-4 < error.max() <= NF4_ERROR
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("name", ["e4m3fn", "ue5m3", "uint4", "int8"])
def test_scales_and_zero_points_in_formats(name: str):
    codes = BYTES[: 2 ** fb.FORMATS[name].bits]
    np.testing.assert_array_equal(held_values(codes, fb.FORMATS[name]), fb.FORMATS[name].decode(codes))


def test_e8m0_scales_are_exact_but_the_one_that_is_subnormal():
    values = np.asarray(held_values(BYTES, fb.FORMATS["e8m0"]))
    np.testing.assert_array_equal(values[1:], fb.FORMATS["e8m0"].values()[1:].astype(np.float32))
    assert values[0] == 0


def test_float16_scales_come_as_bits():
    bits = np.arange(2**16, dtype=np.uint16)
    values = np.asarray(held_values(jnp.asarray(bits), np.dtype(np.float16)))
    np.testing.assert_array_equal(values, bits.view(np.float16).astype(np.float32))


def test_bfloat16_scales():
    scales = jnp.asarray([0.5, -3.0, jnp.nan], jnp.bfloat16)
    np.testing.assert_array_equal(held_values(scales, np.dtype(jnp.bfloat16)), [0.5, -3.0, np.nan])

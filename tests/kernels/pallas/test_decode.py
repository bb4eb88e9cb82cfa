"""What the TPU kernel decodes: every code of every format, and every form of a scale, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.packing import codes_per_unit
from fewbit.kernels.pallas.decode import (
    NF4_ERROR,
    code_values,
    stored_values,
    undecodable,
)

BYTES = jnp.arange(256, dtype=jnp.uint8)
REFUSED = {"dynamic8"}
STRADDLING = {name for name in fb.FORMATS.names() if 8 % fb.FORMATS[name].bits}


def test_which_formats_are_decoded():
    refused = {name for name in fb.FORMATS.names() if undecodable(fb.FORMATS[name])}
    assert refused == REFUSED
    assert undecodable(fb.FORMATS["dynamic8"]) == "dynamic8 is a table of 256 numbers; 16 are decoded without a gather"


@pytest.mark.parametrize("name", [n for n in fb.FORMATS.names() if n not in REFUSED | STRADDLING | {"e8m0"}])
def test_every_plane_of_every_byte(name: str):
    fmt = fb.FORMATS[name]
    for shift in range(0, 8, fmt.bits):
        values, unit = code_values(fmt, [BYTES], shift // fmt.bits)
        values = np.asarray(values) * np.float32(unit)
        codes = (np.arange(256) >> shift) % 2**fmt.bits
        expected = np.asarray(fmt.decode(jnp.asarray(codes, jnp.uint8)))
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(np.signbit(values[~np.isnan(values)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize("name", sorted(STRADDLING))
def test_every_code_at_every_place_of_a_group_of_bytes(name: str):
    fmt = fb.FORMATS[name]
    bits, count = fmt.bits, codes_per_unit(fmt.bits)
    rng = np.random.default_rng(0)
    codes = np.stack([rng.permutation(2**bits) for _ in range(count)], 1)  # [code, place]
    stream = (codes[:, :, None] >> np.arange(bits) & 1).reshape(len(codes), -1, 8)
    group = [jnp.asarray(byte, jnp.int32) for byte in (stream << np.arange(8)).sum(2).T]
    for plane in range(count):
        expected = fmt.decode(jnp.asarray(codes[:, plane], jnp.uint8))
        values, unit = code_values(fmt, group, plane)
        np.testing.assert_array_equal(np.asarray(values) * np.float32(unit), expected)


def test_the_polynomial_of_nf4_errs_as_it_says():
    values = np.asarray(code_values(fb.FORMATS["nf4"], [BYTES[:16]], 0, nf4_polynomial=True)[0])
    error = np.abs(values - fb.FORMATS["nf4"].values())
    assert NF4_ERROR - 1e-4 < error.max() <= NF4_ERROR
    assert (np.diff(values) > 0).all()


@pytest.mark.parametrize("name", ["e4m3fn", "ue5m3", "uint4", "int8"])
def test_scales_and_zero_points_in_formats(name: str):
    codes = BYTES[: 2 ** fb.FORMATS[name].bits]
    np.testing.assert_array_equal(stored_values(codes, fb.FORMATS[name]), fb.FORMATS[name].decode(codes))


def test_e8m0_scales_are_exact_but_the_one_that_is_subnormal():
    values = np.asarray(stored_values(BYTES, fb.FORMATS["e8m0"]))
    np.testing.assert_array_equal(values[1:], fb.FORMATS["e8m0"].values()[1:].astype(np.float32))
    assert values[0] == 0


def test_float16_scales_come_as_bits():
    bits = np.arange(2**16, dtype=np.uint16)
    values = np.asarray(stored_values(jnp.asarray(bits), np.dtype(np.float16)))
    np.testing.assert_array_equal(values, bits.view(np.float16).astype(np.float32))


def test_bfloat16_scales():
    scales = jnp.asarray([0.5, -3.0, jnp.nan], jnp.bfloat16)
    np.testing.assert_array_equal(stored_values(scales, np.dtype(jnp.bfloat16)), [0.5, -3.0, np.nan])

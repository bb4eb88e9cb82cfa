"""Codes in 32-bit words: one long number with the first code in the lowest bits."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import pack
from fewbit.errors import QuantError
from fewbit.io.containers.integer_words import packed, scales_of, top_bits, unpacked, unsigned_bytes, unsigned_zero_points
from tests.io.containers.stored import quantized


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_are_one_long_number(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 32), np.uint8)
    words = packed(codes, bits)
    assert words.dtype == np.int32 and words.shape == (3, bits)
    number = int.from_bytes(words[1].tobytes(), "little")
    assert number == sum(int(code) << i * bits for i, code in enumerate(codes[1]))
    np.testing.assert_array_equal(unpacked(words, bits), codes)
    np.testing.assert_array_equal(np.ascontiguousarray(words).view(np.uint8), pack(jnp.asarray(codes), bits))
    flipped = words.view(np.uint8) ^ top_bits(bits, 4 * bits)
    np.testing.assert_array_equal(unpacked(flipped, bits), codes ^ 2 ** (bits - 1))


@pytest.mark.parametrize("scheme", ["int4_f16_g16", "uint4_f16_g16"])
@pytest.mark.parametrize("packing", [{"interleave": [0, 2, 1, 3]}, {"high_first": True}])
def test_codes_in_another_order_are_packed_again(scheme, packing):
    _, q = quantized(scheme, (4, 32))
    other = fb.scheme(q.scheme.to_json() | {"packing": packing})
    codes = pack(jnp.asarray(unpacked(np.asarray(q.codes), 4)), 4, other.packing)
    moved = fb.QArray(codes, q.scale, q.zero_point, None, other, q.dtype)
    np.testing.assert_array_equal(unsigned_bytes(moved), unsigned_bytes(q))


def test_zero_points_have_no_sign():
    _, q = quantized("int4_f16_g16", (4, 32))
    assert (unsigned_zero_points(q) == 8).all() and unsigned_zero_points(q).shape == (4, 2)
    signed = fb.scheme(q.scheme.to_json() | {"zero_point": "int4"})
    zero = jnp.asarray([[0, 15, 7, 8]], jnp.uint8).T  # 0, -1, 7, -8, one a row
    moved = fb.QArray(q.codes, q.scale, zero, None, signed, q.dtype)
    assert unsigned_zero_points(moved).tolist() == [[8, 8], [7, 7], [15, 15], [0, 0]]


def test_one_scale_per_element_is_refused():
    _, q = quantized("int4_f16", (4, 32))
    finer = fb.QArray(q.codes, jnp.ones((4, 32), jnp.float16), None, None, q.scheme, q.dtype)
    with pytest.raises(QuantError, match=r"w: scales of shape \(4, 32\) are not one per row and group of 32"):
        scales_of(finer, "w")

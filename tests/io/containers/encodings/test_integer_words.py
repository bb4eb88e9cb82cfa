"""Codes in 32-bit words: one long number with the first code in the lowest bits."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.io.containers.encodings.integer_words import (
    codes_of_words,
    top_bits,
    unsigned_bytes,
    unsigned_zero_points,
    words_of_codes,
)
from tests.io.containers.stored import quantized


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_are_one_long_number(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 32), np.uint8)
    words = words_of_codes(codes, bits)
    assert words.dtype == np.int32 and words.shape == (3, bits)
    number = int.from_bytes(words[1].tobytes(), "little")
    assert number == sum(int(code) << i * bits for i, code in enumerate(codes[1]))
    np.testing.assert_array_equal(codes_of_words(words, bits), codes)
    flipped = words.view(np.uint8) ^ top_bits(bits, 4 * bits)
    np.testing.assert_array_equal(codes_of_words(flipped, bits), codes ^ 2 ** (bits - 1))


def test_zero_points_have_no_sign():
    _, q = quantized("int4_f16_g16", (4, 32))
    assert (unsigned_zero_points(q) == 8).all() and unsigned_zero_points(q).shape == (4, 2)
    signed = fb.scheme(q.scheme.to_json() | {"zero_point": "int4"})
    zero = jnp.asarray([[0, 15, 7, 8]], jnp.uint8).T  # 0, -1, 7, -8, one a row
    moved = fb.QArray(q.codes, q.scale, zero, None, signed, q.dtype)
    assert unsigned_zero_points(moved).tolist() == [[8, 8], [7, 7], [15, 15], [0, 0]]
    np.testing.assert_array_equal(codes_of_words(unsigned_bytes(q), 4), codes_of_words(np.asarray(q.codes), 4) ^ 8)

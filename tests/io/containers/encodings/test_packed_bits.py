"""Bit streams of codes in numpy are those of the packing of QArrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.array.packing import pack
from fewbit.io.containers.encodings.packed_bits import packed_bits, unpacked_bits


@pytest.mark.parametrize("bits", range(1, 9))
def test_it_is_the_packing_of_qarrays(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 21), np.uint8)
    packed = packed_bits(codes, bits)
    np.testing.assert_array_equal(packed, pack(jnp.asarray(codes), bits))
    np.testing.assert_array_equal(unpacked_bits(packed, 21, bits), codes)

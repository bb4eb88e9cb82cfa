"""Which schemes are multiplied as int8, and when their sums fit in int32."""

import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul.integer_codes import fits_int32, is_whole, shift

WHOLE = {
    "int8": True,
    "int4_g64": True,
    "uint4_g64": True,
    "uint8_g32": True,
    "ternary": False,
    "nf4": False,
    "mxfp4": False,
    "q4_1": False,
}


@pytest.mark.parametrize("name", WHOLE)
def test_codes_and_zero_points_are_int8_integers(name):
    assert is_whole(fb.scheme(name)) == WHOLE[name]


def test_unsigned_bytes_are_shifted_into_int8():
    scheme = fb.scheme("uint8_g32")
    assert shift(scheme) == 128 and shift(fb.scheme("uint4_g64")) == shift(fb.scheme("int8")) == 0


@pytest.mark.parametrize(("lhs", "rhs"), [("int8", "int8"), ("int8", "uint4_g64"), ("int4_g64", "int4_g64")])
def test_the_longest_sum_that_fits_is_exact(lhs, rhs):
    one, other = fb.scheme(lhs), fb.scheme(rhs)

    def largest(scheme):
        codes = np.asarray(scheme.format.values())
        zeros = np.zeros(1) if scheme.zero_point is None else np.asarray(scheme.zero_point.values())
        return int(np.abs(codes[:, None] - zeros).max())

    length = (2**31 - 1) // (largest(one) * largest(other))
    assert fits_int32(one, other, length) and not fits_int32(one, other, length + 1)

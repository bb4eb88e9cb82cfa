"""GPTQ with searched scales: less output error where a scheme takes the largest magnitude, GPTQ's bytes where it searches."""

import jax
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import GPTQ, GPTQMSE

from .test_gptq import inputs, moments, output_error, weight


def both(scheme: str) -> tuple[fb.QArray, fb.QArray, float, float]:
    """A weight by GPTQ and with searched scales, and both output errors."""
    w, x = weight(40, 128), inputs(128)
    observation = fb.calibration.Observation(hessian=moments(x))
    plain, searched = (method.quantized(w, fb.scheme(scheme), (-1,), observation) for method in (GPTQ(), GPTQMSE()))
    return plain, searched, output_error(plain, w, x), output_error(searched, w, x)


CASES = [
    ("int3_g64", 0.8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("int2_g32", 0.6), ("uint4_g32", 1.0), ("nf4", 1.0)]),
]


@pytest.mark.parametrize(("scheme", "most"), CASES)
def test_searched_scales_lose_less(scheme: str, most: float):
    plain, searched, error, other = both(scheme)
    assert searched.scheme == plain.scheme  # the same layout and files
    assert other < most * error


@pytest.mark.parametrize("scheme", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_a_scheme_that_searches_has_the_bytes_of_gptq(scheme: str):
    plain, searched, _, _ = both(scheme)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(searched), strict=True):
        np.testing.assert_array_equal(a, b)

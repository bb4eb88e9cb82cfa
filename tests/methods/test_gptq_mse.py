"""GPTQ with searched scales: less output error where a scheme takes the largest magnitude, GPTQ's bytes where it searches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales.search.mse import MSE
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


@pytest.mark.parametrize("scheme", ["int3_g16", "int3"])
def test_an_expert_without_tokens_is_rounded_to_nearest(scheme: str):
    w, hessian = weight(2, 4, 32), jnp.stack([moments(inputs(32)), jnp.zeros((32, 32))])
    observation = fb.calibration.Observation(hessian=hessian, count=jnp.array([9.0, 0.0]), batch=(-3,))
    found, nearest = GPTQMSE().quantized(w, fb.scheme(scheme), (-1,), observation), fb.quantize(w, scheme)
    assert not np.array_equal(fb.dequantize(found)[0], fb.dequantize(nearest)[0])
    np.testing.assert_array_equal(fb.dequantize(found)[1], fb.dequantize(nearest)[1])


def test_the_scale_of_a_whole_row_is_weighted():
    """Inputs that are independent have `D = diagonal(H)`: the scales are those of the weighted search."""
    w, squares = weight(4, 32), jnp.exp(jnp.linspace(0.0, 5.0, 32))
    observation = fb.calibration.Observation(hessian=jnp.diag(squares))
    scheme = dataclasses.replace(fb.scheme("int3"), calibration=MSE())
    q = GPTQ(damping=0).quantized(w, scheme, (-1,), observation)
    np.testing.assert_allclose(q.scale, fb.quantize(w, scheme, error_weights=squares[None]).scale, rtol=1e-5)
    assert not np.allclose(q.scale, fb.quantize(w, scheme).scale, rtol=1e-3)

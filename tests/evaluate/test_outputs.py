"""Errors of outputs: cosines and relative errors against their definitions, also for zero and non-finite vectors."""

import math

import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.evaluate import output_errors, relative_errors


def test_each_error_is_its_definition_over_all_examples():
    random = np.random.default_rng(0)
    reference = [{"y": random.standard_normal((1, n, 5), np.float32)} for n in (3, 2)]
    candidate = [{"y": one["y"] + 0.1 * random.standard_normal(one["y"].shape, np.float32)} for one in reference]
    (error,) = output_errors(reference, candidate)
    p, q = (np.concatenate([one["y"].reshape(-1, 5) for one in of]).astype(np.float64) for of in (reference, candidate))
    cosines = (p * q).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(q, axis=1)
    assert (error.cosine, error.lowest_cosine) == pytest.approx((cosines.mean(), cosines.min()), rel=1e-12)
    assert error.relative_error == pytest.approx(np.abs(p - q).max() / np.abs(p).max(), rel=1e-12)
    assert (error.name, error.shape) == ("y", (1, 3, 5))


@pytest.mark.parametrize(
    ("p", "q", "cosine", "relative"),
    [
        ([0.0, 0.0], [0.0, 0.0], 1.0, 0.0),
        ([0.0, 0.0], [1.0, 0.0], 0.0, math.inf),
        ([1.0, 0.0], [0.0, 0.0], 0.0, 1.0),
        ([1e-200, 0.0], [1e-200, 0.0], 1.0, 0.0),
        ([3.0, 4.0], [-3.0, -4.0], -1.0, 2.0),
    ],
)
def test_zero_tiny_and_opposite_vectors(p, q, cosine, relative):
    (error,) = output_errors([{"y": np.array([p])}], [{"y": np.array([q])}])
    assert (error.cosine, error.relative_error) == (pytest.approx(cosine), relative)


def test_nan_stays_nan():
    p = [{"y": np.ones((1, 2))}] * 2
    (error,) = output_errors(p, [p[0], {"y": np.array([[1.0, np.nan]])}])
    assert math.isnan(error.cosine)
    assert math.isnan(error.relative_error)


def test_a_scalar_output_is_a_vector_of_one():
    assert output_errors([{"loss": np.array(2.0)}], [{"loss": np.array(1.0)}])[0].relative_error == 0.5


def test_blocks_are_compared_by_name():
    p = {"a": np.array([3.0, 4.0]), "b": np.zeros(2), "c": np.ones(1)}
    assert relative_errors(p, {"a": np.array([3.0, 3.0]), "b": np.ones(2)}) == {"a": pytest.approx(0.2), "b": math.inf}


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([], [], "outputs of 0 and of 0 examples"),
        ([{"y": np.ones((1, 2))}], [{"y": np.ones((1, 3))}], "different outputs"),
        ([{"y": np.ones((1, 2))}], [{"z": np.ones((1, 2))}], "different outputs"),
    ],
)
def test_outputs_that_cannot_be_compared(p, q, message):
    with pytest.raises(QuantError, match=message):
        output_errors(p, q)


def test_hidden_states_of_another_shape_are_refused():
    with pytest.raises(QuantError, match="a hidden state has shape"):
        relative_errors({"a": np.ones(2)}, {"a": np.ones(3)})

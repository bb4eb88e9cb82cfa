"""Quantized arrays side by side."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops.interpret.evaluator import NoRuleError
from fewbit.ops.interpret.rules.concatenate import joined, reversed_along, untiled

DRAW = np.random.default_rng(0).normal


def side_by_side(parts, axis):
    return joined(parts, axis, lambda leaves: jnp.concatenate(leaves, axis))


@pytest.mark.parametrize("scheme", ["int4_g32", "int3_g32", "nf4", "affine4_g32"])
@pytest.mark.parametrize("last", [64, 33])
def test_along_the_packed_axis(scheme, last):
    """The last part may end within a byte."""
    if scheme == "nf4":
        last += 31  # whole tiles of 64, or one
    parts = [fb.quantize(DRAW(size=(4, n)).astype(np.float32), scheme) for n in (64, last)]
    whole = side_by_side(parts, 1)
    assert whole.shape == (4, 64 + last)
    np.testing.assert_array_equal(fb.dequantize(whole), np.concatenate([fb.dequantize(part) for part in parts], 1))


def test_along_another_axis():
    parts = [fb.quantize(DRAW(size=(rows, 33)).astype(np.float32), "int4_g32") for rows in (3, 5)]
    whole = side_by_side(parts, 0)
    assert whole.slack == parts[0].slack == 1
    np.testing.assert_array_equal(fb.dequantize(whole), np.concatenate([fb.dequantize(part) for part in parts], 0))


def test_a_byte_of_two_parts_is_refused():
    parts = [fb.quantize(DRAW(size=(4, n)).astype(np.float32), "int4_g1") for n in (33, 64)]
    with pytest.raises(NoRuleError, match="a byte would contain codes of two parts"):
        side_by_side(parts, 1)


def test_an_empty_first_part_is_refused():
    parts = [fb.quantize(DRAW(size=(4, n)).astype(np.float32), "int8") for n in (0, 8)]
    with pytest.raises(NoRuleError, match="the first of the joined arrays has no elements"):
        side_by_side(parts, 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", ["int4_g32", "int3_g32", "nf4_dq", "q4_1", "int8"])
def test_a_short_last_tile_of_the_packed_axis(scheme):
    q = fb.quantize(DRAW(size=(4, 100)).astype(np.float32), scheme)
    rows = fb.dequantize(q)
    for moved, expected in ((untiled(q, 1), rows), (reversed_along(q, (1,)), rows[:, ::-1])):
        assert moved.shape == q.shape
        np.testing.assert_array_equal(fb.dequantize(moved), expected)

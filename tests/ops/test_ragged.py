"""Ragged products: what they refuse when traced. Their values: tests/conformance/test_products.py."""

import jax
import jax.numpy as jnp
import pytest

import fewbit as fb
from fewbit.ops.ragged import _OVER_COLUMNS, ragged_dot_general

EXPERTS = fb.quantize(jnp.ones((3, 32, 8)), "int8", axis=-2)
ROWS = jnp.ones((5, 32))
SIZES = jnp.array([2, 0, 3], jnp.int32)


@pytest.mark.parametrize(
    ("rows", "sizes", "message"),
    [
        (ROWS, SIZES.astype(jnp.float32), "group_sizes is float32; pass integers"),
        (ROWS, SIZES[None], r"group_sizes has shape \(1, 3\); pass one number for each of the 3 groups"),
        (ROWS, SIZES[:2], r"group_sizes has shape \(2,\); pass one number for each of the 3 groups"),
        (ROWS[:, :31], SIZES, r"lhs has shape \(5, 31\) and rhs \(3, 32, 8\); pass rows \[M, K\].*\[G, K, N\]"),
        (ROWS[None], SIZES, r"lhs has shape \(1, 5, 32\)"),
    ],
)
def test_operands_that_do_not_match(unchecked, rows, sizes, message):
    for policy in (None, fb.Policy("int8", "int8")):
        with pytest.raises(fb.QuantError, match=message):
            jax.eval_shape(lambda x, s, policy=policy: fb.ragged_dot(x, EXPERTS, s, policy=policy), rows, sizes)


def test_experts_that_are_transposed():
    contracting, ragged, group = _OVER_COLUMNS
    numbers = jax.lax.RaggedDotDimensionNumbers(contracting, ragged, group)
    experts = fb.quantize(jnp.ones((3, 8, 32)), "int8")
    assert jax.eval_shape(lambda x: ragged_dot_general(x, experts, SIZES, numbers), ROWS).shape == (5, 8)
    with pytest.raises(fb.QuantError, match=r"rhs \(3, 8, 32\); .*\[G, N, K\]"):
        ragged_dot_general(ROWS[:, :8], experts, SIZES, numbers)

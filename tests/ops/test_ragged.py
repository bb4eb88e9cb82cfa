"""Ragged products: what they refuse when traced. Their values: tests/conformance/test_products.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops.ragged import _OVER_COLUMNS, ragged_dot_general

CONTRACTING, RAGGED, GROUP = _OVER_COLUMNS
OVER_COLUMNS = jax.lax.RaggedDotDimensionNumbers(CONTRACTING, RAGGED, GROUP)
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
    experts = fb.quantize(jnp.ones((3, 8, 32)), "int8")
    assert jax.eval_shape(lambda x: ragged_dot_general(x, experts, SIZES, OVER_COLUMNS), ROWS).shape == (5, 8)
    with pytest.raises(fb.QuantError, match=r"rhs \(3, 8, 32\); .*\[G, N, K\]"):
        ragged_dot_general(ROWS[:, :8], experts, SIZES, OVER_COLUMNS)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "policy",
    [
        fb.Policy("int8"),
        fb.Policy("int8", "int8", dlhs="int8", drhs="int8"),
        fb.Policy("uint4", "int8", dlhs="int8", drhs="int8"),  # zero points, and a scale for each block of K
        fb.Policy("int8", "int8", dlhs=fb.Arm("int8", operand="int8"), drhs=fb.Arm("int8", operand="int8")),
    ],
    ids=["weight-only", "codes", "zero points", "original operands"],
)
def test_a_policy_treats_transposed_experts_as_their_transpose(policy):
    rng = np.random.default_rng(0)
    rows, experts, out = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 32), (3, 32, 8), (5, 8)))
    recipe = fb.Recipe((fb.Rule("w", policy),))

    def plain(p, x):
        return jnp.sum(out * jax.lax.ragged_dot(x, p["w"], SIZES))

    def transposed(p, x):
        return jnp.sum(out * jax.lax.ragged_dot_general(x, p["w"], SIZES, OVER_COLUMNS))

    value, (weight, left) = jax.value_and_grad(fb.train(plain, recipe), argnums=(0, 1))({"w": experts}, rows)
    swapped = {"w": experts.swapaxes(1, 2)}
    other, (other_weight, other_left) = jax.value_and_grad(fb.train(transposed, recipe), argnums=(0, 1))(swapped, rows)
    np.testing.assert_allclose(other, value, rtol=1e-5)
    # codes are multiplied exactly; floats are added in an order of the product's own
    most = 0 if policy.activation is not None else 5 * np.finfo(np.float32).eps * np.abs(rows).max() * np.abs(out).max()
    np.testing.assert_allclose(other_weight["w"].swapaxes(1, 2), weight["w"], rtol=0, atol=most)
    np.testing.assert_array_equal(other_left, left)
    served = fb.transparent(transposed)(fb.quantize_params(swapped, fb.plan(transposed, swapped, rows, recipe=recipe)), rows)
    np.testing.assert_allclose(served, value, rtol=1e-5)


def test_a_policy_refuses_other_dimension_numbers():
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (0,), (2,))
    with pytest.raises(
        fb.UnsupportedError, match=r"rows in groups only(.|\n)*transpose the operands to \[M, K\] and \[G, K, N\] or"
    ):
        ragged_dot_general(ROWS, jnp.ones((32, 8, 3)), SIZES, numbers, policy=fb.Policy("int8", "int8"))

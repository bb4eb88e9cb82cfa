"""Gradients against finite differences, in float64, of the smoothed product whose derivative they are said to be.

Rounding has no slope, so a gradient that passes straight through is the derivative of another function: with `Q` the quantizer and
`a0`, `b0` where the gradient is taken, of `L(P(Q(a0) + a - a0, Q(b0) + b - b0))`, which has the same value there. An arm with
`operand="original"` has `b0` where the other operand stands, and one that quantizes the incoming gradient has the quantized one for
the slope of `L`. The products below are numpy's, from their definitions.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

SIZES = np.array([3, 0, 4])


def numpy_conv(x, k):
    """NHWC images with an HWIO kernel of 3 x 3, stride 1, "SAME"."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    height, width = x.shape[1:3]
    return sum(padded[:, i : i + height, j : j + width] @ k[i, j] for i in range(3) for j in range(3))


def numpy_ragged(x, w):
    """Rows of three groups of the lengths `SIZES`, and one row beyond them."""
    of_groups = [rows @ w[i] for i, rows in enumerate(np.split(x, np.cumsum(SIZES))[:-1])]
    return np.concatenate([*of_groups, np.zeros((len(x) - SIZES.sum(), w.shape[2]))])


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of ours and numpy's, the shapes of its operands, and the axes that its arms contract, tiles' axis last.

    `summed` is of the left and the right operand; `left` and `right` of the incoming gradient in either's gradient; and `beside`
    lays a scale of the right and of the left operand beside the incoming gradient.
    """

    ours: Callable
    numpy: Callable
    shapes: tuple
    summed: tuple
    left: tuple
    right: tuple
    beside: tuple


def conv(x, k, policy):
    return fb.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), policy=policy)


PRODUCTS = {
    "dot_general": Product(
        lambda x, w, policy: fb.dot_general(x, w, (((1,), (0,)), ((), ())), policy=policy),
        lambda x, w: x @ w,
        ((6, 32), (32, 8)),
        ((1,), (0,)),
        (1,),
        (0,),
        (lambda s: s, lambda s: s),
    ),
    "einsum": Product(
        lambda x, w, policy: fb.einsum("bld,df->blf", x, w, policy=policy),
        lambda x, w: np.einsum("bld,df->blf", x, w),
        ((2, 3, 16), (16, 8)),
        ((2,), (0,)),
        (2,),
        (0, 1),
        (lambda s: s[None], lambda s: s),
    ),
    "conv": Product(
        conv,
        numpy_conv,
        ((2, 4, 4, 3), (3, 3, 3, 5)),
        ((1, 2, 3), (0, 1, 2)),
        (1, 2, 3),
        (1, 2, 0),
        (lambda s: s.reshape(1, 1, 1, -1), lambda s: s),
    ),
    "ragged_dot": Product(
        lambda x, w, policy: fb.ragged_dot(x, w, jnp.asarray(SIZES, jnp.int32), policy=policy),
        numpy_ragged,
        ((8, 16), (3, 16, 4)),
        ((1,), (1,)),
        (1,),
        (0,),
        (lambda s: s[np.clip(np.searchsorted(np.cumsum(SIZES), np.arange(8), "right"), 0, 2), 0], lambda s: s),
    ),
}
POLICIES = {
    "straight": fb.Policy("int4", "int8"),
    "original": fb.Policy("int4", "int8", dlhs=fb.Arm(operand="original"), drhs=fb.Arm(operand="original")),
    "int8": fb.Policy("int4", "int8", dlhs="int8", drhs="int8"),
}
QUICK = ("dot_general", "straight")
CASES = [(n, p) if (n, p) == QUICK else pytest.param(n, p, marks=pytest.mark.slow) for n in PRODUCTS for p in POLICIES]


def wide(q):
    return np.asarray(fb.dequantize(q), np.float64)


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_gradients_are_the_slopes_of_the_smoothed_product(name, policy):
    case, policy = PRODUCTS[name], POLICIES[policy]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in case.shapes]

    def loss(a, b, weights):
        return jnp.sum(weights * jnp.sin(case.ours(a, b, policy)))

    quantized = [fb.quantize(x, s, axis=a) for x, s, a in zip(operands, ("int8", "int4"), case.summed, strict=True)]
    floats, rounded = [np.asarray(x, np.float64) for x in operands], [wide(q) for q in quantized]
    out = case.numpy(*rounded)
    weights = rng.standard_normal(out.shape)
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(*operands, jnp.asarray(weights, jnp.float32))
    slope = weights * np.cos(out)

    for side, (gradient, arm) in enumerate(zip(gradients, (policy.dlhs, policy.drhs), strict=True)):
        other = (floats if arm.operand == "original" else rounded)[1 - side]
        met = slope
        if arm.gradient is not None:
            # The other operand's scale is folded in before the gradient is quantized, and taken out again.
            scale = case.beside[side](np.asarray(quantized[1 - side].scale))
            folded = fb.quantize(jnp.asarray(slope * scale, jnp.float32), arm.gradient, axis=(case.left, case.right)[side])
            met = wide(folded) / scale

        def smoothed(x, side=side, other=other, met=met, arm=arm):
            moved = rounded[side] + x - floats[side]
            product = case.numpy(moved, other) if side == 0 else case.numpy(other, moved)
            is_straight = arm.gradient is None and arm.operand == "forward"
            return np.sum(weights * np.sin(product)) if is_straight else np.sum(met * product)

        for _ in range(3):
            direction = rng.standard_normal(floats[side].shape)
            step = 1e-5 * direction
            found = np.sum(np.asarray(gradient, np.float64) * direction)
            wanted = (smoothed(floats[side] + step) - smoothed(floats[side] - step)) / 2e-5
            # float32 sums of up to 288 terms near 1, against differences whose own error is 1e-10.
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * np.linalg.norm(gradient))

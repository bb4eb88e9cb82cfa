"""Products of codes, forwards and backwards: in which types they meet, zero points on both sides, what they are summed in."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.ops.bilinear import ProductConfig, quantized_product
from tests.ops.test_bilinear import ASYMMETRIC, CASES, FP8, INT8, normal, product

PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
MATRICES = (((1,), (0,)), ((), ()))


def products_of(jaxpr):
    """The dtypes of both operands and of the result of each product of arrays; not the dot products that look for NaN."""
    for eqn in jaxpr.eqns:
        types = tuple(str(v.aval.dtype) for v in (*eqn.invars[:2], *eqn.outvars))
        if eqn.primitive.name in PRODUCTS and (eqn.primitive.name != "dot_general" or types[0] != "float32"):
            yield types
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from products_of(getattr(inner, "jaxpr", inner))


def gradients(case, policy):
    return jax.value_and_grad(lambda a, b: jnp.sum(product(case, policy)(a, b)), argnums=(0, 1))


def traced(name, policy):
    case = CASES[name]
    jaxpr = jax.make_jaxpr(gradients(case, policy))(normal(*case.left), normal(*case.right, seed=1))
    return list(products_of(jaxpr.jaxpr))


@pytest.mark.parametrize("name", ["conv", "grouped", "depthwise", "ragged"])
def test_all_three_products_multiply_codes(name):
    assert traced(name, INT8) == [("int8", "int8", "int32")] * 3


def test_products_of_8_bit_floats():
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert traced("ragged", FP8) == [(e4m3, e4m3, "float32"), (e5m2, e4m3, "float32"), (e4m3, e5m2, "float32")]
    # JAX's convolutions take one dtype, so e5m2 meets e4m3 in float32.
    assert traced("conv", FP8) == [(e4m3, e4m3, "float32"), *[("float32",) * 3] * 2]
    alike = fb.Policy("fp8", "fp8", dlhs="fp8", drhs="fp8")
    assert traced("conv", alike) == [(e4m3, e4m3, "float32")] * 3


def test_scales_along_the_sum_are_decoded():
    finer = fb.Policy("int8_g2", "int8", dlhs="int8", drhs="int8")
    for name in ("conv", "ragged"):
        # The weight's scales vary along the sum forwards, and along an axis that the gradient does not have backwards.
        assert traced(name, finer) == [*[("float32",) * 3] * 2, ("int8", "int8", "int32")]
    # Samples of several groups meet in one output, so their scales do not fold into it.
    assert traced("batch groups", INT8)[0] == ("float32",) * 3


def test_what_is_lowered_convolves_integers():
    case = CASES["conv"]
    text = jax.jit(gradients(case, INT8)).lower(normal(*case.left), normal(*case.right, seed=1)).as_text()
    convolutions = [line.rsplit(":", 1)[1] for line in text.splitlines() if "stablehlo.convolution" in line]
    assert len(convolutions) == 3
    assert all(types.count("xi8>") == 2 and types.count("xi32>") == 1 for types in convolutions)


def parts(q):
    """Codes less zero points and the scales, float64."""
    return np.asarray(q.codes, np.float64) - np.asarray(q.zero_point, np.float64), np.asarray(q.scale, np.float64)


@pytest.mark.parametrize("layout", ["matrices", "batches"])
def test_zero_points_on_both_sides_are_exact(layout):
    """The sums are whole numbers below 2**24, so only the two scales round: even where the sum is small beside its terms."""
    shapes, numbers = {
        "matrices": (((6, 64), (8, 64)), (((1,), (1,)), ((), ()))),
        "batches": (((3, 4, 32), (3, 5, 32)), (((2,), (2,)), ((0,), (0,)))),
    }[layout]
    # Shifted, so that the zero points are far from the middle.
    a, b = fb.quantize(normal(*shapes[0]) + 2, "uint8"), fb.quantize(normal(*shapes[1], seed=1) - 1, "uint8")
    got = np.asarray(fb.dot_general(a, b, numbers), np.float64)
    (c, s), (d, t) = parts(a), parts(b)
    whole = np.einsum("...mk,...nk->...mn", c, d)
    assert np.abs(whole).max() < 2**24
    np.testing.assert_allclose(got, whole * s * np.swapaxes(t, -1, -2), rtol=2 * 2.0**-24 * (1 + 2.0**-20))


@pytest.mark.parametrize(("left", "right"), [("uint8", "int8"), ("uint4", "uint8"), ("int4", "uint3")])
def test_integers_of_any_width_meet_with_or_without_zero_points(left, right):
    a, b = fb.quantize(normal(4, 32) + 1, left), fb.quantize(normal(6, 32, seed=1), right)
    numbers = (((1,), (1,)), ((), ()))
    jaxpr = jax.make_jaxpr(lambda a, b: fb.dot_general(a, b, numbers))(a, b)
    assert set(products_of(jaxpr.jaxpr)) == {("int8", "int8", "int32")}
    want = np.asarray(fb.dequantize(a), np.float64) @ np.asarray(fb.dequantize(b), np.float64).T
    np.testing.assert_allclose(fb.dot_general(a, b, numbers), want, rtol=1e-5, atol=1e-5)


def test_zero_points_of_long_tiles_stay_codes():
    scheme = fb.scheme("uint8").with_tile(128)
    a, b = fb.quantize(normal(3, 256) + 1, scheme), fb.quantize(normal(5, 256, seed=1), scheme)
    numbers = (((1,), (1,)), ((), ()))
    jaxpr = jax.make_jaxpr(lambda a, b: fb.dot_general(a, b, numbers))(a, b)
    assert set(products_of(jaxpr.jaxpr)) == {("int8", "int8", "int32")}
    want = np.asarray(fb.dequantize(a), np.float64) @ np.asarray(fb.dequantize(b), np.float64).T
    np.testing.assert_allclose(fb.dot_general(a, b, numbers), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["matmul", "conv", "grouped", "ragged"])
def test_asymmetric_operands_stay_codes_backwards(name):
    assert set(traced(name, ASYMMETRIC)) == {("int8", "int8", "int32")}


def test_sums_that_could_overflow_are_not_made_of_integers():
    longest = 2**31 // (128 * 128)
    whole = jax.eval_shape(lambda: fb.quantize(jnp.ones((1, longest)), "int8"))
    safe = jax.eval_shape(lambda: fb.quantize(jnp.ones((1, longest - 1)), "int8"))
    for q, dtypes in ((whole, []), (safe, ["int32"])):  # products in float32 are not listed
        jaxpr = jax.make_jaxpr(lambda a: fb.dot_general(a, a, (((1,), (1,)), ((), ()))))(q)
        assert [types[2] for types in products_of(jaxpr.jaxpr)] == dtypes


def summed(accumulator, backward=None):
    arm = fb.Arm("fp8_e5m2", accumulator=backward)
    return fb.Policy("fp8", "fp8", dlhs=arm, drhs=arm, accumulator=accumulator)


@pytest.mark.slow
def test_sums_in_bfloat16():
    assert [types[2] for types in traced("ragged", summed("bfloat16", "float32"))] == ["bfloat16", "float32", "float32"]
    case = CASES["matmul"]
    x, w = normal(*case.left), normal(*case.right, seed=1)
    run = functools.partial(jax.vjp, product(case, summed("bfloat16", "bfloat16")))
    assert [types[2] for types in traced("matmul", summed("bfloat16", "bfloat16"))] == ["bfloat16"] * 3
    eager, jitted = run(x, w)[0], jax.jit(lambda x, w: run(x, w)[0])(x, w)
    assert np.array_equal(eager, jitted)
    wide = product(case, summed(None))(x, w)
    # A sum of a magnitude below 2**e is off by at most 2**(e - 9) when it is rounded, before its scales.
    assert 0 < jnp.abs(eager - wide).max() <= jnp.abs(wide).max() * 2.0**-8
    named = fb.Policy("int8", "int8", dlhs=fb.Arm("int8", accumulator="int32"), accumulator="int32")
    assert np.array_equal(product(case, named)(x, w), product(case, INT8)(x, w))


@pytest.mark.parametrize(
    ("name", "policy", "reason"),
    [
        ("matmul", fb.Policy("int8", "int8", accumulator="float32"), "sums of integer codes are exact in int32"),
        ("conv", fb.Policy("int8", "int8", accumulator="bfloat16"), "sums of integer codes are exact in int32"),
        ("ragged", fb.Policy("fp8", "fp8", accumulator="int32"), "8-bit floats are summed in float32 or bfloat16"),
        ("matmul", fb.Policy("fp4", "fp8", accumulator="bfloat16"), "XLA has no product of e4m3fn and e2m1 here"),
        (
            "matmul",
            fb.Policy(fb.scheme("fp8").with_tile(16), "fp8", accumulator="bfloat16"),
            "operands are dequantized to float32",
        ),
        ("conv", summed(None, "bfloat16"), "XLA has no product of e5m2 and e4m3fn here"),
        ("ragged", fb.Policy("int8", dlhs=fb.Arm("fp8", "original", accumulator="bfloat16")), "an operand is a float array"),
    ],
)
def test_sums_that_a_product_does_not_have_are_refused(name, policy, reason):
    case = CASES[name]
    with pytest.raises(fb.UnsupportedError, match=reason):
        jax.eval_shape(gradients(case, policy), normal(*case.left), normal(*case.right, seed=1))


def test_a_stored_operand_keeps_its_codes_backwards():
    """A QArray of experts under a policy, as a model that is served and tuned has it."""
    case = CASES["ragged"]
    experts = dataclasses.replace(fb.quantize(normal(*case.right, seed=1), "uint8", axis=-2), policy=ASYMMETRIC)

    def loss(rows):
        return jnp.sum(quantized_product(case.bilinear, ProductConfig(ASYMMETRIC), rows, experts, case.extra))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(normal(*case.left))
    assert set(products_of(jaxpr.jaxpr)) == {("int8", "int8", "int32")}

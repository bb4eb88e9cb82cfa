"""Products of quantized operands against products of the arrays they stand for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul import dispatch


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


NUMBERS = {
    "x@w.T": (((1,), (1,)), ((), ())),
    "x@w": (((1,), (0,)), ((), ())),
    "both axes": (((0, 1), (0, 1)), ((), ())),
    "batch": (((1,), (1,)), ((0,), (0,))),
}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_weight_only_is_the_product_of_what_it_stands_for(numbers):
    x, q = normal(64, 64), fb.quantize(normal(64, 64, seed=1), "nf4")  # every scheme: tests/conformance/test_products.py
    numbers, decoded = NUMBERS[numbers], fb.dequantize(q)
    products = jax.jit(lambda x, q: (fb.dot_general(x, q, numbers), fb.dot_general(q, x, numbers)))(x, q)
    expected = jax.lax.dot_general(x, decoded, numbers), jax.lax.dot_general(decoded, x, numbers)
    # The same sums of 64 products; a fused decode may order them otherwise.
    np.testing.assert_allclose(products[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(products[1], expected[1], rtol=1e-5, atol=1e-5)


def test_result_has_the_dtype_and_precision_asked_for():
    x, q = normal(4, 32, dtype=jnp.bfloat16), fb.quantize(normal(8, 32, dtype=jnp.bfloat16), "int8")
    numbers = (((1,), (1,)), ((), ()))
    assert fb.dot_general(x, q, numbers).dtype == jnp.bfloat16
    wide = fb.dot_general(x, q, numbers, jax.lax.Precision.HIGHEST, jnp.float32)
    expected = jax.lax.dot_general(x, fb.dequantize(q), numbers, jax.lax.Precision.HIGHEST, jnp.float32)
    assert wide.dtype == jnp.float32
    assert jnp.array_equal(wide, expected)
    jaxpr = str(jax.make_jaxpr(lambda x: fb.dot_general(x, q, numbers, jax.lax.Precision.HIGHEST))(x))
    assert "precision=Precision.HIGHEST" in jaxpr or "HIGHEST" in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "ternary", "binary", "fp8_tensor"])
def test_both_sides_quantized_multiply_codes(name):
    x, w = fb.quantize(normal(3, 5, 128), "int8"), fb.quantize(normal(16, 128, seed=1), name)
    product = fb.dot_general(x, w, (((2,), (1,)), ((), ())))
    exact = np.asarray(fb.dequantize(x), np.float64) @ np.asarray(fb.dequantize(w), np.float64).T
    # The sum over codes is exact (int32) or float32 with 128 terms; scales are applied with two roundings.
    bound = np.abs(np.asarray(fb.dequantize(x), np.float64)) @ np.abs(np.asarray(fb.dequantize(w), np.float64)).T
    assert (np.abs(np.asarray(product) - exact) <= bound * 128 * 2.0**-24).all()


def test_integer_codes_meet_as_int8_and_accumulate_in_int32():
    x, w = fb.quantize(normal(4, 64), "int8"), fb.quantize(normal(8, 64, seed=1), "int4")
    jaxpr = str(jax.make_jaxpr(lambda a, b: fb.dot_general(a, b, (((1,), (1,)), ((), ()))))(x, w))
    assert "preferred_element_type=int32" in jaxpr


def test_int4_times_int4_does_not_overflow():
    ones = fb.quantize(jnp.full((1, 4096), 7.5), "int4")
    assert float(fb.dot_general(ones, ones, (((1,), (1,)), ((), ())))[0, 0]) == 4096 * 49 * float(ones.scale[0, 0]) ** 2


def test_scales_of_blocks_of_free_axes_reach_their_elements():
    w = fb.quantize(normal(6, 40), fb.Scheme(fb.FORMATS["int8"], {-2: 4, -1: None}))
    x = fb.quantize(normal(5, 40, seed=1), "int8")
    exact = np.asarray(fb.dequantize(x), np.float64) @ np.asarray(fb.dequantize(w), np.float64).T
    np.testing.assert_allclose(fb.dot_general(x, w, (((1,), (1,)), ((), ()))), exact, rtol=1e-5, atol=1e-5)


def test_batched_product_of_codes():
    x, w = fb.quantize(normal(3, 5, 32), "int8"), fb.quantize(normal(3, 7, 32, seed=1), "int8")
    product = fb.dot_general(x, w, (((2,), (2,)), ((0,), (0,))))
    exact = np.einsum("bmk,bnk->bmn", *(np.asarray(fb.dequantize(q), np.float64) for q in (x, w)))
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_tiles_along_the_contraction_and_zero_points_on_both_sides():
    for name in ("nvfp4", "uint8", "q4_1", "mxfp8"):
        x, w = fb.quantize(normal(4, 64), name), fb.quantize(normal(8, 64, seed=1), name)
        exact = np.asarray(fb.dequantize(x), np.float64) @ np.asarray(fb.dequantize(w), np.float64).T
        np.testing.assert_allclose(fb.dot_general(x, w, (((1,), (1,)), ((), ()))), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["int8", "fp8", "mxfp8", "int8_g32"])
def test_policy_quantizes_the_activation_along_the_contraction(activation):
    x, w = normal(2, 3, 64), normal(64, 16, seed=1)
    policy = fb.Policy("int8", activation=activation)
    q = fb.quantize(w, "int8", axis=0)
    expected = fb.dot_general(fb.quantize(x, activation), q, (((2,), (0,)), ((), ())))
    given = fb.dot_general(x, q, (((2,), (0,)), ((), ())), policy=policy)
    carried = fb.dot_general(x, dataclasses.replace(q, policy=policy), (((2,), (0,)), ((), ())))
    assert jnp.array_equal(given, expected)
    assert jnp.array_equal(carried, expected)
    assert not jnp.array_equal(given, fb.dot_general(x, q, (((2,), (0,)), ((), ()))))


@pytest.mark.parametrize("policy", [None, fb.Policy("int8", activation="int8")], ids=["weight-only", "w8a8"])
def test_gradient_is_that_of_the_product_with_decoded_operands(policy):
    x, q = normal(4, 32), fb.quantize(normal(8, 32, seed=1), "int8")
    weights = normal(4, 8, seed=2)
    numbers = (((1,), (1,)), ((), ()))
    gradient = jax.grad(lambda x: jnp.sum(weights * fb.dot_general(x, q, numbers, policy=policy)))(x)
    np.testing.assert_allclose(gradient, weights @ fb.dequantize(q), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 32), (32, 8)),
        ((32,), (32, 8)),
        ((2, 3, 32), (32, 8)),
        ((2, 4, 32), (2, 32, 8)),
        ((4, 32), (2, 32, 8)),
        ((32,), (2, 32, 8)),
    ],
)
def test_matmul_operators_in_both_orders(left, right):
    x, w = normal(*left), normal(*right, seed=1)
    q = fb.quantize(w, "int8", axis=-2)
    np.testing.assert_allclose(x @ q, jnp.matmul(x, fb.dequantize(q)), rtol=1e-6, atol=1e-6)
    p = fb.quantize(x, "int8")
    np.testing.assert_allclose(p @ w, jnp.matmul(fb.dequantize(p), w), rtol=1e-6, atol=1e-6)
    assert (p @ q).shape == jnp.matmul(x, w).shape


def test_numpy_operands_leave_the_product_to_us():
    x, q = np.ones((2, 32), np.float32), fb.quantize(normal(32, 8), "int8", axis=-2)
    assert isinstance(x @ q, jax.Array)
    assert jnp.array_equal(x @ q, jnp.asarray(x) @ fb.dequantize(q))


@pytest.mark.usefixtures("unchecked")
def test_messages():
    q = fb.quantize(normal(8, 32), "int8")
    numbers = (((1,), (1,)), ((), ()))
    with pytest.raises(fb.QuantError, match=r"no backend is named 'cuda'; known: pallas_tpu, triton, cpu, reference"):
        fb.dot_general(normal(4, 32), q, numbers, backend="cuda")
    with pytest.raises(fb.QuantError, match="neither operand is a QArray"):
        fb.dot_general(normal(4, 32), normal(8, 32), numbers, backend="reference")
    delayed = next(rule.policy for rule in fb.recipe("te_fp8_delayedscaling").rules if rule.policy is not None)
    with pytest.raises(fb.UnsupportedError, match="a product cannot follow delayed scaling"):
        fb.dot_general(normal(4, 32), normal(8, 32), numbers, policy=delayed)
    one, other = (dataclasses.replace(q, policy=fb.Policy("int8", activation=a)) for a in ("int8", "fp8"))
    with pytest.raises(fb.QuantError, match="carry different policies"):
        fb.dot_general(one, other, numbers)
    with pytest.raises(fb.QuantError, match=r"the policy is int4.*, but the weight is quantized already, to int8; pass"):
        fb.dot_general(normal(4, 32), q, numbers, policy=fb.Policy("int4", "int8"))
    for key, message in (
        (0, "key is 0; pass one JAX random key"),
        (jax.random.split(jax.random.key(0)), r"key has shape \(2,\) and dtype key<fry>; pass one JAX random key"),
        (jnp.zeros(2), r"key has shape \(2,\) and dtype float32"),
    ):
        with pytest.raises(fb.QuantError, match=message):
            fb.dot_general(normal(4, 32), q, numbers, key=key)
    with pytest.raises(fb.QuantError, match=r"inner lengths differ"):
        normal(4, 31) @ q.T
    with pytest.raises(fb.QuantError, match=r"Use fb.einsum"):
        normal(2, 4, 32) @ fb.quantize(normal(3, 32, 8), "int8", axis=-2)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["floats", "qarrays"])
def test_an_accumulator_is_refused_where_it_cannot_be_used(is_quantized):
    x, w, policy = normal(4, 32), normal(8, 32, seed=1), fb.Policy("int8", "int8", accumulator="bfloat16")
    if is_quantized:
        x, w = fb.quantize(x, "int8"), fb.quantize(w, "int8")
    with pytest.raises(fb.UnsupportedError, match=r"accumulator='bfloat16': sums of integer codes are exact in int32"):
        fb.dot_general(x, w, (((1,), (1,)), ((), ())), policy=policy)


@pytest.mark.parametrize(
    ("left", "right", "numbers", "message"),
    [
        (
            (4, 5),
            (32, 8),
            (((1,), (0,)), ((), ())),
            r"contraction axes \(1,\) of lhs \(4, 5\) have the lengths \[5\], .*\[32\]",
        ),
        ((4, 32), (32, 8), (((0, 1), (0,)), ((), ())), r"contraction axes \(0, 1\) .* \[4, 32\], .*\[32\]"),
        ((1, 4, 32), (2, 32, 8), (((2,), (1,)), ((0,), (0,))), r"batch axes \(0,\) .* \[1\], .*\[2\]"),
        ((32, 32), (32, 32), (((1, 1), (0, 0)), ((), ())), r"an axis of lhs twice: \(1, 1\)"),
        ((32, 32), (32, 32), (((1, 0), (0, -2)), ((), ())), r"an axis of rhs twice: \(0, 0\)"),
        ((32, 32), (32, 32), (((1,), (0,)), ((1,), (1,))), r"an axis of lhs twice: \(1, 1\)"),
    ],
)
def test_shapes_are_compared_when_traced(left, right, numbers, message):
    q = fb.quantize(jnp.ones(right), "int8", axis=-2)
    with pytest.raises(fb.QuantError, match=message):
        jax.eval_shape(lambda x: fb.dot_general(x, q, numbers), jnp.ones(left))


def test_policy_json_and_messages():
    policy = fb.Policy("nf4", activation="int8")
    assert fb.Policy.from_json(policy.to_json()) == policy
    assert fb.Policy.from_json("nf4") == fb.Policy("nf4")
    assert str(policy) == "nf4 x int8"
    with pytest.raises(fb.QuantError, match="did you mean 'weight'"):
        fb.Policy.from_json({"weigth": "nf4"})
    with pytest.raises(fb.QuantError, match="a policy lacks the field 'weight'"):
        fb.Policy.from_json({"activation": "int8"})


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_transpose_before_a_product_moves_no_codes(monkeypatch, is_traced):
    read = []

    def product(problem, lhs, rhs, **settings):
        read.append(rhs.shape)
        return dispatch.product(problem, lhs, rhs, **settings)

    monkeypatch.setattr("fewbit.ops.dot.product", product)
    x, q = normal(3, 64), fb.quantize(normal(8, 64), "int4")
    multiplied = (lambda x, q: x @ q.T) if not is_traced else jax.jit(lambda x, q: x @ q.T)
    np.testing.assert_allclose(multiplied(x, q), x @ fb.dequantize(q).T, rtol=1e-5, atol=1e-5)
    assert read == [(8, 64)]


@pytest.mark.parametrize("weight", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["float8_e4m3fn", "float8_e5m2", "float16", "int8"])
def test_operands_of_two_dtypes_have_the_dtype_of_jax_products(activation, weight):
    """JAX multiplies dtypes that its implicit promotion does not join, such as 8-bit floats and float32."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(4, 32)) * 3).astype(activation), jnp.asarray(rng.normal(size=(32, 8))).astype(weight)
    q = fb.quantize(w, "int8", axis=-2)
    expected = jax.lax.dot(x, fb.dequantize(q))
    for y in (fb.transparent(lambda w: jax.lax.dot(x, w))(q), fb.transparent(lambda w: jax.lax.dot(w.T, x.T))(q).T):
        assert y.dtype == expected.dtype
        # Half a unit in the last place of a bfloat16 result; the sums of float32 differ by less.
        np.testing.assert_allclose(y.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-5)

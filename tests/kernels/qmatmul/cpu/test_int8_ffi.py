"""The compiled product of two operands of integers on CPUs, beside the reference: the same bits, at every instruction set."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.buffers import INTEGER_LEVELS as LEVELS
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul import Cpu, Problem
from fewbit.kernels.qmatmul.problem import Operand
from tests.conformance import array_laws as laws

BUILT = extension("fewbit.kernels.qmatmul.cpu._int8_gemm")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason=str(BUILT.missing))

HERE = LEVELS[: LEVELS.index(BUILT.isa) + 1] if BUILT.isa in LEVELS else LEVELS[:1]  # arm64 has one of its own
LAST, FIRST = ((((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())))


def quantized(scheme: str, shape: tuple[int, ...], axis: int = -1) -> fb.QArray:
    """Random codes of a scheme, every code among them, with scales that differ and zero points where it has them."""
    rng = np.random.default_rng(len(scheme))
    q = fb.quantize(jnp.asarray(rng.normal(0.2, 1, shape), jnp.float32), scheme, axis=axis)
    codes = jnp.asarray(rng.integers(0, 256, q.codes.shape, np.uint8))
    return q if q.slack else dataclasses.replace(q, codes=codes)


def by_kernel(lhs: fb.QArray, rhs: fb.QArray, numbers, isa: str | None = None) -> np.ndarray:
    problem = Problem(Operand.of(lhs), Operand.of(rhs), numbers)
    backend = dataclasses.replace(Cpu(), isa=isa)
    assert backend.unsupported(problem) is None
    return np.asarray(backend.run(problem, lhs, rhs))


def both(lhs: fb.QArray, rhs: fb.QArray, numbers) -> tuple[np.ndarray, np.ndarray]:
    """The product by the kernel, and by the reference."""
    return by_kernel(lhs, rhs, numbers), np.asarray(fb.dot_general(lhs, rhs, numbers, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schemes", [("int8", "int8"), ("int8", "int4"), ("uint8", "uint4"), ("int3", "uint8")], ids="-".join
)
def test_the_bits_of_the_reference_at_every_level(schemes):
    x = quantized(schemes[0], (7, 600))
    for w, numbers in ((quantized(schemes[1], (70, 600)), LAST), (quantized(schemes[1], (600, 70), -2), FIRST)):
        expected = np.asarray(fb.dot_general(x, w, numbers, backend="reference"))
        for isa in HERE:
            np.testing.assert_array_equal(by_kernel(x, w, numbers, isa), expected, isa)


def test_scales_that_vary_along_the_contraction():
    """A tile's sum is exact and rounded three times, and the ten tiles are added in float32."""
    x = quantized("int8", (5, 640))
    wide = np.float64(laws.numpy_dequantize(x))
    for w, numbers in ((quantized("int4_g64", (9, 640)), LAST), (quantized("uint4_g64", (640, 9), -2), FIRST)):
        values = np.moveaxis(np.float64(laws.numpy_dequantize(w)), numbers[0][1][0], 0)
        for isa in HERE:
            y = by_kernel(x, w, numbers, isa)
            assert np.all(np.abs(y - wide @ values) <= 14 * 2.0**-24 * (np.abs(wide) @ np.abs(values)))


def test_tiles_of_both_sides():
    x, w = quantized("int8_g128", (5, 300)), quantized("int8_g128", (6, 300))
    y, expected = both(x, w, LAST)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("scheme", ["int8", "uint4", "int4_g64", "int8_g128"])
@pytest.mark.parametrize("numbers", [LAST, FIRST], ids=["last", "first"])
def test_many_rows_have_the_same_bits_at_every_level(scheme, numbers):
    """AMX takes 32 rows or more, 16 at a time: 41 are no multiple."""
    shape, axis = ((70, 600), -1) if numbers == LAST else ((600, 70), -2)
    x, w = quantized("uint8" if scheme == "uint4" else "int8", (41, 600)), quantized(scheme, shape, axis)
    y = {isa: by_kernel(x, w, numbers, isa) for isa in HERE}
    for isa in HERE[2:]:  # AVX2 and plain C++ differ where a product and a sum are not rounded at once
        np.testing.assert_array_equal(y[isa], y[HERE[1]], isa)
    few = by_kernel(x[:3], w, numbers)  # by other kernels
    np.testing.assert_array_equal(few, y[HERE[-1]][:3])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "uint4", "int4_g64"])
@pytest.mark.parametrize("numbers", [LAST, FIRST], ids=["last", "first"])
def test_a_few_rows_have_the_bits_that_they_have_among_many(scheme, numbers):
    shape, axis = ((70, 301), -1) if numbers == LAST else ((301, 70), -2)  # neither vectors nor blocks of rows divide it
    x, w = quantized("int8", (7, 301)), quantized(scheme, shape, axis)
    among = by_kernel(x, w, numbers)
    for rows in (1, 4):
        np.testing.assert_array_equal(by_kernel(x[:rows], w, numbers), among[:rows])


@pytest.mark.slow
def test_any_shape_and_either_side():
    x, w = quantized("int8", (2, 3, 40)), quantized("int8", (4, 5, 40))
    np.testing.assert_array_equal(*both(x, w, (((2,), (2,)), ((), ()))))
    many, few = quantized("int8", (3, 40)), quantized("int4", (40, 2100), -2)  # wide panels
    np.testing.assert_array_equal(*both(many, few, FIRST))
    stack = quantized("int8", (2, 6, 40))
    np.testing.assert_array_equal(*both(x, stack, (((2,), (2,)), ((0,), (0,)))))
    tall = quantized("int8", (400, 24))
    np.testing.assert_array_equal(*both(tall, quantized("int8", (3, 24)), LAST))
    inner = quantized("int8", (4, 40, 6), 1)  # no stack: its contracted axis lies between others
    swapped, expected = both(quantized("int4", (6, 40)), inner, LAST)
    np.testing.assert_allclose(swapped, expected, rtol=2.0**-22)  # scales in the other order


def test_the_extreme_codes():
    for x_code in (0x80, 0x7F):
        for w_code in (0x80, 0x7F):
            x, w = (
                dataclasses.replace(fb.quantize(jnp.ones((3, 5000)), "int8"), codes=jnp.full((3, 5000), code, jnp.uint8))
                for code in (x_code, w_code)
            )
            numbers = [code - 256 * (code > 127) for code in (x_code, w_code)]
            expected = np.float32(5000 * numbers[0] * numbers[1]) * np.asarray(x.scale) * np.asarray(w.scale).T
            for isa in HERE:
                np.testing.assert_array_equal(by_kernel(x, w, LAST, isa), expected)


def test_results_are_rounded_once():
    x, w = quantized("int8", (3, 40)), quantized("int8", (20, 40))
    exact = fb.dot_general(x, w, LAST, backend="cpu")
    for dtype in (jnp.bfloat16, jnp.float16):
        y = fb.dot_general(x, w, LAST, preferred_element_type=dtype, backend="cpu")
        np.testing.assert_array_equal(y, exact.astype(dtype))


@pytest.mark.slow
def test_policies_gradients_and_vmap():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=(n, 48)), jnp.float32) for n in (5, 7))
    policy = fb.Policy("int4", "int8", dlhs="int8", drhs="int8", accumulator="int32")

    def loss(x, w, backend):
        return jnp.sin(fb.dot_general(x, w, LAST, policy=policy, backend=backend)).sum()

    got, expected = (jax.value_and_grad(loss, (0, 1))(x, w, backend) for backend in ("cpu", "reference"))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    qx, qw = fb.quantize(x, "int8"), fb.quantize(w, "int4")

    def product(x, w, backend="cpu"):
        return fb.dot_general(x, w, LAST, backend=backend)

    pair = jax.tree.map(lambda a: jnp.stack([a, a]), qx)
    np.testing.assert_array_equal(jax.vmap(product, (0, None))(pair, qw)[1], product(qx, qw))
    weights = jax.tree.map(lambda a: jnp.stack([a, a]), qw)
    np.testing.assert_array_equal(jax.vmap(product, (None, 0))(qx, weights)[1], product(qx, qw))
    slopes = [jax.grad(lambda q: product(qx, q, b).sum(), allow_int=True)(qw).scale for b in ("cpu", "reference")]  # noqa: B023
    np.testing.assert_allclose(*slopes, rtol=1e-6)


def test_refusals():
    def refusal(lhs, rhs, numbers=LAST, **settings):
        return Cpu().unsupported(Problem(Operand.of(lhs), Operand.of(rhs), numbers, **settings))

    x = quantized("int8", (3, 64))
    assert refusal(x, quantized("nf4", (2, 64))) == (
        "nf4[2,64] does not have integer codes of at most 8 bits with integer zero points"
    )
    assert refusal(x, x, accumulator="float32") == "it sums in int32, but accumulator='float32' was requested"
    other = fb.quantize(jnp.ones((2, 64)), "int8_g8")
    assert refusal(fb.quantize(jnp.ones((2, 64)), "int8_g16"), other) == (
        "the block sizes along the contraction are 16 and 8; they must be equal"
    )
    inner = quantized("int8", (3, 64, 2))
    numbers = (((1,), (1,)), ((), ()))
    assert "cannot be viewed as a stack of matrices: it contracts axes (1,)" in str(refusal(inner, inner, numbers))


def test_one_trace_serves_every_platform():
    x, w = quantized("int8", (3, 64)), quantized("int8", (2, 64))
    named = jax.jit(lambda x, w: fb.dot_general(x, w, LAST, backend="cpu"))
    assert "fewbit_integers" in named.lower(x, w).as_text()
    with pytest.raises(fb.UnsupportedError, match="cpu: it runs on cpu, and the program is compiled for tpu"):
        named.trace(x, w).lower(lowering_platforms=("tpu",))

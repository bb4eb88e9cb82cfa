"""The products in groups of the compiled kernels: those of each group alone, bit for bit, gradients, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.buffers import INTEGER_LEVELS
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul import Cpu, Problem
from fewbit.kernels.qmatmul.blocks import block_product
from fewbit.kernels.qmatmul.problem import Operand
from fewbit.kernels.qmatmul.reference import Reference
from tests.kernels.unfused import unfused

BUILT = extension("fewbit.kernels.qmatmul.cpu._dequant_gemm")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason=str(BUILT.missing))

ISA = extension("fewbit.kernels.qmatmul.cpu._int8_gemm").isa
LEVELS = INTEGER_LEVELS[: INTEGER_LEVELS.index(ISA) + 1] if ISA in INTEGER_LEVELS else INTEGER_LEVELS[:1]

GROUPS = ([1, 0, 4, 19], [0, 0, 24, 0], [2, 3, 0, 4], [0, 0, 0, 0], [30, 0, 2, 9])
"""Sizes of four groups of 24 rows: one row, none, few, many, too few in all, and too many."""


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def expected(x: jax.Array, q: fb.QArray, sizes: list[int], axis: int) -> np.ndarray:
    """The product in float64; zeros for the rows beyond all groups."""
    w = np.asarray(fb.dequantize(q, jnp.float32), np.float64)
    group = np.repeat(np.arange(len(sizes)), sizes)[: len(x)]
    y = np.zeros((len(x), w.shape[3 - axis]))
    y[: len(group)] = np.einsum(
        "mk,mnk->mn" if axis == 2 else "mk,mkn->mn", np.asarray(x, np.float64)[: len(group)], w[group]
    )
    return y


@pytest.mark.parametrize(("name", "dtype"), [("int4_g32", "float32"), ("int8", "bfloat16"), ("q4_1", "float32")])
def test_values(name: str, dtype: str):
    for tiled, axis in ((-1, 1), (-1, 2), (-2, 1)):
        q = fb.quantize(jnp.asarray(random(4, 64, 96), dtype), name, axis=tiled)
        x = jnp.asarray(random(24, q.shape[axis]), dtype)
        problem = Problem.ragged(Operand.of(x), Operand.of(q), axis == 2)
        product = jax.jit(lambda x, q, sizes, problem=problem: Cpu().run(problem, x, q, sizes))
        for sizes in GROUPS:
            y = product(x, q, jnp.array(sizes))
            assert y.dtype == dtype
            # The roundings of float32 sums of 96 products whose magnitudes add up to 300 at most; in bfloat16, of y, too.
            allowed = 300 * 100 * 2.0**-24 + (0 if dtype == "float32" else 2.0**-8 * np.abs(np.asarray(y, np.float32)))
            assert (np.abs(np.asarray(y, np.float64) - expected(x, q, sizes, axis)) <= allowed).all()


def test_large_groups_in_bfloat16():
    """AMX multiplies those of 64 rows or more, others float32 kernels."""
    q, sizes = fb.quantize(jnp.asarray(random(4, 64, 96)), "q4_1", axis=-1), [70, 3, 0, 131]
    x = jnp.asarray(random(210, 96), jnp.bfloat16)
    problem = Problem.ragged(Operand.of(x), Operand.of(q), True, preferred=jnp.float32)
    y = Cpu().run(problem, x, q, jnp.array(sizes))
    np.testing.assert_allclose(y, expected(x, q, sizes, 2), rtol=0, atol=300 * 100 * 2.0**-24)
    own = fb.dot_general(x[73:204], q[3], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32, backend="cpu")
    np.testing.assert_array_equal(y[73:204], own)


def test_a_group_has_the_bits_of_its_own_product():
    q, x = fb.quantize(jnp.asarray(random(4, 64, 96)), "nf4", axis=-2), jnp.asarray(random(24, 64))
    y = fb.ragged_dot(x, q, jnp.array([3, 0, 20, 1]), backend="cpu")
    own = fb.dot_general(x[3:23], q[2], (((1,), (0,)), ((), ())), backend="cpu")
    np.testing.assert_array_equal(y[3:23], own)


def test_gradients_and_vmap():
    q, sizes = fb.quantize(jnp.asarray(random(4, 64, 32)), "nf4", axis=-2), jnp.array([2, 0, 5, 3])
    x = jnp.asarray(random(2, 12, 64))

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: fb.ragged_dot(x, q, sizes, backend="cpu"))(x) ** 2)

    (value, of_x), w = jax.jit(jax.value_and_grad(loss))(x), np.asarray(fb.dequantize(q), np.float64)
    y = np.stack([expected(rows, q, [2, 0, 5, 3], 1) for rows in x])
    np.testing.assert_allclose(value, (y**2).sum(), rtol=1e-5)
    wanted = np.einsum("bmn,mkn->bmk", 2 * y[:, :10], w[np.repeat(np.arange(4), [2, 0, 5, 3])])
    np.testing.assert_allclose(of_x[:, :10], wanted, rtol=1e-4, atol=1e-3)
    assert (of_x[:, 10:] == 0).all()


def test_the_matrix_of_a_group_without_rows_is_not_read():
    q = fb.quantize(jnp.asarray(random(3, 32, 16)), "int8", axis=-2)
    q = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan) if leaf.dtype == jnp.float32 else leaf, q)
    y = fb.ragged_dot(jnp.asarray(random(9, 32)), q, jnp.array([4, 0, 5]), backend="cpu")
    assert np.isfinite(y).all()


def test_reasons():
    q, x = fb.quantize(jnp.asarray(random(3, 32, 16)), "int8", axis=-2), jnp.ones((5, 32), jnp.float32)
    problem = Problem.ragged(Operand.of(x), Operand.of(q))
    assert "XLA cannot split its calls over them" in str(Cpu().not_chosen(problem))
    assert Cpu().unsupported(problem) is None
    with pytest.raises(fb.UnsupportedError, match=r"cpu: it multiplies float32 into int32; both must be one of float32"):
        fb.ragged_dot(x, q, jnp.array([4, 0, 1]), preferred_element_type=jnp.int32, backend="cpu")


# --- rows in int8, too ---


@pytest.mark.parametrize("name", ["int8", pytest.param("uint4", marks=pytest.mark.slow)])
def test_whole_rows_of_integers_have_the_bits_of_the_reference(name: str):
    x, q = fb.quantize(jnp.asarray(random(24, 70)), "int8"), fb.quantize(jnp.asarray(random(4, 70, 37)), name, axis=-2)
    for experts, contracts_cols in ((q, False), (q.swapaxes(1, 2), True)):
        problem = Problem.ragged(Operand.of(x), Operand.of(experts), contracts_cols)
        reference = jax.jit(lambda *operands, problem=problem: Reference().run(problem, *operands))
        product = {
            isa: jax.jit(lambda *operands, problem=problem, isa=isa: Cpu(isa).run(problem, *operands)) for isa in LEVELS
        }
        for sizes in GROUPS:
            expected = reference(x, experts, jnp.array(sizes))
            for isa in LEVELS:
                np.testing.assert_array_equal(product[isa](x, experts, jnp.array(sizes)), expected, isa)


@pytest.mark.once
@pytest.mark.parametrize(
    "name", ["q4_1", pytest.param("nvfp4", marks=pytest.mark.slow), pytest.param("int3_g32", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("axis", [1, 2])
def test_blocks_of_integers_have_the_bits_of_the_reference(name: str, axis: int):
    shape = (4, 96, 21) if axis == 1 else (4, 21, 96)
    q = fb.quantize(jnp.asarray(random(*shape)), name, axis=axis)
    contracts_cols, tile = axis == 2, q.tiles[axis]
    for kind in (f"int8_g{tile}", "int8", "int8_g48" if tile == 16 else "int8_g16"):
        x = fb.quantize(jnp.asarray(random(24, 96)), kind)
        problem = Problem.ragged(Operand.of(x), Operand.of(q), contracts_cols)
        assert Cpu().unsupported(problem) is None
        product = {isa: jax.jit(lambda *operands, isa=isa: Cpu(isa).run(problem, *operands)) for isa in LEVELS}  # noqa: B023
        rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (4, *leaf.shape)), x)
        every = unfused(lambda x, q: block_product(x, q, contracts_cols=contracts_cols))(rows, q)  # each row by each expert
        for sizes in GROUPS:
            group = np.repeat(np.arange(4), sizes)[:24]
            wanted = np.zeros((24, 21), np.float32)
            wanted[: len(group)] = every[group, np.arange(len(group))]
            y = {isa: np.asarray(product[isa](x, q, jnp.array(sizes))) for isa in LEVELS}
            if ISA in INTEGER_LEVELS:
                np.testing.assert_array_equal(y["portable"], wanted)
            for isa in LEVELS[1:]:  # a product and a sum are rounded at once, for each of the blocks
                np.testing.assert_array_equal(y[isa], y[LEVELS[1]], isa)
                np.testing.assert_allclose(y[isa], wanted, rtol=2.0**-20, atol=2.0**-20 * np.abs(wanted).max())


def test_a_policy_with_int8_rows_takes_the_kernel():
    experts, sizes, x = jnp.asarray(random(4, 64, 32)), jnp.array([2, 0, 5, 3]), jnp.asarray(random(2, 12, 64))
    policy = fb.Policy("q4_1", "int8_g32")

    def product(x: jax.Array, experts: jax.Array, backend: str) -> jax.Array:
        return fb.ragged_dot(x, experts, sizes, policy=policy, backend=backend)

    def loss(x: jax.Array, experts: jax.Array, backend: str) -> jax.Array:
        return jnp.sum(product(x, experts, backend) ** 2)

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    assert "fewbit_integer_blocks" in gradients.lower(x[0], experts, "cpu").as_text()
    for y, wanted in zip(*(jax.tree.leaves(gradients(x[0], experts, b)) for b in ("cpu", "reference")), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    mapped = jax.vmap(product, (0, None, None))(x, experts, "cpu")
    for i in range(2):
        np.testing.assert_array_equal(mapped[i], product(x[i], experts, "cpu"))


def test_gradients_of_scales_and_a_mapped_stack():
    x, sizes = fb.quantize(jnp.asarray(random(12, 64)), "int8"), jnp.array([2, 0, 5, 3])
    q = fb.quantize(jnp.asarray(random(4, 64, 32)), "int8", axis=-2)

    def product(q: fb.QArray, backend: str = "cpu") -> jax.Array:
        return fb.ragged_dot(x, q, sizes, backend=backend)

    slopes = [jax.grad(lambda q, b=b: product(q, b).sum(), allow_int=True)(q).scale for b in ("cpu", "reference")]
    np.testing.assert_allclose(*slopes, rtol=1e-6)
    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), q)
    np.testing.assert_array_equal(jax.vmap(product)(pair)[1], product(jax.tree.map(lambda leaf: leaf[1], pair)))

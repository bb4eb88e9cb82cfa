"""The products in groups of the TPU kernel: values in interpret mode, gradients, lowering for TPUs, and the bytes that they move."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.qmatmul import PallasTPU, Problem, dispatch
from fewbit.kernels.qmatmul.tpu.blocks import Block, Config, Cut, bytes_moved
from fewbit.kernels.qmatmul.tpu.gemm import DecodedProduct
from fewbit.kernels.qmatmul.tpu.problem import Form
from fewbit.kernels.qmatmul.tpu.ragged import PLAIN, Visits, grouped_blocks, grouped_pair, grouped_product

SMALL = Config(m=8, codes=256, columns=128)  # several blocks along each axis of what follows
SIZES = {
    "none crosses": [8, 8, 0, 8],
    "some cross": [3, 0, 11, 5],
    "one has all": [0, 0, 24, 0],
    "rows are left": [1, 1, 1, 4],
    "none has any": [0, 0, 0, 0],
    "too many": [20, 0, 20, 3],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("rows", "block"), [(24, 8), (21, 8), (24, 24), (1, 8)])
def test_visits_meet_every_row_of_every_group_once(sizes: list[int], rows: int, block: int):
    visits = jax.jit(Visits.of, static_argnums=(1, 2))(jnp.array(sizes, jnp.int32), rows, block)
    group = np.repeat(np.arange(4), sizes)[:rows]
    expected = sorted({(int(row // block), int(g)) for row, g in enumerate(group)})
    count = int(visits.count)
    assert count <= len(visits.group)
    assert list(zip(visits.block[:count].tolist(), visits.group[:count].tolist(), strict=True)) == expected
    assert visits.bounds.tolist() == np.minimum(np.concatenate([[0], np.cumsum(sizes)]), rows).tolist()


def operands(name: str, axis: int, contracts_last: bool, dtype: Any) -> tuple[jax.Array, fb.QArray]:
    """Rows, and four matrices whose lengths no block divides."""
    rng = np.random.default_rng(0)
    shape = (4, 40, 301) if contracts_last else (4, 301, 40)
    q = fb.quantize(jnp.asarray(rng.normal(size=shape), dtype), name, axis=axis)
    return jnp.asarray(rng.normal(size=(24, 301)), dtype), q


def product(x: Any, q: fb.QArray | np.ndarray, sizes: list[int], contracts_last: bool) -> np.ndarray:
    """The products in float64."""
    w = np.asarray(fb.dequantize(q, jnp.float32) if isinstance(q, fb.QArray) else q, np.float64)
    w = w.swapaxes(1, 2) if contracts_last else w
    group = np.repeat(np.arange(len(sizes)), sizes)[: len(x)]
    y = np.zeros((len(x), w.shape[2]))
    y[: len(group)] = np.einsum("mk,mkn->mn", np.asarray(x, np.float64)[: len(group)], w[group])
    return y


CASES = [
    ("int4_g64", -2, False, "some cross", jnp.float32),
    ("nvfp4", -1, True, "rows are left", jnp.float32),
    ("q4_1", -2, True, "some cross", jnp.float32),
    ("nf4", -1, False, "one has all", jnp.bfloat16),
    ("int8", -2, False, "none has any", jnp.float32),
]


@pytest.mark.parametrize(
    ("name", "axis", "contracts_last", "sizes", "dtype"),
    [CASES[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in CASES[1:])],
)
def test_values(name: str, axis: int, contracts_last: bool, sizes: str, dtype: Any):
    x, q = operands(name, axis, contracts_last, dtype)
    groups = jnp.array(SIZES[sizes], jnp.int32)
    how = {"contracts_last": contracts_last, "result": dtype, "config": SMALL, "interpret": True}
    y = jax.jit(functools.partial(grouped_product, **how))(x, q, groups)
    assert y.dtype == dtype
    exact = product(x, q, SIZES[sizes], contracts_last)
    error = np.abs(np.asarray(y, np.float64) - exact)
    # The roundings of float32 sums of 301 products; in bfloat16, of each number and of the result.
    size = np.linalg.norm(np.asarray(x, np.float64), axis=1)[:, None] * 20
    assert (error <= size * (2.0**-24 * 305 if dtype == jnp.float32 else 2.0**-8)).all()
    assert (np.asarray(y, np.float64)[sum(SIZES[sizes]) :] == 0).all()


# Both sides' schemes, whether the matrices are stored as [G, N, K], and the groups.
PAIRS = [
    ("int8", "int4_g64", False, "some cross"),
    ("uint8", "uint4", True, "rows are left"),
    ("fp8", "fp8", True, "one has all"),
    ("uint8_g128", "uint8_g128", False, "some cross"),
    ("int8", "int8", False, "none has any"),
]


@pytest.mark.parametrize(
    ("left", "right", "contracts_last", "sizes"), [PAIRS[0], *(pytest.param(*c, marks=pytest.mark.slow) for c in PAIRS[1:])]
)
def test_values_of_two_quantized_operands(left: str, right: str, contracts_last: bool, sizes: str, on_cpu: "OnCpu"):
    """Within the roundings of float32 sums, as of one product of two operands; several blocks along each axis."""
    rng = np.random.default_rng(0)
    shape, axis = ((4, 140, 301), -1) if contracts_last else ((4, 301, 140), -2)
    q = fb.quantize(jnp.asarray(rng.normal(0.2, 1, shape), jnp.float32), right, axis=axis)
    x = fb.quantize(jnp.asarray(rng.normal(0.2, 1, (24, 301)), jnp.float32), left)
    contracted = ((1,), (2 if contracts_last else 1,)), ((), ())
    numbers = jax.lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
    groups = jnp.array(SIZES[sizes], jnp.int32)
    y = fb.ops.ragged_dot_general(x, q, groups, numbers, backend=on_cpu)
    rows, w = (np.asarray(fb.dequantize(operand), np.float64) for operand in (x, q))
    exact = product(rows, w, SIZES[sizes], contracts_last)
    size = product(np.abs(rows), np.abs(w), SIZES[sizes], contracts_last)
    assert y.dtype == jnp.float32
    assert (np.abs(np.asarray(y, np.float64) - exact) <= size * 2.0**-24 * 2 * (301 + 3)).all()
    assert (np.asarray(y)[sum(SIZES[sizes]) :] == 0).all()


# --- as a backend ---


@dataclasses.dataclass(frozen=True)
class OnCpu(PallasTPU):
    """The backend in interpret mode as if it were made for CPUs, so that all that surrounds it can be run."""

    name: ClassVar[str] = "pallas_on_cpu"
    platform: ClassVar[str] = "cpu"
    groups: Config | None = Config(m=8, codes=64, columns=128)
    interpret: bool = True

    def not_chosen(self, problem: Problem) -> str | None:
        return None


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    backend = OnCpu()
    monkeypatch.setattr(dispatch, "BACKENDS", (backend, *dispatch.BACKENDS))
    return backend


def experts(dtype: Any = jnp.float32) -> fb.QArray:
    return fb.quantize(jnp.asarray(np.random.default_rng(1).normal(size=(4, 64, 32)), dtype), "int4_g32", axis=-2)


@pytest.mark.slow
def test_gradients_and_vmap(on_cpu: OnCpu):
    q, sizes = experts(), jnp.array([2, 0, 5, 3], jnp.int32)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(2, 12, 64)), jnp.float32)

    def loss(backend: str, x: jax.Array, q: fb.QArray) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: fb.ragged_dot(x, q, sizes, backend=backend))(x) ** 2)

    def decoded(x: jax.Array, q: fb.QArray) -> jax.Array:
        group = jnp.repeat(jnp.arange(4), sizes, total_repeat_length=10)
        return jnp.sum(jnp.einsum("bmk,mkn->bmn", x[:, :10], fb.dequantize(q)[group]) ** 2)

    ours, theirs = (
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1), allow_int=True)) for fn in (functools.partial(loss, on_cpu), decoded)
    )
    (value, (of_x, of_q)), (expected, (x_wanted, q_wanted)) = ours(x, q), theirs(x, q)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(of_x, x_wanted, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(of_q.scale, q_wanted.scale, rtol=1e-4, atol=1e-3)
    assert (of_x[:, 10:] == 0).all()


@pytest.mark.slow
def test_mapped_matrices_and_sizes_take_turns(on_cpu: OnCpu):
    q = experts()
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 12, 64)), jnp.float32)
    sizes = jnp.array([[2, 0, 5, 3], [0, 12, 0, 0]], jnp.int32)
    y = jax.vmap(lambda x, sizes: fb.ragged_dot(x, q, sizes, backend=on_cpu))(x, sizes)
    for own, rows, groups in zip(y, x, sizes.tolist(), strict=True):
        np.testing.assert_allclose(own, product(rows, q, groups, False), rtol=1e-4, atol=1e-4)


def test_the_transposed_matrices_are_contracted_as_they_are_stored(on_cpu: OnCpu):
    q, x = experts(), jnp.ones((5, 32))
    contracted = ((1,), (2,)), ((), ())
    numbers = jax.lax.RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
    y = fb.ops.ragged_dot_general(x, q, jnp.array([1, 2, 2, 0]), numbers, backend=on_cpu)
    np.testing.assert_allclose(y, product(x, q, [1, 2, 2, 0], True), rtol=1e-4, atol=1e-4)


def test_a_model_takes_it_where_it_runs(on_cpu: OnCpu):
    """Unchanged code with quantized experts, in one program for all platforms."""
    q, x, sizes = experts(), jnp.ones((5, 64)), jnp.array([1, 2, 2, 0])
    traced = jax.jit(fb.transparent(jax.lax.ragged_dot)).trace(x, q, sizes)
    assert str(traced.jaxpr).count("fewbit_kernel[") == 1
    assert "stablehlo.while" in traced.lower(lowering_platforms=("cpu",)).as_text()  # the steps of the interpreted kernel
    assert "stablehlo.while" not in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_reasons():
    q, x, sizes = experts(), jnp.ones((5, 64)), jnp.array([1, 2, 2, 0])
    with pytest.raises(fb.UnsupportedError) as caught:
        fb.ragged_dot(x, q, sizes, backend="pallas_tpu")
    assert caught.value.reasons == {"pallas_tpu": "it runs on tpu, and the program is compiled for cpu"}
    with pytest.raises(fb.UnsupportedError, match="multiplies bfloat16 and float32, not float16"):
        fb.ragged_dot(x.astype(jnp.float16), q.astype(jnp.float16), sizes, backend="pallas_tpu")
    packed = fb.quantize(jnp.ones((4, 64, 32)), "int4", axis=0)
    with pytest.raises(
        fb.UnsupportedError, match="cannot be viewed as a stack of matrices: its codes share bytes along a batch axis"
    ):
        fb.ragged_dot(x, packed, sizes, backend="pallas_tpu")
    with pytest.raises(fb.UnsupportedError, match="the codes are int2; codes of 4 and 8 bits in order"):
        fb.ragged_dot(fb.quantize(x, "int8"), fb.quantize(fb.dequantize(q), "int2", axis=-2), sizes, backend="pallas_tpu")
    with pytest.raises(fb.UnsupportedError, match="it takes rows in groups, and quantized matrices"):
        fb.ragged_dot(x, fb.dequantize(q), sizes, backend="pallas_tpu")


# --- what a TPU would run ---


def abstract(name: str, axis: int, shape: tuple[int, int, int], rows: int, contracts_last: bool) -> tuple[Any, fb.QArray]:
    q = jax.eval_shape(lambda w: fb.quantize(w, name, axis=axis), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    return jax.ShapeDtypeStruct((rows, shape[2 if contracts_last else 1]), jnp.bfloat16), q


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "axis", "shape", "contracts_last"),
    [("mxfp4", -1, (32, 2880, 5760), True), ("int4_g64", -2, (8, 1000, 576), True), ("nvfp4", -2, (8, 4096, 1024), False)],
)
def test_it_is_lowered_for_tpus_from_packed_bytes(name: str, axis: int, shape: tuple[int, int, int], contracts_last: bool):
    x, q = abstract(name, axis, shape, 300, contracts_last)
    sizes = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    of = functools.partial(grouped_product, contracts_last=contracts_last, result=jnp.bfloat16)
    text = jax.jit(of).trace(x, q, sizes).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "tensor<{}x{}x{}xui8>".format(*q.codes.shape) in text
    assert "tensor<{}x{}x{}x".format(*shape) not in text  # no array of the unpacked size


@pytest.mark.newest
@pytest.mark.parametrize(("right", "axis", "shape"), [("int4_g64", -2, (8, 4096, 1000)), ("int8", -1, (8, 600, 1024))])
def test_two_quantized_operands_are_lowered_for_tpus_from_packed_bytes(right: str, axis: int, shape: tuple[int, int, int]):
    rows, q = abstract(right, axis, shape, 300, axis == -1)
    x = jax.eval_shape(lambda x: fb.quantize(x, "int8"), jax.ShapeDtypeStruct((1, *rows.shape), jnp.float32))
    of = functools.partial(grouped_pair, contracts_last=axis == -1, result=jnp.bfloat16)
    text = jax.jit(of).trace(x, q, jax.ShapeDtypeStruct((8,), jnp.int32)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "tensor<{}x{}x{}xui8>".format(*q.codes.shape) in text
    assert "tensor<{}x{}x{}xf".format(*shape) not in text  # no array of the unpacked size


def test_one_trace_serves_cpu_and_tpu_forwards_and_backwards():
    x, q = abstract("nf4", -2, (4, 256, 128), 16, False)

    def loss(x: jax.Array, q: fb.QArray, sizes: jax.Array) -> jax.Array:
        return jnp.sum(fb.ragged_dot(x, q, sizes, backend="pallas_tpu").astype(jnp.float32) ** 2)

    traced = jax.jit(jax.grad(loss)).trace(x, q, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 2
    with pytest.raises(fb.UnsupportedError, match="it runs on tpu, and the program is compiled for cpu"):
        traced.lower(lowering_platforms=("cpu",))


def test_only_the_matrices_of_groups_with_rows_are_read():
    x, q = abstract("mxfp4", -1, (32, 576, 1024), 64, True)
    x = jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    cut = Cut.of(Form.of(x, q, contracts_last=True, result=jnp.bfloat16), PLAIN)
    sizes = np.zeros(32, np.int32)
    sizes[[3, 4, 17]] = 10, 1, 53
    visits = Visits.of(jnp.asarray(sizes), 64, cut.m)
    groups, blocks = np.asarray(visits.group), np.asarray(visits.block)

    def known(block: Block) -> Block:
        return dataclasses.replace(block, index=lambda *step: tuple(map(int, block.index(*step, groups, blocks))))

    concrete = [known(block) for block in grouped_blocks(DecodedProduct(cut), x, q)]
    moved = bytes_moved(concrete, (cut.grid[1], int(visits.count), cut.grid[2]))
    assert moved["codes"] + moved["scale"] == q.nbytes * 3 // 32

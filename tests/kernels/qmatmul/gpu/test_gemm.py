"""The Triton products in Triton's interpreter, against the product of the decoded matrix in float64."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the Triton kernels need triton")

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.kernels.qmatmul import Problem, TritonGPU  # noqa: E402
from fewbit.kernels.qmatmul.gpu.config import DotConfig, GemvConfig, Gpu, GpuConfig, PairsConfig  # noqa: E402
from fewbit.kernels.qmatmul.gpu.weight import Matrix  # noqa: E402
from fewbit.kernels.qmatmul.problem import Operand  # noqa: E402
from fewbit.torch.matmul import by_triton, codes_by_triton, unsupported_codes  # noqa: E402
from fewbit.torch.quantize import chosen  # noqa: E402
from fewbit.torch.ragged import ragged_by_triton, unsupported_stack  # noqa: E402
from tests.kernels.interpreted import interpreted_kernels, stand_in_for_jax_triton  # noqa: E402

# The interpreter's numpy warns of NaN and of overflows, which a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCHEMES = (
    "int4", "int4_g32", "uint4", "uint4_g64", "q4_1", "nf4", "bnb_fp4", "mxfp4", "nvfp4", "nvint4", "int8", "int8_g128", "uint8",
    "q8_0", "fp8", "fp8_e5m2", "fp8_tensor", "mxfp8", "mxfp8_e5m2", "mxint8", "int8_g16",
)  # fmt: skip
FAST = ("uint4_g64", "nf4", "nvfp4", "fp8")
EACH = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SCHEMES]
BLOCKS = [case for case in EACH if case.values[0] in (*FAST, "int4", "q4_1", "mxfp8", "int8_g16", "fp8_tensor")]
"""The same for tensor cores: decoding is shared, so one scheme for each way that scales lie in a block."""
SMALL = GpuConfig(
    "", "", 4, 0, False, 1024, {4: GemvConfig(8, 16, 4), 8: GemvConfig(8, 16, 4)},
    {4: PairsConfig(16, 128, 4, 2), 8: PairsConfig(16, 128, 4, 2)}, (DotConfig(None, 16, 64, 64, 4, 2),),
    (DotConfig(None, 16, 32, 64, 4, 2),),
)  # fmt: skip
"""Small blocks, so that small products have several of each; without inline PTX, which the interpreter does not know."""
WIDE = dataclasses.replace(SMALL, gemv={4: GemvConfig(16, 16, 4), 8: GemvConfig(64, 16, 4)})
BY_DOT = dataclasses.replace(SMALL, gemv_rows=0)
BY_PAIRS = dataclasses.replace(SMALL, pairs_rows=16)


@pytest.fixture(autouse=True, scope="module")
def _in_the_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, interpreted_kernels(patch):
        yield


def weight(name: str, n: int, k: int, dim: int = -1) -> "fbt.QTensor":
    """A matrix `[K, N]`, held as `[N, K]` (dim -1) or as `[K, N]` (dim 0)."""
    rng = np.random.default_rng(n + k)
    w = torch.tensor((rng.normal(size=(n, k)) * rng.choice([0.01, 1.0, 30.0], size=(n, 1))).astype(np.float32))
    w = w if dim == -1 else w.T.contiguous()
    q = fbt.quantize(w, name, dim, "naive" if fb.scheme(name).zero_point is None else None)
    return q.T if dim == -1 else q


def activations(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(m).normal(size=(m, k))).to(dtype)


def assert_right(y: torch.Tensor, x: torch.Tensor, q: "fbt.QTensor", step: float) -> None:
    """Each sum errs by less than `step` of the sum of its products' magnitudes: what rounding each factor once may cost."""
    w = fbt.dequantize(q, torch.float32).double()
    exact, magnitude = x.double() @ w, x.double().abs() @ w.abs()
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= step * magnitude).all()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", EACH)
def test_a_few_rows_in_float32(name: str) -> None:
    q, x = weight(name, 22, 160), activations(1, 160, torch.float32)
    assert_right(by_triton(x, q, SMALL, Gpu(4, 1 << 16)), x, q, 2.0**-20)


@pytest.mark.parametrize("name", BLOCKS)
def test_many_rows_by_tensor_cores(name: str) -> None:
    q, x = weight(name, 70, 160), activations(18, 160, torch.bfloat16)
    # The weight becomes bfloat16, and so does the result: a step, 2**-8, each, since the interpreter cuts where a GPU rounds.
    assert_right(by_triton(x, q, SMALL, Gpu(4, 1 << 16)), x, q, 2.0**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_half_precision(dtype: torch.dtype) -> None:
    q, x = weight("uint4_g64", 22, 160), activations(3, 160, dtype)
    assert_right(by_triton(x, q, SMALL, Gpu(4, 1 << 16)), x, q, 2.0**-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("uint4_g64", 130),
        ("fp8_block128", 140),
        *(pytest.param(name, k, marks=pytest.mark.slow) for name, k in (("int4_g32", 96), ("mxfp8", 96), ("nf4", 72))),
    ],
)
@pytest.mark.parametrize("dim", [-1, 0])
def test_both_orientations_and_the_gradient(name: str, k: int, dim: int) -> None:
    q = weight(name, 38, k, dim)
    x, g = activations(5, k, torch.float32), activations(5, 38, torch.float32)
    assert_right(by_triton(x, q, BY_DOT, Gpu(1, 1 << 16)), x, q, 2.0**-20)
    assert_right(by_triton(g, q.T, BY_DOT, Gpu(1, 1 << 16)), g, q.T, 2.0**-20)


@pytest.mark.parametrize("k", [33, 77])
def test_odd_lengths(k: int) -> None:
    for dim in (-1, 0):
        q, x = weight("int4_g16", 21, k, dim), activations(2, k, torch.float16)
        assert_right(by_triton(x, q, SMALL, Gpu(4, 1 << 16)), x, q, 2.0**-10)


def by_pairs(q: "fbt.QTensor") -> str | None:
    """Why the numbers of a matrix are not made in pairs; None when they are."""
    from fewbit.kernels.qmatmul.gpu import launch as triton_launch

    return triton_launch.pairs_refuses(Matrix(q.scheme, *q.shape), (q.codes.stride(0), q.codes.stride(1)))


PAIRS = (
    "int4",
    "int4_g32",
    "uint4_g64",
    "q4_1",
    "nf4",
    "mxfp4",
    "nvfp4",
    "nvint4",
    "int8_g128",
    "uint8",
    "q8_0",
    "fp8",
    "mxfp8",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("uint4_g64", "nvfp4") else pytest.mark.slow) for name in PAIRS]
)
def test_a_few_rows_of_bfloat16_by_tensor_cores(name: str) -> None:
    q, x = weight(name, 22, 160), activations(3, 160, torch.bfloat16)
    assert by_pairs(q) is None
    # Only the numbers of a table are rounded, which the interpreter cuts: a step; and the result, likewise.
    assert_right(by_triton(x, q, BY_PAIRS, Gpu(4, 1 << 16)), x, q, 2.0**-7 if name == "nf4" else 2.0**-7.9)


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("int4_g32", "uint4_g64", "nf4", "mxfp4", "nvint4", "int8", "uint8", "fp8")
        ),
    ],
)
def test_pairs_by_ptx_are_those_by_triton(name: str) -> None:
    """With numpy in the place of a GPU that evaluates PTX: four neighbouring bytes make a register."""
    q, x = weight(name, 22, 160), activations(3, 160, torch.bfloat16)
    by_ptx = by_triton(x, q, dataclasses.replace(BY_PAIRS, ptx=True), Gpu(4, 1 << 16, 90))
    if name == "nf4":  # PTX rounds where the interpreter cuts
        assert_right(by_ptx, x, q, 2.0**-7)
    else:
        assert torch.equal(by_ptx, by_triton(x, q, BY_PAIRS, Gpu(4, 1 << 16, 90)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k", "m"), [("int4_g64", 77, 16), ("nvfp4", 50, 9), ("int8", 33, 1), ("mxfp4", 512, 2)])
def test_pairs_of_odd_lengths(name: str, k: int, m: int) -> None:
    q, x = weight(name, 21, k), activations(m, k, torch.bfloat16)
    assert_right(by_triton(x, q, BY_PAIRS, Gpu(4, 1 << 16)), x, q, 2.0**-7.9)


@pytest.mark.parametrize(
    ("name", "dim", "text"),
    [
        ("int4_g32", 0, "are not contiguous along the contraction"), ("nf4_g16", -1, "tiles of 16"),
        ("int8_g16", -1, "tiles of 16"), ("fp8_e5m2", -1, "numbers of e5m2 are not decoded"), ("mxint8", -1, "in steps other than 1"),
    ],
)  # fmt: skip
def test_what_is_not_decoded_in_pairs_says_why(name: str, dim: int, text: str) -> None:
    assert text in str(by_pairs(weight(name, 64, 64, dim)))


@pytest.mark.slow
def test_splits_add_up_in_order() -> None:
    q, x = weight("nvfp4", 64, 1024), activations(6, 1024, torch.float32)
    y = by_triton(x, q, BY_DOT, Gpu(16, 1 << 16))
    assert_right(y, x, q, 2.0**-19)
    assert torch.equal(y, by_triton(x, q, BY_DOT, Gpu(16, 1 << 16)))
    assert not torch.equal(y, by_triton(x, q, BY_DOT, Gpu(1, 1 << 16)))  # other sums: K was split


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "uint8", "fp8", "fp8_e5m2", "int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("config", [WIDE, BY_DOT], ids=["gemv", "dot"])
def test_every_code_decodes_to_its_number(name: str, config: GpuConfig) -> None:
    """Code c stands alone in column c, so that the product with ones is its number, NaN and infinity included."""
    fmt = fb.scheme(name).format
    count = 1 << fmt.bits
    q = fbt.quantize(
        torch.ones(count, 32),
        "mxfp4" if name == "mxfp4" else {"format": fmt.name, "scale": "float32", "tile": {"*": 1, "-1": 32}},
    )
    codes = torch.zeros_like(q.codes)
    codes[:, 0] = torch.arange(count, dtype=torch.int32).to(torch.uint8)
    scale = torch.full_like(q.scale, 127 if name == "mxfp4" else 1)
    x = torch.zeros(1, 32)
    x[0, 0] = 1
    changed = fbt.QTensor(codes, scale, q.scheme, q.shape, q.dtype, tensor_scale=q.tensor_scale)
    y = by_triton(x, changed.T, config, Gpu(4, 1 << 16))[0]
    assert np.array_equal(y.numpy(), np.asarray(fmt.values(), np.float32), equal_nan=True)


def test_scales_that_are_nan() -> None:
    q = weight("mxfp4", 16, 64)
    q.scale[1, 3] = 255
    for config in (SMALL, BY_DOT):
        y = by_triton(torch.ones(1, 64), q, config, Gpu(4, 1 << 16))[0]
        assert y.isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("config", [SMALL, BY_DOT], ids=["gemv", "dot"])
def test_a_zero_point_of_several_scales(config: GpuConfig) -> None:
    q, x = weight("uint4_g64", 22, 160), activations(2, 160, torch.float32)
    assert q.zero_point is not None and q.scale.shape == (3, 22)
    for zero in (q.zero_point[:1, :1], q.zero_point[:1], q.zero_point.T.contiguous().T):
        shared = fbt.QTensor(q.codes, q.scale, q.scheme, q.shape, q.dtype, zero_point=zero)
        assert_right(by_triton(x, shared, config, Gpu(4, 1 << 16)), x, shared, 2.0**-20)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_rows_that_were_quantized_one_by_one(name: str) -> None:
    """Each has a tensor scale, or a scale where the scheme has one for all."""
    w = np.random.default_rng(0).normal(size=(8, 32)) * np.logspace(0, 4, 8)[:, None]
    rows = jax.vmap(lambda w: fb.quantize(w, chosen(fb.scheme(name), "naive")))(jnp.asarray(w, jnp.float32))
    q = fbt.from_qarray(rows).T
    x = activations(2, 32, torch.float32)
    assert_right(by_triton(x, q, BY_DOT, Gpu(4, 1 << 16)), x, q, 2.0**-20)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dim", [-1, 0])
def test_codes_times_codes(name: str, dim: int) -> None:
    q = weight(name, 40, 100, dim)
    x = fbt.quantize(activations(20, 100, torch.float32), name)
    assert unsupported_codes(x, q, (9, 0)) is None
    y, w = codes_by_triton(x, q, SMALL, Gpu(4, 1 << 16)), fbt.dequantize(x)
    assert_right(y, w, q, 2.0**-20)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int3", "3 bits"),
        ("fp8_e4m3fnuz", "codes of e4m3fnuz"),
        ("int4_g24", "tiles of 24"),
        ("nf4_dq", "quantized themselves"),
    ],
)
def test_what_no_kernel_reads_says_why(name: str, text: str) -> None:
    reason = Matrix(fb.scheme(name).along(0, 2), 96, 16).unsupported()
    assert reason is not None and text in reason


DOUBLE = dataclasses.replace(fb.scheme("int8"), scale=dataclasses.replace(fb.scheme("int8"), tile={}))
"""Scales that are int8 codes with one scale."""


@pytest.mark.parametrize(
    ("names", "capability", "text"),
    [
        (("int8", "fp8"), (9, 0), "must be int8 and int8"), (("fp8", "fp8"), (8, 0), "8.9 is needed"),
        (("mxfp8", "fp8"), (9, 0), "one a row of x"), (("int4", "int4"), (9, 0), "int4"),
        ((DOUBLE, "int8"), (9, 0), "quantized themselves"),
    ],
)  # fmt: skip
def test_codes_that_no_kernel_multiplies_say_why(names: tuple[Any, Any], capability: tuple[int, int], text: str) -> None:
    x, q = (fbt.quantize(torch.ones(4, 64), name, method="naive") for name in names)
    assert text in str(unsupported_codes(x, q.T, capability))


@pytest.mark.parametrize("contracts_cols", [pytest.param(True, marks=pytest.mark.slow), False])
def test_jax_reaches_the_kernels_through_jax_triton(contracts_cols: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter in the place of jax-triton, which needs a GPU."""
    stand_in_for_jax_triton(monkeypatch)
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(2, 24, 64)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 3, 64 if contracts_cols else 24)), jnp.float32)
    stack = fb.quantize(w, "uint4_g32", axis=-1 if contracts_cols else -2)
    numbers = (((2,), (2 if contracts_cols else 1,)), ((0,), (0,)))
    problem = Problem(Operand.of(x), Operand.of(stack), numbers)
    assert TritonGPU().unsupported(problem) is None
    y = TritonGPU().stacked(x, stack, contracts_cols=contracts_cols, dtype=np.dtype(np.float32), precision=None)
    exact = np.einsum("bmk,bnk->bmn" if contracts_cols else "bmk,bkn->bmn", x, fb.dequantize(stack))
    np.testing.assert_allclose(y, exact, atol=2e-4)


def test_a_zero_point_of_several_scales_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_jax_triton(monkeypatch)
    q = fb.quantize(jnp.asarray(np.random.default_rng(0).normal(1, 1, size=(2, 8, 64)), jnp.float32), "uint4_g32")
    assert q.zero_point is not None
    q = dataclasses.replace(q, zero_point=q.zero_point[:1, :1, :1])
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 64)), jnp.float32)
    exact = np.einsum("bmk,bnk->bmn", x, fb.dequantize(q))
    settings = {"contracts_cols": True, "dtype": np.dtype(np.float32), "precision": None}
    np.testing.assert_allclose(TritonGPU().stacked(x, q, **settings), exact, atol=2e-4)
    y = TritonGPU().grouped(x.reshape(6, 64), q, jnp.array([3, 3], jnp.int32), **settings)
    np.testing.assert_allclose(y, exact.reshape(6, 8), atol=2e-4)


SIZES = {"some cross": [3, 0, 20, 5], "rows are left": [1, 1, 0, 4], "too many": [20, 0, 30, 3], "none": [0, 0, 0, 0]}


def assert_grouped(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, sizes: list[int], step: float) -> None:
    """Each row is that of its group's matrix, and rows beyond all groups are zero."""
    group = np.repeat(np.arange(len(sizes)), sizes)[: len(x)]
    exact, magnitude = (torch.zeros(y.shape, dtype=torch.float64) for _ in range(2))
    for i, g in enumerate(group):
        exact[i], magnitude[i] = x[i].double() @ w[g].double(), x[i].double().abs() @ w[g].double().abs()
    assert y.dtype == x.dtype
    assert ((y.double() - exact).abs() <= step * magnitude).all()


def experts(name: str, k: int, n: int, dim: int) -> "fbt.QTensor":
    """Four matrices `[K, N]`, held as `[N, K]` (dim -1) or as `[K, N]` (dim -2)."""
    w = torch.tensor(np.random.default_rng(k).normal(size=(4, n, k) if dim == -1 else (4, k, n)).astype(np.float32))
    q = fbt.quantize(w, name, dim, "naive" if fb.scheme(name).zero_point is None else None)
    return q.mT if dim == -1 else q


GROUPED = [("nvfp4", -1, "some cross", torch.bfloat16), ("int8", -2, "rows are left", torch.float32)]
SLOWLY_GROUPED = [
    ("uint4_g32", -1, "too many", torch.bfloat16), ("nf4", -2, "some cross", torch.bfloat16),
    ("q4_1", -2, "too many", torch.float16), ("fp8_tensor", -1, "none", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dim", "sizes", "dtype"), [*GROUPED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY_GROUPED)]
)
def test_rows_in_groups(name: str, dim: int, sizes: str, dtype: torch.dtype) -> None:
    q, x = experts(name, 96, 38, dim), activations(30, 96, dtype)
    assert unsupported_stack(q) is None
    y = ragged_by_triton(x, q, torch.tensor(SIZES[sizes]), BY_PAIRS, Gpu(4, 1 << 16))
    w = fbt.dequantize(q, torch.float32)
    assert_grouped(y, x, w, SIZES[sizes], 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10)


def test_a_zero_point_of_several_groups() -> None:
    q, x = experts("uint4_g32", 64, 8, -1), activations(8, 64, torch.float32)
    assert q.zero_point is not None
    shared = fbt.QTensor(q.codes, q.scale, q.scheme, q.shape, q.dtype, zero_point=q.zero_point[:1])
    y = ragged_by_triton(x, shared, torch.tensor([2, 1, 3, 2]), BY_DOT, Gpu(4, 1 << 16))
    assert_grouped(y, x, fbt.dequantize(shared, torch.float32), [2, 1, 3, 2], 2.0**-20)


@pytest.mark.slow
def test_the_gradient_of_rows_in_groups() -> None:
    q, g = experts("int4_g32", 96, 38, -1), activations(30, 38, torch.float32)
    of_x = ragged_by_triton(g, q.mT, torch.tensor(SIZES["some cross"]), BY_PAIRS, Gpu(4, 1 << 16))
    assert_grouped(of_x, g, fbt.dequantize(q.mT, torch.float32), SIZES["some cross"], 2.0**-20)


@pytest.mark.parametrize(("m", "sizes"), [(30, [3, 0, 20, 5]), (5, [1, 1, 1, 1]), (64, [16, 16, 16, 16])])
def test_there_are_enough_turns(m: int, sizes: list[int]) -> None:
    """There are as many as the blocks of every group and of the rows beyond them; in the interpreter others would stay undefined."""
    from fewbit.kernels.qmatmul.gpu import launch as triton_launch

    assert triton_launch.Groups(len(sizes)).blocks(m, 8) >= sum(-(-size // 8) for size in [*sizes, m - sum(sizes)])


@pytest.mark.slow
def test_jax_reaches_the_kernels_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_jax_triton(monkeypatch)
    rng = np.random.default_rng(0)
    q = fb.quantize(jnp.asarray(rng.normal(size=(4, 24, 64)), jnp.float32), "uint4_g32", axis=-1)
    x, sizes = jnp.asarray(rng.normal(size=(12, 64)), jnp.float32), jnp.array([2, 0, 5, 3], jnp.int32)
    assert TritonGPU().unsupported(Problem.ragged(Operand.of(x), Operand.of(q), contracts_cols=True)) is None
    y = TritonGPU().grouped(x, q, sizes, contracts_cols=True, dtype=np.dtype(np.float32), precision=None)
    group = np.repeat(np.arange(4), [2, 0, 5, 3])
    exact = np.einsum("mk,mnk->mn", x[:10], fb.dequantize(q)[group])
    np.testing.assert_allclose(y, np.concatenate([exact, np.zeros((2, 24))]), atol=2e-4)


def test_without_jax_triton_the_backend_says_so() -> None:
    x, q = jnp.ones((2, 64)), fb.quantize(jnp.ones((8, 64)), "int4_g32")
    problem = Problem(Operand.of(x), Operand.of(q), (((1,), (1,)), ((), ())))
    assert TritonGPU().unsupported(problem) == "it runs on cuda through jax-triton, which is not installed"


def test_several_devices_leave_it_aside() -> None:
    problem = Problem(
        Operand((2, 64), "float32", None), Operand((8, 64), "float32", fb.SCHEMES["int8"]), (((1,), (1,)), ((), ()))
    )
    assert str(TritonGPU().not_chosen(problem)).startswith("there are several devices")

"""Products of QTensors by fewbit's kernels: values, gradients, torch's functions, torch.compile, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.kernels.qmatmul.gpu.config import DotConfig, Gpu, GpuConfig, gpu_config, splits_for, stages_for  # noqa: E402
from fewbit.torch.matmul import padded_count  # noqa: E402


def weight(name: str, *shape: int) -> "fbt.QTensor":
    torch.manual_seed(0)
    return fbt.quantize(torch.randn(*shape), name, method="naive")


def assert_near(y: "torch.Tensor", x: "torch.Tensor", w: "torch.Tensor", step: float = 2.0**-20) -> None:
    """Each sum errs by less than `step` of the sum of its products' magnitudes, whichever order either library sums in.

    A sum of K float32 products in any order errs by at most K 2**-24 of that; K is 64 here, and two such sums are compared.
    """
    exact, magnitude = x.double() @ w.double(), x.double().abs() @ w.double().abs()
    assert y.shape == exact.shape and ((y.double() - exact).abs() <= max(step, 2 * 64 * 2.0**-24) * magnitude).all()


@pytest.fixture(scope="module")
def q() -> "fbt.QTensor":
    """A matrix [12, 64], as a Linear has it."""
    return weight("nvfp4", 12, 64)


@pytest.mark.finding(32)
def test_the_product_is_that_of_the_decoded_matrix(q: "fbt.QTensor") -> None:
    """No bits of torch's products are compared with others of torch: which kernel it takes depends on the machine."""
    x, w = torch.randn(2, 3, 64), q.dequantize()
    assert_near(x @ q.T, x, w.T)
    assert_near(x[0, 0] @ q.T, x[0, 0], w.T)
    half = x[0].bfloat16()
    y = half @ q.T
    assert y.dtype == torch.bfloat16
    assert_near(y, half, w.T, step=2.0**-7)  # the decoded matrix and the result are rounded to bfloat16, half a step each


@pytest.mark.finding(15)
def test_the_bits_are_those_of_jax(q: "fbt.QTensor") -> None:
    x = torch.randn(5, 64)
    known = fb.dot_general(jnp.asarray(x.numpy()), fbt.to_qarray(q), (((1,), (1,)), ((), ())))
    assert np.array_equal((x @ q.T).numpy(), known)


@pytest.mark.finding(15)
def test_functions_of_torch(q: "fbt.QTensor") -> None:
    x, w, bias = torch.randn(5, 64), q.dequantize(), torch.randn(12)
    linear = torch.nn.functional.linear
    known = linear(x, q)
    assert_near(known, x, w.T)
    for y in (torch.matmul(x, q.T), x.matmul(q.T), torch.mm(x, q.t()), x.mm(q.T), linear(x, q, bias) - bias,
              torch.addmm(bias, x, q.T, alpha=0.5) * 2 - 2 * bias, linear(x.reshape(1, 5, 64), q)[0]):  # fmt: skip
        assert torch.allclose(y, known, atol=1e-5)
    for y in (q @ x.T, torch.mm(q, x.T), torch.stack([torch.mv(q, row) for row in x], 1), linear(q, x)):
        assert torch.allclose(y, known.T, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, q).dtype == torch.bfloat16
    assert linear(x[:0], q).shape == (0, 12)
    assert_near(fbt.matmul(x.double(), q.T, backend="torch"), x, w.T, step=1e-15)


def test_arguments_have_the_names_of_torch(q: "fbt.QTensor") -> None:
    x, linear = torch.randn(5, 64), torch.nn.functional.linear
    known, t = linear(x, q), q.T
    for y in (linear(input=x, weight=q), torch.matmul(x, other=t), torch.mm(x, mat2=t), x.matmul(other=t), x.mm(mat2=t)):
        assert torch.equal(y, known)
    assert torch.equal(torch.mv(q, vec=x[0]), torch.mv(q, x[0]))
    nan = torch.full((12,), torch.nan)
    assert torch.equal(torch.addmm(input=nan, mat1=x, mat2=t, beta=0), known), "beta=0 drops a NaN"
    ids = torch.tensor([1])
    assert torch.equal(torch.nn.functional.embedding(ids, weight=q), torch.nn.functional.embedding(ids, q))


def test_a_look_up_decodes_rows(q: "fbt.QTensor") -> None:
    ids = torch.tensor([[3, 0, 11], [3, 5, 1]])
    assert torch.equal(torch.nn.functional.embedding(ids, q, padding_idx=0), q.dequantize()[ids])
    assert torch.nn.functional.embedding(ids[:0], q).shape == (0, 3, 64)
    with pytest.raises(IndexError, match="from 12 to 12, of a table of 12 rows"):
        torch.nn.functional.embedding(torch.tensor([12]), q)
    with pytest.raises(fb.UnsupportedError, match="max_norm"):
        torch.nn.functional.embedding(ids, q, max_norm=1.0)
    with pytest.raises(fb.UnsupportedError, match="packed along the row axis"):
        torch.nn.functional.embedding(ids, q.T)


@pytest.mark.parametrize("name", ["fp8_block128", "q4_1"])
def test_a_look_up_of_tiles_and_offsets(name: str) -> None:
    table = fbt.quantize(torch.randn(200, 32), name)
    ids = torch.tensor([199, 0, 130, 128, 127])
    assert torch.equal(torch.nn.functional.embedding(ids, table), table.dequantize()[ids])


def test_gradients_reach_the_activations(q: "fbt.QTensor") -> None:
    x, g = torch.randn(5, 64, requires_grad=True), torch.randn(5, 12)
    (x @ q.T).backward(g)
    assert_near(x.grad, g, q.dequantize())
    (wrt,) = torch.autograd.grad(torch.nn.functional.linear(x, q).square().sum(), x)
    assert_near(wrt, 2 * torch.nn.functional.linear(x, q).detach(), q.dequantize())


def test_a_policy_travels_with_the_matrix() -> None:
    policy = fb.Policy("int8", "int8", dlhs="int8")
    w = np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32)
    known = dataclasses.replace(fb.quantize(jnp.asarray(w), "int8"), policy=policy)
    t, x = fbt.from_qarray(known), torch.randn(5, 64, requires_grad=True)
    y = torch.nn.functional.linear(x, t)
    g = torch.randn(5, 12)
    y.backward(g)

    def fn(x):
        return fb.dot_general(x, known, (((1,), (1,)), ((), ())))

    of_jax, vjp = jax.vjp(fn, jnp.asarray(x.detach().numpy()))
    assert t.policy == policy and np.array_equal(y.detach().numpy(), of_jax)
    assert np.array_equal(x.grad.numpy(), vjp(jnp.asarray(g.numpy()))[0])


def test_padding_changes_no_scale_of_several_rows() -> None:
    act = {**fb.scheme("int8").to_json(), "tile": {"*": None}}
    policy = fb.Policy("int8", {**act, "calibration": "percentile,99"}, dlhs={"gradient": act})
    t = fbt.from_qarray(dataclasses.replace(weight("int8", 12, 64).to_qarray(), policy=policy))
    x, g = torch.randn(17, 64, requires_grad=True), torch.randn(17, 12)
    y = torch.nn.functional.linear(x, t)
    of_groups = fbt.ragged_dot(x, t[None].mT, torch.tensor([17]))
    rows, numbers = jnp.asarray(x.detach().numpy()), (((1,), (1,)), ((), ()))
    known, vjp = jax.vjp(jax.jit(lambda x: fb.dot_general(x, fbt.to_qarray(t), numbers)), rows)
    of_jax = vjp(jnp.asarray(g.numpy()))[0]
    for result in (y, of_groups):
        assert np.allclose(result.detach().numpy(), known, atol=1e-5)
        assert np.allclose(torch.autograd.grad(result, x, g)[0].numpy(), of_jax, atol=1e-5)
    assert padded_count(17, t.policy) == 17
    assert padded_count(17, fb.Policy("int8", act)) == 18


@pytest.mark.finding(15)
def test_torch_compile_takes_it_whole(q: "fbt.QTensor") -> None:
    """Without a graph break: products are operators of torch."""
    model = torch.nn.Sequential(torch.nn.Embedding(12, 64), torch.nn.Linear(64, 12))
    for module in model:
        module.weight = torch.nn.Parameter(q, requires_grad=False)
    ids = torch.tensor([1, 5, 3])
    known = model(ids)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = compiled(ids)
    assert torch.equal(y, known)
    y.sum().backward()
    assert torch.equal(model[1].bias.grad, torch.full((12,), 3.0))


def test_sizes_that_a_compiler_takes_as_symbols() -> None:
    """Rows of every number share a program; a QTensor that is an argument keeps the shape of its form."""
    q = fbt.quantize(torch.randn(12, 64), "nvfp4")
    counter = CompileCounterWithBackend("aot_eager")

    def products(x, q):
        return x @ q.T, x @ q.transpose(0, 1)[:, :8], q.T.dequantize()

    compiled = torch.compile(products, backend=counter, fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 64)
        for ours, known in zip(compiled(x, q), products(x, q), strict=True):
            assert torch.equal(ours, known)
    assert counter.frame_count == 1


def test_functions_of_fewbit_are_one_operator_in_a_compiled_graph() -> None:
    q, experts = fbt.quantize(torch.randn(12, 64), "int8"), fbt.quantize(torch.randn(3, 12, 64), "nf4_dq")
    x, sizes = torch.randn(5, 64, requires_grad=True), torch.tensor([2, 0, 3])

    def model(x, q, experts, sizes):
        decoded = fbt.dequantize(q.T, torch.bfloat16, backend="jax").float()
        return fbt.matmul(x, q.T, backend="torch"), fbt.ragged_dot(x, experts.mT, group_sizes=sizes), x @ decoded

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = [[*fn(x, q, experts, sizes)] for fn in (compiled, model)]
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), x)[0] for ys in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_codes_times_codes_on_a_cpu() -> None:
    x, q = weight("int8", 5, 64), weight("int8", 12, 64)
    y = fbt.matmul(x, q.T)
    assert_near(y, x.dequantize(), q.dequantize().T)
    compiled = torch.compile(lambda x, q: x @ q.T, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, q), y)
    assert_near(fbt.matmul(q, x.T), q.dequantize(), x.dequantize().T)


def test_rows_in_groups_are_those_of_jax() -> None:
    w = np.random.default_rng(0).normal(size=(3, 12, 64)).astype(np.float32)
    x, sizes = torch.randn(7, 64, requires_grad=True), [2, 0, 4]
    q, g = fb.quantize(jnp.asarray(w), "int4_g32"), torch.randn(7, 12)
    t = fbt.from_qarray(q)
    y = fbt.ragged_dot(x, t.mT, torch.tensor(sizes))
    y.backward(g)
    known = fb.ragged_dot(jnp.asarray(x.detach().numpy()), q.mT, jnp.array(sizes))
    assert np.allclose(y.detach().numpy(), known, atol=1e-4)
    back = fb.ragged_dot(jnp.asarray(g.numpy()), q, jnp.array(sizes))
    assert np.allclose(x.grad.numpy(), back, atol=1e-4)
    assert t.mT.mT.scheme == t.scheme and t.mT.codes.data_ptr() == t.codes.data_ptr()


def test_what_rows_in_groups_refuse() -> None:
    q, sizes = weight("mxfp4", 3, 12, 64), torch.tensor([1, 1, 0])
    with pytest.raises(fb.QuantError, match=r"use ragged_dot\(x, q.mT, group_sizes\)"):
        fbt.ragged_dot(torch.ones(2, 64), q, sizes)
    with pytest.raises(fb.QuantError, match=r"in groups \[G\]; got shapes"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes[:2])
    with pytest.raises(fb.QuantError, match="must be floating and integers"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes.float())
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes, backend="triton")


def test_what_it_refuses() -> None:
    q = weight("mxfp4", 12, 64)
    with pytest.raises(fb.QuantError, match=r"x has 64 columns and q has 12 rows; for a matrix \[N, K\] use x @ q.T"):
        fbt.matmul(torch.ones(2, 64), q)
    with pytest.raises(fb.QuantError, match="must be floating or a QTensor"):
        fbt.matmul(torch.ones(2, 64, dtype=torch.int32), q.T)
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.matmul(torch.ones(2, 64), q.T, backend="triton")
    with pytest.raises(fb.UnsupportedError, match=r"products accumulate in float32; pass x\.float"):
        torch.nn.functional.linear(torch.ones(2, 64).double(), q)
    with pytest.raises(fb.UnsupportedError, match="mm cannot take out= with a QTensor"):
        torch.mm(torch.ones(2, 64), q.T, out=torch.empty(2, 12))
    with pytest.raises(fb.QuantError, match="a stack of matrices takes"):
        fbt.matmul(torch.ones(2, 64), weight("mxfp4", 3, 64, 12))


def test_blocks() -> None:
    plain = gpu_config("")
    assert GpuConfig.from_json(json.loads(json.dumps(plain.to_json()))) == plain
    blocks = DotConfig(None, 16, 64, 128, 4, 3)
    assert splits_for(blocks, 16, 64, 512, 132) == 1  # four steps at least each
    assert stages_for(blocks, 200_000, Gpu(132, 100_000)) == 1
    with pytest.raises(fb.QuantError, match="blocks must ascend"):
        dataclasses.replace(plain, dot=(DotConfig(16, 16, 64, 128, 4, 3),))


@pytest.mark.parametrize("backend", [None, "jax", "torch"])
def test_batches_of_matrices(backend) -> None:
    torch.manual_seed(0)
    q, x = fbt.quantize(torch.randn(3, 8, 64), "nvfp4"), torch.randn(3, 5, 64)
    known = torch.bmm(x, q.dequantize().mT)
    torch.testing.assert_close(fbt.matmul(x, q.mT, backend=backend), known, rtol=1e-4, atol=1e-5)
    for found in (x @ q.mT, torch.bmm(x, q.mT), (q @ x.mT).mT):
        torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)
    for wrong in (torch.randn(2, 5, 64), torch.randn(3, 5, 32)):
        with pytest.raises(fb.QuantError, match="a product of batches multiplies"):
            torch.bmm(wrong, q.mT)
    with pytest.raises(fb.QuantError, match="bmm multiplies batches of matrices"):
        torch.bmm(x[0], q.mT)


def test_grouped_mm_of_torch() -> None:
    torch.manual_seed(0)
    q, x, ends = fbt.quantize(torch.randn(3, 8, 64), "nvfp4"), torch.randn(7, 64), torch.tensor([2, 2, 6], dtype=torch.int32)
    y = torch.nn.functional.grouped_mm(x, q.mT, offs=ends)
    known = [rows @ w.T for rows, w in zip(x.tensor_split(ends.long()), [*q.dequantize(), torch.zeros(8, 64)], strict=True)]
    torch.testing.assert_close(y, torch.cat(known), rtol=1e-4, atol=1e-5)
    with pytest.raises(fb.UnsupportedError, match="without a bias"):
        torch.nn.functional.grouped_mm(x, q.mT, offs=ends, bias=torch.zeros(3, 8))


def test_rows_in_groups_follow_autocast_and_grouped_mm_of_torch_does_not() -> None:
    q, x, ends = weight("int4_g32", 2, 8, 64), torch.randn(5, 64), torch.tensor([2, 5], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fbt.ragged_dot(x, q.mT, torch.tensor([2, 3])).dtype == torch.bfloat16
        for w in (q, q.dequantize()):
            assert torch.nn.functional.grouped_mm(x, w.mT, offs=ends).dtype == torch.float32


@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace"
)  # jaxtyping's checks, which the tests have and users do not
def test_views_of_a_qtensor_cross_breaks_of_a_compiled_graph() -> None:
    q, x = fbt.quantize(torch.randn(8, 64), "int8"), torch.randn(3, 64)

    def model(x, q):
        transposed, rows = q.T, q[:4]
        torch._dynamo.graph_break()
        return x @ transposed, x @ rows.mT, q.t(), q[1]

    y, of_rows, turned, row = torch.compile(model, backend="aot_eager")(x, q)
    torch.testing.assert_close(y, x @ q.T)
    torch.testing.assert_close(of_rows, x @ q[:4].T)
    assert torch.equal(turned.dequantize(), q.dequantize().T)
    assert torch.equal(row.dequantize(), q.dequantize()[1])

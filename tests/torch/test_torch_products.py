"""fewbit.torch.matmul: the product of the decoded matrix on a CPU, its gradient, and what it says of what it cannot do."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.kernels.qmatmul.gpu_configs import DotConfig, Gpu, GpuConfig, gpu_config, splits_for, stages_for  # noqa: E402


def weight(name: str, *shape: int) -> "fbt.QTensor":
    torch.manual_seed(0)
    return fbt.quantize(torch.randn(*shape), name, method="naive")


def test_the_product_is_that_of_the_decoded_matrix() -> None:
    q, x = weight("nvfp4", 12, 64), torch.randn(2, 3, 64)
    w = fbt.dequantize(q)
    assert torch.equal(x @ q.T, x @ w.T)
    assert torch.allclose(fbt.matmul(x[0, 0], q.T), x[0, 0] @ w.T, atol=1e-5)
    assert (x.bfloat16() @ q.T).dtype == torch.bfloat16


def test_gradients_reach_the_activations() -> None:
    q, x = weight("int4_g32", 12, 64), torch.randn(5, 64, requires_grad=True)
    g = torch.randn(5, 12)
    (x @ q.T).backward(g)
    assert torch.allclose(x.grad, g @ fbt.dequantize(q), atol=1e-6)


@pytest.mark.parametrize("name", ["mxfp4", "int8", "nvfp4"])
def test_a_transpose_is_exact_and_moves_nothing(name: str) -> None:
    q = weight(name, 12, 64)
    assert q.T.shape == (64, 12) and q.T.codes.data_ptr() == q.codes.data_ptr()
    assert torch.equal(fbt.dequantize(q.T), fbt.dequantize(q).T)
    assert q.T.T.scheme == q.scheme and q.T.nbytes == q.nbytes
    with pytest.raises(fb.QuantError, match="T is for matrices"):
        _ = fbt.quantize(torch.ones(2, 3, 32), "mxfp4").T


@pytest.mark.parametrize("name", ["uint4_g32", "q4_1"])
def test_zero_points_come_from_jax(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    q = fb.quantize(jnp.asarray(x), name)
    t = fbt.from_qarray(q)
    assert np.array_equal(fbt.dequantize(t).numpy(), np.asarray(fb.dequantize(q)))
    assert t.nbytes == q.nbytes and t.to("cpu").zero_point is not None
    assert torch.equal(fbt.dequantize(t.T), fbt.dequantize(t).T)


def test_a_bfloat16_array_comes_over() -> None:
    q = fb.quantize(
        jnp.ones((4, 64), jnp.bfloat16), fb.Scheme(fb.formats.FORMATS["int4"], {...: 1, -1: 32}, scale="bfloat16")
    )
    t = fbt.from_qarray(q)
    assert t.dtype == torch.bfloat16 and t.scale.dtype == torch.bfloat16
    assert np.array_equal(fbt.dequantize(t).float().numpy(), np.asarray(fb.dequantize(q), np.float32))
    with pytest.raises(fb.UnsupportedError, match="quantized themselves"):
        fbt.from_qarray(fb.quantize(jnp.ones((4, 256)), "nf4_dq"))


def test_codes_times_codes_on_a_cpu() -> None:
    x, q = weight("int8", 5, 64), weight("int8", 12, 64)
    assert torch.allclose(fbt.matmul(x, q.T), fbt.dequantize(x) @ fbt.dequantize(q).T, atol=1e-5)


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
    with pytest.raises(fb.QuantError, match=r"are multiplied as ragged_dot\(x, q.mT, group_sizes\)"):
        fbt.ragged_dot(torch.ones(2, 64), q, sizes)
    with pytest.raises(fb.QuantError, match=r"in groups \[G\]; got shapes"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes[:2])
    with pytest.raises(fb.QuantError, match="a floating type and integers are expected"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes.float())
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.ragged_dot(torch.ones(2, 64), q.mT, sizes, backend="triton")


def test_what_it_refuses() -> None:
    q = weight("mxfp4", 12, 64)
    with pytest.raises(
        fb.QuantError, match=r"x has 64 columns and q has 12 rows; a matrix \[N, K\] is multiplied as x @ q.T"
    ):
        fbt.matmul(torch.ones(2, 64), q)
    with pytest.raises(fb.QuantError, match="floating activations"):
        fbt.matmul(torch.ones(2, 64, dtype=torch.int32), q.T)
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.matmul(torch.ones(2, 64), q.T, backend="triton")


def test_blocks() -> None:
    plain = gpu_config("")
    assert GpuConfig.from_json(json.loads(json.dumps(plain.to_json()))) == plain
    blocks = DotConfig(None, 16, 64, 128, 4, 3)
    assert splits_for(blocks, 16, 64, 512, 132) == 1  # four steps at least each
    assert stages_for(blocks, 200_000, Gpu(132, 100_000)) == 1
    with pytest.raises(fb.QuantError, match="blocks ascend"):
        dataclasses.replace(plain, dot=(DotConfig(16, 16, 64, 128, 4, 3),))

"""fewbit.torch.quantize hands tensors to fewbit.quantize: the same bytes, for whatever scheme, calibration and search."""

import dataclasses
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.torch import dlpack as handover  # noqa: E402
from fewbit.torch.matmul import padded_count  # noqa: E402
from fewbit.torch.quantize import chosen, hessian  # noqa: E402

ONCE_REFUSED = ("uint4", "q4_1", "nf4_dq", "ternary", "q4_0", "uint4_g32")
"""Of those that `fewbit.torch` could not quantize to: zero points, quantized scales, other calibrations."""


def raw(x: object) -> bytes:
    """The bytes of an array or tensor."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(x).tobytes()


def assert_same_bytes(q: fb.QArray, t: "fbt.QTensor") -> None:
    back = fbt.to_qarray(t)
    assert repr(back) == repr(q) and back.scheme == q.scheme and back.slack == q.slack
    import jax

    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(q), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and raw(ours) == raw(theirs)


def weight() -> np.ndarray:
    """Numbers with a zero row, a NaN, an infinity and a subnormal row."""
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    x[0, :40], x[1, 3], x[2, 5], x[3] = 0, np.nan, np.inf, 1e-39
    return x


@pytest.mark.finding(15, 36)
@pytest.mark.parametrize(
    ("name", "dim"),
    [("nvfp4", -1), ("uint4_g32", 0)] + [pytest.param(name, -1, marks=pytest.mark.slow) for name in ONCE_REFUSED],
)
def test_the_bytes_are_those_of_jax(name: str, dim: int) -> None:
    x = weight()
    t = fbt.quantize(torch.tensor(x), name, dim)
    q = fb.quantize(jnp.asarray(x), name, axis=dim)
    assert_same_bytes(q, t)
    assert raw(t.dequantize()) == raw(fb.dequantize(q))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "float8_e4m3fn"])
def test_every_floating_dtype_and_more_axes(dtype: str) -> None:
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 5, 40))).to(getattr(torch, dtype))
    t = fbt.quantize(x, "int8", dim=1)
    known = jnp.asarray(x.float().numpy()).astype("bfloat16" if dtype == "bfloat16" else "float32")
    q = fb.quantize(known, "int8", axis=1)
    assert t.dtype == x.dtype and t.dequantize().dtype == x.dtype
    assert raw(t.codes) == raw(q.codes) and raw(t.scale) == raw(q.scale)
    decoded = torch.tensor(np.asarray(fb.dequantize(q, "float32"))).to(x.dtype)
    assert torch.equal(t.dequantize().float(), decoded.float())


def test_methods_are_calibrations() -> None:
    mx, nv = fb.scheme("mxfp4"), fb.scheme("nvfp4")
    assert [str(chosen(mx, m).calibration) for m in ("naive", "optimal")] == ["mx", "mx,optimal"]
    assert [str(chosen(nv, m).calibration) for m in ("naive", "optimal")] == ["absmax", "mse"]
    assert chosen(nv, None) is nv and chosen(nv, "hessian") is nv


def test_the_hessian_search_is_that_of_jax() -> None:
    rng = np.random.default_rng(0)
    W, X = rng.normal(size=(8, 64)).astype(np.float32), rng.normal(size=(40, 64)) @ rng.normal(size=(64, 64))
    t = fbt.quantize(torch.tensor(W), "nvint4", method="hessian", X=torch.tensor(X))
    H = hessian(torch.tensor(X), fb.scheme("nvint4"), (8, 64))
    blocks = np.asarray(fb.hessian_blocks(jnp.asarray(X, jnp.float32), 16))
    assert np.allclose(H / H.amax((1, 2), True), blocks / blocks.max((1, 2), keepdims=True), atol=1e-5)
    assert_same_bytes(fb.quantize_with_hessian(jnp.asarray(W), "nvint4", jnp.asarray(H.numpy()), rounds=0), t)
    naive = fbt.quantize(torch.tensor(W), "nvint4", method="naive")
    errors = [fbt.metrics(torch.tensor(W), q, torch.tensor(X)).output_error for q in (t, naive)]
    assert errors[0] is not None and errors[1] is not None and errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize("dim", [1, 0])
def test_activations_meet_the_contraction_axis_whichever_axis_is_packed(dim: int) -> None:
    W, X = torch.randn(32, 32), torch.randn(40, 32) @ torch.randn(32, 32)
    plain = fb.scheme("mxfp4")
    packed = dataclasses.replace(plain, pack_axis=-2)
    known, found = (fbt.quantize(W, scheme, dim, method="hessian", X=X) for scheme in (plain, packed))
    assert found.scheme.pack_axis != known.scheme.pack_axis
    assert torch.equal(found.dequantize(), known.dequantize())
    assert fbt.metrics(W, found, X) == fbt.metrics(W, known, X)


@pytest.mark.parametrize("factor", [1e-30, 3e25])
def test_the_scale_of_the_activations_does_not_matter(factor: float) -> None:
    X, scheme = torch.tensor(np.random.default_rng(1).normal(size=(64, 32))), fb.scheme("nvfp4")
    one, other = (hessian(x, scheme, (4, 32)) for x in (X, X * factor))
    largest = [H.amax((1, 2), keepdim=True) for H in (one, other)]
    assert torch.allclose(one / largest[0], other / largest[1], rtol=1e-6)
    assert all(((top >= 0.5) & (top <= 1)).all() for top in largest)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda W: fbt.quantize(W.int(), "mxfp4"), fb.QuantError, "only plain floating tensors"),
        (lambda W: fbt.quantize(fbt.quantize(W, "int8"), "mxfp4"), fb.QuantError, "a QTensor already"),
        (lambda W: fbt.quantize(W, "mxfp4", 2), fb.QuantError, "has 2 axes"),
        (lambda W: fbt.quantize(W, "mxfp4", X=W), fb.QuantError, "X is not used by method None"),
        (lambda W: fbt.quantize(W, "mxfp4", rounds=2), fb.QuantError, "rounds=2 is not used"),
        (lambda W: fbt.quantize(W, "mxfp4", method="hessian"), fb.QuantError, r"needs X of shape \[samples, n\]"),
        (lambda W: fbt.quantize(W, "nvfp4", method="hessian", X=W.T), fb.QuantError, r"needs X of shape \[samples, 32\]"),
        (lambda W: fbt.quantize(W, "nvfp4", method="hessian", X=W * torch.inf), fb.QuantError, "must be finite"),
        (lambda W: fbt.quantize(W, "nvfp4", error_weights=-W), fb.QuantError, "error_weights has 128 values that are neg"),
        (lambda W: fbt.quantize(W, "nvfp4", method="hessian", X=W, error_weights=W), fb.QuantError, "weighs errors by X"),
        (lambda W: fbt.quantize(W, "nvfp4_16x16", method="hessian", X=W), fb.UnsupportedError, "are not on axis 1 alone"),
        (lambda W: fbt.quantize(W, "int8").dequantize(torch.int8), fb.QuantError, "floating numbers"),
        (lambda W: fbt.quantize(W, "int8", backend="triton"), fb.UnsupportedError, "need a CUDA device"),
        (lambda W: fbt.quantize(W.to("meta"), "int8"), fb.UnsupportedError, "the tensor is on meta and JAX computes on cpu"),
        (lambda W: fbt.metrics(W, W.T), fb.QuantError, "q has shape"),
        (lambda W: fbt.metrics(W, W, W.T), fb.QuantError, "samples, 32"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(make, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(torch.ones(4, 32))


def test_an_unknown_method_or_backend_is_refused(unchecked: None) -> None:
    with pytest.raises(fb.QuantError, match="naive, optimal, hessian"):
        fbt.quantize(torch.ones(4, 32), "mxfp4", method="best")
    with pytest.raises(fb.QuantError, match="must be triton, jax or None"):
        fbt.quantize(torch.ones(4, 32), "mxfp4", backend="torch")


# --- the hand-over ---


def test_memory_is_shared_where_it_is_aligned() -> None:
    t = torch.arange(64, dtype=torch.float32)
    assert t.data_ptr() % 64 == 0 and handover.array(t).unsafe_buffer_pointer() == t.data_ptr()
    assert np.array_equal(handover.array(t[1:]), np.arange(1, 64, dtype=np.float32))  # not aligned: a copy
    x = jnp.arange(4.0)
    assert handover.tensor(x).data_ptr() == x.unsafe_buffer_pointer()
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    assert handover.operand(half).dtype.name == "bfloat16" and handover.operand(half).tolist() == [1.5, -2.0]
    assert handover.operand(half).ctypes.data == half.data_ptr()
    assert handover.operand(torch.ones(2, 3).T).shape == (3, 2)


def test_sharded_arrays_are_gathered() -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    x = jax.device_put(jnp.arange(16.0), NamedSharding(mesh, PartitionSpec("d")))
    assert handover.tensor(x).tolist() == list(range(16))


def test_rows_are_padded_by_an_eighth_at_most() -> None:
    counts = [padded_count(m) for m in range(1, 3000)]
    assert all(m <= n <= max(m, m * 1.125 + 1) for m, n in enumerate(counts, 1))
    assert counts[:16] == list(range(1, 17)) and len({n for n in counts if 1024 < n <= 2048}) == 8


@pytest.mark.slow
def test_importing_fewbit_does_not_import_torch() -> None:
    code = "import fewbit, sys; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

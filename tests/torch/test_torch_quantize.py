"""fewbit.torch gives the bytes of fewbit.quantize: codes, scales and tensor scale, for every kind of scheme and odd lengths."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.torch.quantize import chosen  # noqa: E402

SCHEMES = (
    "mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "mxint8", "nvfp4", "nvint4", "nf4", "nf4_g16", "bnb_fp4", "int4_g32",
    "int4", "int8", "int3_g16", "int8_narrow", "fp8", "fp8_tensor", "fp8_block128", "nvfp4_16x16", "q8_0", "int4_aqt", "mxfp8_rceil",
)  # fmt: skip
SEARCHED = ("mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4", "nvint4", "nf4_g16", "int4_g32")


def awkward(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Numbers of many magnitudes: zeros of both signs, subnormals, tiny and huge rows, a NaN and an infinity."""
    x = (rng.normal(size=shape) * rng.choice([1e-3, 1.0, 30.0], size=(shape[0], 1))).astype(np.float32)
    x[0, :40] = 0
    x[1, 3], x[2, 5] = np.nan, np.inf
    x[3] = 1e-39
    x[4, ::3] = -0.0
    x[5] *= 1e-36
    x[6] *= 1e-5
    return x


def raw(x: object) -> bytes:
    """The bytes of an array or tensor."""
    if isinstance(x, torch.Tensor):
        return x.contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(x).tobytes()


def assert_same_bytes(q: fb.QArray, t: "fbt.QTensor") -> None:
    assert t.codes.shape == q.codes.shape and t.scale.shape == q.scale.shape
    assert raw(t.codes) == raw(q.codes)
    assert raw(t.scale) == raw(q.scale)
    assert (t.tensor_scale is None) == (q.tensor_scale is None)
    assert t.tensor_scale is None or raw(t.tensor_scale) == raw(q.tensor_scale)
    assert raw(fbt.dequantize(t)) == raw(fb.dequantize(q))
    assert t.nbytes == q.nbytes and t.scheme == q.scheme and t.shape == q.shape


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_bytes_are_those_of_the_reference(name: str, dim: int) -> None:
    rng = np.random.default_rng(sum(map(ord, name)))
    x = awkward(rng, (10, 77))
    x = x if dim == -1 else np.ascontiguousarray(x.T)
    scheme = chosen(fb.scheme(name), "naive")
    q = fb.quantize(jnp.asarray(x), scheme, axis=dim)
    assert_same_bytes(q, fbt.quantize(torch.tensor(x), name, dim, "naive"))


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_scales_are_those_of_the_reference(name: str) -> None:
    rng = np.random.default_rng(sum(map(ord, name)))
    x = awkward(rng, (16, 77))
    x[8:] = rng.standard_t(3, size=(8, 77))
    q = fb.quantize(jnp.asarray(x), chosen(fb.scheme(name), "optimal"))
    assert_same_bytes(q, fbt.quantize(torch.tensor(x), name, method="optimal"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_every_floating_dtype_and_more_axes(dtype: str) -> None:
    x = torch.tensor(np.random.default_rng(0).normal(size=(3, 5, 40))).to(getattr(torch, dtype))
    wide = x.double().numpy()
    q = fb.quantize(jnp.asarray(wide.astype(np.float32)).astype(dtype if dtype != "float64" else "float32"), "nvfp4", axis=1)
    t = fbt.quantize(x, "nvfp4", dim=1)
    assert t.dtype == x.dtype and fbt.dequantize(t).dtype == x.dtype
    assert (raw(t.codes), raw(t.scale), raw(t.tensor_scale)) == (raw(q.codes), raw(q.scale), raw(q.tensor_scale))
    narrow = fbt.dequantize(t, torch.float32).numpy()
    assert np.array_equal(narrow, np.asarray(fb.dequantize(q, jnp.float32)))


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_mx_rules_at_every_bfloat16(rule: str) -> None:
    import dataclasses

    bits = np.arange(0, 0x10000, dtype=np.uint32) << 16
    x = bits.view(np.float32).reshape(-1, 1)
    scheme = dataclasses.replace(fb.scheme("mxfp4"), calibration=fb.array.scales.MX(rule))
    assert_same_bytes(fb.quantize(jnp.asarray(x), scheme), fbt.quantize(torch.tensor(x), scheme))


def test_a_search_is_never_worse_than_the_naive_scale() -> None:
    W = torch.tensor(np.random.default_rng(1).standard_t(3, size=(64, 64)).astype(np.float32))
    for name in ("mxfp4", "nvfp4", "nvint4", "nf4_g16"):
        naive, best = (fbt.metrics(W, fbt.quantize(W, name, method=m)).weight_error for m in ("naive", "optimal"))
        assert best < naive


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda W: fbt.quantize(W.int(), "mxfp4"), fb.QuantError, "only floating tensors"),
        (lambda W: fbt.quantize(W, "mxfp4", 2), fb.QuantError, "has 2 axes"),
        (lambda W: fbt.quantize(W, "mxfp4", X=W), fb.QuantError, "X means nothing to method None"),
        (lambda W: fbt.quantize(W, "mxfp4", method="hessian"), fb.QuantError, r"needs X of shape \[samples, 32\]"),
        (lambda W: fbt.quantize(W, "nf4_dq"), fb.UnsupportedError, "quantized themselves"),
        (lambda W: fbt.quantize(W, "uint4"), fb.UnsupportedError, "zero point"),
        (lambda W: fbt.quantize(W, "q4_0"), fb.UnsupportedError, "signed_max"),
        (lambda W: fbt.dequantize(fbt.quantize(W, "mxfp4"), torch.int8), fb.QuantError, "floating numbers"),
        (lambda W: fbt.metrics(W, W.T), fb.QuantError, "stands for shape"),
        (lambda W: fbt.metrics(W, W, W.T), fb.QuantError, "samples, 32"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(make, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(torch.ones(4, 32))


def test_an_unknown_method_is_refused(unchecked: None) -> None:
    with pytest.raises(fb.QuantError, match="naive, optimal, hessian"):
        fbt.quantize(torch.ones(4, 32), "mxfp4", method="best")


def test_importing_fewbit_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import fewbit, sys; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

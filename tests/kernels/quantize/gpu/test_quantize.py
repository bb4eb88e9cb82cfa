"""The Triton quantizers in Triton's interpreter, byte for byte against the reference in JAX."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the Triton kernels need triton")

from fewbit import torch as fbt  # noqa: E402 - it imports torch
from fewbit.formats.rounding import rounding_table  # noqa: E402
from fewbit.kernels.quantize import Decoding, Quantization, TritonDequantizer, TritonQuantizer  # noqa: E402
from fewbit.kernels.quantize.gpu import backend as gpu  # noqa: E402
from fewbit.kernels.quantize.gpu.problem import TileProblem  # noqa: E402
from fewbit.torch import triton as by_triton  # noqa: E402
from fewbit.torch.quantize import chosen, hessian  # noqa: E402
from tests.kernels.interpreted import interpreted_kernels, stand_in_for_jax_triton  # noqa: E402

# The interpreter's numpy warns of NaN and of overflows, which a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NAIVE = (
    "mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "mxfp8_rceil", "mxint8", "nvfp4", "nvint4", "nf4", "nf4_g16", "int4",
    "int4_g32", "int8", "int8_g24", "fp8", "q8_0", "int4_aqt",
)  # fmt: skip
SEARCHED = ("nf4_g16", "int4_g32", "q8_0", "mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4", "nvint4")


@pytest.fixture(autouse=True, scope="module")
def _in_the_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, interpreted_kernels(patch):
        yield


def awkward(length: int) -> torch.Tensor:
    """Rows of many magnitudes: zeros of both signs, subnormals, tiny and huge ones, a NaN, an infinity, heavy tails."""
    rng = np.random.default_rng(length)
    x = (rng.normal(size=(20, length)) * rng.choice([1e-3, 1.0, 30.0], size=(20, 1))).astype(np.float32)
    x[0, :40] = 0
    x[1, 3], x[2, 5] = np.nan, np.inf
    x[3] = 1e-39
    x[4, ::3] = -0.0
    x[5] *= 1e-36
    x[6] *= 1e-5
    x[7, :32] = 1e38
    x[12:] = rng.standard_t(3, size=(8, length))
    return torch.tensor(x)


def assert_same(W: torch.Tensor, name: str, method: str) -> None:
    """The kernel's bytes are the reference's, and decode to the same floats."""
    q = fbt.quantize(W, name, method=method)
    codes, scale = by_triton.leaves_of(W, q.scheme, q.tensor_scale)
    back = by_triton.dequantized(q, torch.float32)
    assert torch.equal(codes, q.codes)
    assert torch.equal(scale.view(torch.uint8), q.scale.contiguous().view(torch.uint8))
    plain = fbt.dequantize(q, torch.float32).contiguous()
    assert torch.equal(back.contiguous().view(torch.int32), plain.view(torch.int32))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAIVE)
def test_codes_and_scales_without_a_search(name: str) -> None:
    assert_same(awkward(77), name, "naive")


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_codes_and_scales_of_least_error(name: str) -> None:
    assert_same(awkward(77), name, "optimal")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "method"), [("mxfp4", "optimal"), ("mxfp6", "naive"), ("mxfp8", "naive"), ("nvfp4", "optimal")]
)
def test_rows_that_tiles_divide(name: str, method: str) -> None:
    assert_same(awkward(64), name, method)


@pytest.mark.parametrize("rule", ["rceil", "even", "threshold"])
def test_mx_rules_at_every_bfloat16(rule: str) -> None:
    bits = np.arange(0, 0x8000, dtype=np.uint32) << 16
    x = torch.tensor(bits.view(np.float32)).bfloat16().reshape(-1, 1)
    scheme = dataclasses.replace(fb.scheme("mxfp4"), calibration=fb.array.scales.MX(rule))
    q = fbt.quantize(x.repeat(1, 2), scheme)
    codes, scale = by_triton.leaves_of(x.repeat(1, 2), q.scheme, None)
    assert torch.equal(scale, q.scale) and torch.equal(codes, q.codes)


@pytest.mark.parametrize(("name", "length"), [("nf4", 1), ("mxfp6", 1), ("mxfp6", 2)])
def test_rows_shorter_than_their_bytes(name: str, length: int) -> None:
    assert_same(torch.tensor([1.5, -0.3, 0.0, 7.0]).reshape(-1, length), name, "naive")


def stacked(name: str) -> fb.QArray:
    """Three matrices of other magnitudes, quantized one by one."""
    w = np.random.default_rng(0).normal(size=(3, 4, 32)) * np.array([1, 100, 1e4]).reshape(3, 1, 1)
    return jax.vmap(lambda w: fb.quantize(w, chosen(fb.scheme(name), "naive")))(jnp.asarray(w, jnp.float32))


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor"])
def test_stacked_tensors_decode_with_the_scales_of_each(name: str) -> None:
    q, want = fbt.from_qarray(stacked(name)), fb.dequantize(stacked(name), backend="reference")
    assert by_triton.problem_of(by_triton.scheme_for_kernels(q), tuple(q.shape)).unsupported_layout() is None
    assert np.array_equal(by_triton.dequantized(q, torch.float32), want)


def test_stacked_arrays_decode_with_the_scales_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_jax_triton(monkeypatch)
    q = stacked("fp8_tensor")
    assert TritonDequantizer().unsupported(Decoding(q.shape, "float32", q.scheme, q.tiles)) is None
    assert np.array_equal(gpu._decoded(jnp.dtype(jnp.float32), q), fb.dequantize(q, backend="reference"))


def test_tiles_of_several_rows() -> None:
    def reason_of(shape: tuple[int, ...], *tiles: int | None) -> str | None:
        return TileProblem.of(fb.scheme("int8"), shape, tiles).unsupported_layout()

    assert reason_of((3, 4, 32), 1, None, 32) is None and reason_of((1, 32), 16, None) is None
    assert "16 rows share a scale" in str(reason_of((3, 32, 32), None, 16, 16))
    reason = TileProblem.of(fb.scheme("fp8_tensor"), (4, 64), (None, None)).unsupported()
    assert reason == "rows share a scale; the kernel computes one for each row"
    assert TileProblem.of(fb.scheme("fp8_tensor"), (1, 64), (None, None)).unsupported() is None


def test_low_codes_of_nvfp4_take_the_branch_of_fifteen() -> None:
    W = torch.tensor(np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32))
    W[1:] *= 1e-5 * torch.arange(1, 16)[:, None]  # the first row sets the tensor scale; the others take the lowest codes
    assert_same(W, "nvfp4", "optimal")
    q = fbt.quantize(W, "nvfp4")
    assert int((q.scale[1:] <= 15).sum()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_the_hessian_sweep_finds_as_little_error_as_the_reference(name: str) -> None:
    rng = np.random.default_rng(0)
    W, X = torch.tensor(rng.normal(size=(10, 72))).float(), rng.normal(size=(40, 72)) @ rng.normal(size=(72, 72))
    W[0, :32] = 0
    scheme = fb.scheme(name).along(-1, 2)
    tile = int(scheme.tile[-1] or 0)
    H = hessian(torch.tensor(X), scheme, W.shape)
    plain, swept = fbt.quantize(W, name, method="hessian", X=torch.tensor(X)), by_triton.quantized(W, scheme, H)
    assert float((swept.scale == plain.scale).float().mean()) > 0.95  # others are ties to float32's sums

    def errors(q: fbt.QTensor) -> torch.Tensor:
        off = torch.nn.functional.pad((q.dequantize() - W).double(), (0, H.shape[0] * tile - 72)).reshape(10, -1, tile)
        return torch.einsum("rbi,bij,rbj->rb", off, H.double(), off)

    assert (errors(swept) <= errors(plain) * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_codes_under_given_scales(name: str) -> None:
    """What the sweep finds is encoded by the kernel: the calibration's own scales, given, give its codes."""
    W = awkward(64)[[0, 1, 2, 4, 6, 8, 9, 12]]  # those whose scales do not vanish beside the tensor scale
    q = fbt.quantize(W, name, method="naive")
    values = torch.tensor(rounding_table(q.scheme.scale).values, dtype=torch.float32)[q.scale.int()]
    given = values if q.tensor_scale is None else values * q.tensor_scale
    codes, scale = by_triton.leaves_of(W, q.scheme, q.tensor_scale, given.contiguous())
    assert torch.equal(codes, q.codes) and torch.equal(scale, q.scale)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_axes_and_the_largest_magnitude(dtype: torch.dtype) -> None:
    W = awkward(48).to(dtype)
    q = fbt.quantize(W, "nvfp4", dim=0)
    codes, scale = by_triton.leaves_of(W, q.scheme, q.tensor_scale)
    assert torch.equal(codes, q.codes) and torch.equal(scale, q.scale)
    finite = W.float()[torch.isfinite(W.float())]
    assert by_triton.largest_magnitude(W) == finite.abs().max()
    assert torch.equal(by_triton.tensor_scale(W, q.scheme).reshape(1, 1), q.tensor_scale)


@pytest.mark.parametrize(
    ("name", "length", "text"),
    [
        ("bnb_fp4", 64, "numbers of bnb_fp4"), ("int3", 64, "3 bits"), ("int4_g17", 64, "tiles of 17"), ("nvfp4_16x16", 64, "several"),
        ("int8", 20000, "fit in registers"), ("uint8", 64, "numbers of uint8"), ("fp8_e4m3fnuz", 64, "numbers of e4m3fnuz"),
    ],
)  # fmt: skip
def test_what_no_kernel_serves_says_why(name: str, length: int, text: str) -> None:
    reason = TileProblem(chosen(fb.scheme(name), "naive"), length, 4).unsupported()
    assert reason is not None and text in reason


def test_a_named_backend_is_never_replaced() -> None:
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.quantize(torch.ones(2, 32), "mxfp4", backend="triton")
    with pytest.raises(fb.UnsupportedError, match="need a CUDA device"):
        fbt.dequantize(fbt.quantize(torch.ones(2, 32), "mxfp4"), backend="triton")
    assert fbt.explain(torch.ones(2, 32), "mxfp4").startswith("jax, because triton: the tensor is on cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), [("nvfp4", -1), ("int4_g32", -2)])
def test_jax_reaches_the_kernels_through_jax_triton(name: str, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the interpreter in the place of jax-triton, which needs a GPU; also of several arrays at once."""
    stand_in_for_jax_triton(monkeypatch)
    rows = jnp.asarray(awkward(64).numpy())
    x = jnp.stack([rows, rows * 0.7]) if axis == -1 else jnp.stack([rows.T, rows.T * 0.7])
    scheme = fb.scheme(name).along(axis, 2)
    problem = Quantization(x.shape[1:], "float32", scheme)
    assert TritonQuantizer().unsupported(problem) is None
    got = jax.vmap(lambda x: gpu._quantized(scheme, x))(x)
    want = jax.vmap(lambda x: fb.quantize(x, name, axis=axis, backend="reference"))(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    one = jax.tree.map(lambda leaf: leaf[1], want)
    assert TritonDequantizer().unsupported(Decoding(one.shape, "float32", one.scheme, one.tiles)) is None
    decoded = gpu._decoded(jnp.dtype(jnp.float32), one)
    assert np.array_equal(decoded, fb.dequantize(one, backend="reference"), equal_nan=True)


def test_without_jax_triton_the_backend_says_so() -> None:
    with pytest.raises(fb.UnsupportedError, match="jax-triton, which is not installed"):
        fb.quantize(jnp.ones((2, 64)), "mxfp4", backend="triton")

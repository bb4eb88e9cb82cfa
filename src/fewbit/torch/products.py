"""Products of torch tensors with quantized matrices: packed bytes into Triton's kernels on CUDA, decoded ones elsewhere."""

import functools
from typing import Any

import torch

from ..errors import QuantError, UnsupportedError
from ..formats import Integer
from ..kernels.qmatmul.gpu_configs import Gpu, GpuConfig, blocks_for, gpu_config
from ..kernels.qmatmul.gpu_matrix import Matrix
from . import on_gpu
from .qtensor import QTensor
from .quantize import Backend, dequantize

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
"""How tensor cores multiply activations of a dtype: float16 is exact in TF32, whose exponents hold every scale."""


def matmul(x: torch.Tensor | QTensor, q: QTensor, *, backend: Backend | None = None) -> torch.Tensor:
    """`x @ q`, with sums in float32; `x @ q` and `x @ q.T` call it.

    `y[..., n] = sum_k x[..., k] q[k, n]`. A matrix that is held as `[N, K]`, as that of `torch.nn.Linear` is, is multiplied as
    `matmul(x, q.T)`: nothing is moved. Gradients reach `x` through the same kernels; the quantized matrix has none.

    Args:
        x: floating `[..., K]`; or a QTensor `[M, K]` whose scales do not vary along K, in 8 bits, as that of
            `quantize(x, "int8")` or `"fp8"` is: then codes are multiplied.
        q: `[K, N]`, quantized.
        backend: "triton", or "torch" for torch's product of the decoded matrix; None takes the kernels where they serve, and
            torch's product for so many rows that it is faster (`explain_matmul` says). One that is named is never replaced.

    Returns:
        `[..., N]`, of the dtype of `x`.

    Raises:
        QuantError: where the shapes do not fit, or `x` is not floating.
        UnsupportedError: when the named backend cannot, with the reason.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> q = quantize(torch.tensor([[6.0, -0.4, 0.0, 1.2]]), "mxfp4")
    >>> (torch.ones(2, 4) @ q.T).tolist()
    [[6.5], [6.5]]
    """
    _check_operands(x, q)
    if isinstance(x, QTensor):
        return _codes_product(x, q, backend)
    return _Product.apply(x, q, backend)  # type: ignore[no-any-return]


def explain_matmul(x: torch.Tensor | QTensor, q: QTensor) -> str:
    """Says which backend `matmul` takes, and why not the kernels.

    Args:
        x: as for `matmul`.
        q: likewise.

    Returns:
        A line of text.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> explain_matmul(torch.ones(2, 64), quantize(torch.ones(8, 64), "mxfp4").T)
    'torch, because triton: the tensor is on cpu; the kernels need a CUDA device'
    """
    _check_operands(x, q)
    reason = unsupported(x, q) or (None if isinstance(x, QTensor) else passed_over(x, q))
    return "triton" if reason is None else f"torch, because triton: {reason}"


def unsupported(x: torch.Tensor | QTensor, q: QTensor) -> str | None:
    """Why the kernels do not multiply these, in a sentence; None when they do."""
    device = q.codes.device
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not on_gpu.is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    if isinstance(x, QTensor):
        return unsupported_codes(x, q, torch.cuda.get_device_capability(device))
    if x.dtype not in PRECISIONS:
        return f"x is {x.dtype}; bfloat16, float16 and float32 are multiplied"
    return Matrix(q.scheme, *_sides(q)).unsupported()


def unsupported_codes(x: QTensor, q: QTensor, capability: tuple[int, int]) -> str | None:
    """Why codes are not multiplied with codes on a device of this compute capability; None when they are."""
    fmt = x.scheme.format
    if fmt.bits != 8 or fmt.bits != q.scheme.format.bits or isinstance(fmt, Integer) != isinstance(q.scheme.format, Integer):
        return f"codes of {fmt.name} and {q.scheme.format.name}; int8 with int8 and fp8 with fp8 are multiplied"
    names = {t.scheme.format.name for t in (x, q)}
    if not names <= {"int8", "int8_narrow", "e4m3fn", "e5m2"}:
        return f"codes of {', '.join(sorted(names))}"
    if not isinstance(fmt, Integer) and capability < (8, 9):
        return f"tensor cores for 8-bit floats came with compute capability 8.9; this is {capability[0]}.{capability[1]}"
    left, right = Matrix(x.T.scheme, *x.shape[::-1]), Matrix(q.scheme, *_sides(q))
    is_plain = all(t.scheme.zero_point is None and t.scale.is_floating_point() for t in (x, q))
    is_whole = left.tile_k == right.tile_k == 0 and {left.tile_n, right.tile_n} <= {0, 1}
    return None if is_plain and is_whole else "the scales vary along the contraction, or are no floats a row"


def passed_over(x: torch.Tensor, q: QTensor) -> str | None:
    """Why torch's product is taken though the kernels serve; None when it is not."""
    m, limit = x.numel() // x.shape[-1], config_of(q.codes.device).torch_from
    return f"from {limit} rows on, decoding once and torch's own product is faster" if m >= limit else None


class _Product(torch.autograd.Function):
    """The product, linear in x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, q: QTensor, backend: Backend | None) -> torch.Tensor:
        ctx.q, ctx.backend = q, backend
        return _product(x, q, backend)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return matmul(gradients[0], ctx.q.T, backend=ctx.backend), None, None


def _product(x: torch.Tensor, q: QTensor, backend: Backend | None) -> torch.Tensor:
    reason = _refusal(x, q, backend)
    if reason is None and backend is None:
        reason = passed_over(x, q)
    if reason is not None or backend == "torch" or x.numel() == 0:
        return x @ dequantize(q, x.dtype)
    device = q.codes.device
    return by_triton(x, q, config_of(device), gpu_of(device))


def _codes_product(x: QTensor, q: QTensor, backend: Backend | None) -> torch.Tensor:
    if _refusal(x, q, backend) is None and backend != "torch":
        return codes_by_triton(x, q, config_of(q.codes.device), gpu_of(q.codes.device))
    return (dequantize(x, torch.float32) @ dequantize(q, torch.float32)).to(x.dtype)


def _refusal(x: torch.Tensor | QTensor, q: QTensor, backend: Backend | None) -> str | None:
    """Why the kernels are not taken; raises where they are named."""
    if backend not in ("triton", "torch", None):
        raise QuantError(f"backend is {backend!r}, must be triton, torch or None")
    reason = unsupported(x, q)
    if reason is not None and backend == "triton":
        raise UnsupportedError(f"x @ {q.scheme.name} of shape {q.shape} cannot run here", {"triton": reason})
    return reason


def by_triton(x: torch.Tensor, q: QTensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The product by the kernels, for what `unsupported` has nothing against.

    Args:
        x: floating `[..., K]`.
        q: `[K, N]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[..., N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul import triton_launch  # it needs Triton

    matrix, rows = Matrix(q.scheme, *_sides(q)), x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    m, codes, table = len(rows), q.codes, table_of(matrix, q.codes.device)
    strides, x_stride, scale_strides = (codes.stride(0), codes.stride(1)), rows.stride(0), _scale_strides(q.scale)
    how: Any = {"ptx": config.ptx, "gpu": gpu}
    if x.dtype == torch.bfloat16 and m <= config.pairs_rows and triton_launch.pairs_refuses(matrix, strides) is None:
        blocks = config.pairs[matrix.bits]
        launch = triton_launch.pairs_launch(matrix, m, x_stride, strides[1], scale_strides, blocks, **how)
    elif m <= config.gemv_rows and triton_launch.gemv_refuses(matrix, strides, codes.data_ptr()) is None:
        codes = codes.T.view(torch.int32)
        launch = triton_launch.gemv_launch(matrix, m, x_stride, codes.stride(0), scale_strides, config.gemv[matrix.bits])
    else:
        settings: Any = {"precision": PRECISIONS[x.dtype], "gpu": gpu}
        launch = triton_launch.dot_launch(matrix, m, x_stride, strides, scale_strides, blocks_for(config.dot, m), **settings)
    zero = q.scale if q.zero_point is None else q.zero_point
    unit = q.scale if q.tensor_scale is None else q.tensor_scale
    splits, dtype = launch.splits, x.dtype if launch.splits == 1 else torch.float32
    y = torch.empty((splits, m, matrix.n), dtype=dtype, device=x.device)
    beside = (zero, unit, q.scale if table is None else table)
    launch.run((rows, codes, q.scale, *beside) + ((q.scale,) if launch.takes_sizes else ()), y)
    y = y[0] if splits == 1 else y.sum(0).to(x.dtype)
    return y.reshape(*x.shape[:-1], matrix.n)


def codes_by_triton(x: QTensor, q: QTensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The product of codes with codes, for what `unsupported_codes` has nothing against.

    Args:
        x: `[M, K]`.
        q: `[K, N]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[M, N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul import triton_launch  # it needs Triton

    (m, k), n = x.shape, q.shape[1]
    types = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    codes = [t.codes.view(types.get(t.scheme.format.name, torch.int8)) for t in (x, q)]
    strides = (*codes[0].stride(), *codes[1].stride())
    launch = triton_launch.codes_launch(
        *(m, n, k, strides, (_scale_strides(x.scale)[0], _scale_strides(q.scale)[1])),
        blocks_for(config.codes, m),
        is_whole=isinstance(x.scheme.format, Integer),
        gpu=gpu,
    )
    y = torch.empty((m, n), dtype=x.dtype, device=x.codes.device)
    launch.run((*codes, x.scale, q.scale), y)
    return y


def gpu_of(device: torch.device) -> Gpu:
    """What the launches depend on of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin, sm)


def _sides(q: QTensor) -> tuple[int, int]:
    """K and N."""
    return q.shape[0], q.shape[1]


def _scale_strides(scale: torch.Tensor) -> tuple[int, int]:
    """The strides of scales along K and N, 0 along an axis that has one."""
    strides = [stride if length > 1 else 0 for stride, length in zip(scale.stride(), scale.shape, strict=True)]
    return strides[0], strides[1]


def config_of(device: torch.device) -> GpuConfig:
    """The blocks of a CUDA device."""
    return gpu_config(torch.cuda.get_device_name(device))


@functools.lru_cache(maxsize=64)
def table_of(matrix: Matrix, device: torch.device) -> torch.Tensor | None:
    """The numbers of a codebook on a device; None for formats whose numbers are computed."""
    table = matrix.table()
    return None if table is None else torch.tensor(table, device=device)


def _check_operands(x: torch.Tensor | QTensor, q: QTensor) -> None:
    if len(q.shape) != 2 or len(x.shape) < 1 or (isinstance(x, QTensor) and len(x.shape) != 2):
        raise QuantError(f"matmul multiplies [..., K] with [K, N]; got shapes {tuple(x.shape)} and {q.shape}")
    if x.shape[-1] != q.shape[0]:
        hint = "; a matrix [N, K] is multiplied as x @ q.T" if x.shape[-1] == q.shape[1] else ""
        raise QuantError(f"x has {x.shape[-1]} columns and q has {q.shape[0]} rows{hint}")
    if isinstance(x, torch.Tensor) and not x.is_floating_point():
        raise QuantError(f"x is {x.dtype}; floating activations, or a QTensor of them, are multiplied")

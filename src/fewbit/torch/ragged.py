"""Products of torch rows in groups with a quantized matrix for each group: the experts of a mixture."""

from typing import Any

import torch

from ..array import Scheme
from ..errors import QuantError, UnsupportedError
from ..kernels.qmatmul.gpu_configs import Gpu, GpuConfig
from ..kernels.qmatmul.gpu_matrix import Matrix
from . import on_gpu
from .products import PRECISIONS, config_of, gpu_of, table_of
from .qtensor import QTensor
from .quantize import Backend, dequantize


def ragged_dot(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """Each row times the matrix of its group, with sums in float32: `jax.lax.ragged_dot` with quantized matrices.

    `y[i] = x[i] @ q[g]` for each row i of group g; the rows of a group follow each other. Matrices that are held as `[G, N, K]`
    are multiplied as `ragged_dot(x, q.mT, group_sizes)`: nothing is moved. Gradients reach `x` through the same kernels.

    Args:
        x: floating `[M, K]`, the rows of all groups.
        q: `[G, K, N]`, quantized.
        group_sizes: how many rows each group has, `[G]`, integers on the device of `q`; the kernels read them there, and the host
            does not wait for them. Rows beyond their sum give zeros.
        backend: "triton", or "torch" for torch's products of the decoded matrices; None takes the kernels where they serve. One
            that is named is never replaced.

    Returns:
        `[M, N]`, of the dtype of `x`.

    Raises:
        QuantError: where the shapes do not fit, `x` is not floating, or `group_sizes` are no integers.
        UnsupportedError: when the named backend cannot, with the reason.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> experts = quantize(torch.tensor([1.0, 2.0]).reshape(2, 1, 1).expand(2, 3, 32), "mxfp4")
    >>> ragged_dot(torch.ones(4, 32), experts.mT, torch.tensor([1, 2])).tolist()
    [[32.0, 32.0, 32.0], [64.0, 64.0, 64.0], [64.0, 64.0, 64.0], [0.0, 0.0, 0.0]]
    """
    _check_operands(x, q, group_sizes)
    return _Ragged.apply(x, q, group_sizes, backend)  # type: ignore[no-any-return]


class _Ragged(torch.autograd.Function):
    """The product, linear in x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, backend: Backend | None) -> torch.Tensor:
        ctx.rest = q, group_sizes, backend
        reason = unsupported(x, q, group_sizes)
        if backend not in ("triton", "torch", None):
            raise QuantError(f"backend is {backend!r}, must be triton, torch or None")
        if reason is not None and backend == "triton":
            what = f"ragged_dot with {q.scheme.name} of shape {q.shape} cannot run here"
            raise UnsupportedError(what, {"triton": reason})
        if reason is not None or backend == "torch" or x.numel() == 0:
            return _decoded(x, q, group_sizes)
        device = q.codes.device
        return ragged_by_triton(x, q, group_sizes, config_of(device), gpu_of(device))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        q, group_sizes, backend = ctx.rest
        return ragged_dot(gradients[0], q.mT, group_sizes, backend=backend), None, None, None


def unsupported(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor) -> str | None:
    """Why the kernels do not multiply these, in a sentence; None when they do."""
    device = q.codes.device
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not on_gpu.is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    if x.dtype not in PRECISIONS:
        return f"x is {x.dtype}; bfloat16, float16 and float32 are multiplied"
    if x.device != device or group_sizes.device != device:
        return f"x is on {x.device}, group_sizes on {group_sizes.device}, and the matrices are on {device}"
    return unsupported_stack(q)


def unsupported_stack(q: QTensor) -> str | None:
    """Why the kernels do not read matrices, wherever they are; None when they do."""
    if q.scheme.tiles(3)[0] not in (None, 1):
        return "matrices share scales in tiles"
    if q.scheme.pack_axis == -3:
        return "codes share bytes along the groups"
    return Matrix(_scheme(q), *q.shape[1:]).unsupported()


def ragged_by_triton(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The product by the kernels, for what `unsupported` has nothing against.

    Args:
        x: floating `[M, K]`.
        q: `[G, K, N]`.
        group_sizes: `[G]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[M, N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul import triton_launch  # it needs Triton

    matrix, x = Matrix(_scheme(q), *q.shape[1:]), x if x.stride(1) == 1 else x.contiguous()
    table = table_of(matrix, q.codes.device)
    (scale_g, scale_k, scale_n), (_, codes_k, codes_n) = _strides(q.scale), q.codes.stride()
    unit = q.scale if q.tensor_scale is None else q.tensor_scale
    groups = triton_launch.Groups(q.shape[0], _strides(q.codes)[0], scale_g, _strides(unit)[0])
    launch = triton_launch.grouped_launch(
        *(matrix, len(x), x.stride(0), (codes_k, codes_n), (scale_k, scale_n), config, groups),
        precision=PRECISIONS[x.dtype],
        gpu=gpu,
    )
    zero = q.scale if q.zero_point is None else q.zero_point
    y = torch.empty((len(x), matrix.n), dtype=x.dtype, device=x.device)
    sizes = group_sizes.to(torch.int32)
    launch.run((x, q.codes, q.scale, zero, unit, q.scale if table is None else table, sizes), y)
    return y


def _decoded(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor) -> torch.Tensor:
    """The product by torch, group by group."""
    w, first = dequantize(q, x.dtype), 0
    y = x.new_zeros((len(x), q.shape[2]))
    for g, size in enumerate(group_sizes.tolist()):
        y[first : first + size] = x[first : first + size] @ w[g]
        first += size
    return y


def _scheme(q: QTensor) -> Scheme:
    """The scheme of one matrix."""
    return q.scheme.with_tiles(q.scheme.tiles(3)[1:], q.scheme.pack_axis)


def _strides(t: torch.Tensor) -> tuple[int, int, int]:
    """The strides of three axes, 0 along an axis that has one element."""
    first, second, third = (s if length > 1 else 0 for s, length in zip(t.stride(), t.shape, strict=True))
    return first, second, third


def _check_operands(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor) -> None:
    if x.ndim != 2 or len(q.shape) != 3 or tuple(group_sizes.shape) != q.shape[:1]:
        shapes = f"{tuple(x.shape)}, {q.shape} and group_sizes {tuple(group_sizes.shape)}"
        raise QuantError(f"ragged_dot multiplies [M, K] with [G, K, N] in groups [G]; got shapes {shapes}")
    if x.shape[1] != q.shape[1]:
        hint = "; matrices [G, N, K] are multiplied as ragged_dot(x, q.mT, group_sizes)" if x.shape[1] == q.shape[2] else ""
        raise QuantError(f"x has {x.shape[1]} columns and each matrix has {q.shape[1]} rows{hint}")
    if not x.is_floating_point() or group_sizes.is_floating_point() or group_sizes.dtype == torch.bool:
        raise QuantError(f"x is {x.dtype} and group_sizes {group_sizes.dtype}; a floating type and integers are expected")

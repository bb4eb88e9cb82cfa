"""`ragged_dot` of torch tensors: one quantized matrix for each group of rows."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import torch

from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError
from ..kernels.qmatmul.gpu.config import Gpu, GpuConfig
from ..kernels.qmatmul.gpu.weight import Matrix
from ..ops.ragged import ragged_dot as jax_ragged_dot
from . import dlpack as handover
from . import triton
from .matmul import PRECISIONS, Product, autocast, config_of, gpu_of, or_unread, padded_count, table_of
from .operation import PolicyGradient, applied
from .qtensor import FUNCTIONS, QTensor, form_of, in_memory_order, one_operator_in_graphs, permuted
from .quantize import Backend, dequantize


@one_operator_in_graphs("ragged_dot(Tensor x, Tensor q, Tensor group_sizes, *, str? backend=None) -> Tensor")
def ragged_dot(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, *, backend: Backend | None = None) -> torch.Tensor:
    """`jax.lax.ragged_dot` (the grouped matmul of MoE experts) with quantized matrices.

    `y[i] = x[i] @ q[g]` for each row i of group g, with float32 accumulation; rows are sorted by group. For matrices `[G,
    N, K]` use `ragged_dot(x, q.mT, group_sizes)`, which copies nothing. It is differentiable in `x`, by the same kernels.

    Args:
        x: floating `[M, K]`, the rows of all groups.
        q: `[G, K, N]`, quantized.
        group_sizes: the number of rows of each group, `[G]`, integers on the device of `q`; Triton's kernels read them there
            without a host synchronization. Rows beyond their sum give zeros.
        backend: "jax" for fewbit's kernels in JAX, "triton" for Triton's on CUDA; None chooses "triton" if it supports the
            operands.

    Returns:
        `[M, N]`, of the dtype of `x`, or of `torch.autocast`.

    Raises:
        QuantError: if the shapes do not match, `x` is not floating, or `group_sizes` are not integers.
        UnsupportedError: if the named backend, or every backend, does not support the operands, with the reasons.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> experts = quantize(torch.tensor([1.0, 2.0]).reshape(2, 1, 1).expand(2, 3, 32), "mxfp4")
    >>> ragged_dot(torch.ones(4, 32), experts.mT, torch.tensor([1, 2])).tolist()
    [[32.0, 32.0, 32.0], [64.0, 64.0, 64.0], [64.0, 64.0, 64.0], [0.0, 0.0, 0.0]]
    """
    _check_operands(x, q, group_sizes)
    stored, places = in_memory_order(q)
    if places[0] != 0:
        raise QuantError(f"the {q.shape[0]} matrices of q are not contiguous in memory; quantize them as [G, K, N]")
    return applied(_Ragged((stored.form.text, places[1], backend or "")), autocast(x), (*stored.leaves, group_sizes))


def batched(x: torch.Tensor, q: QTensor, backend: Literal["triton", "jax", "torch"] | None = None) -> torch.Tensor:
    """The product of each matrix of `x` with its own quantized one, as groups of equally many rows.

    Args:
        x: floating `[G, M, K]`.
        q: `[G, K, N]`.
        backend: as for `matmul`.

    Returns:
        `[G, M, N]`, of the dtype of `x`.
    """
    groups, rows, depth = x.shape
    if (groups, depth) != tuple(q.shape[:2]):
        raise QuantError(
            f"a product of batches multiplies [G, M, K] with [G, K, N]; got {tuple(x.shape)} and {tuple(q.shape)}"
        )
    x = autocast(x)
    if backend == "torch":
        return x @ dequantize(q, x.dtype)
    sizes = torch.full((groups,), rows, dtype=torch.int32, device=x.device)
    return ragged_dot(x.reshape(-1, depth), q, sizes, backend=backend).reshape(groups, rows, q.shape[2])


def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm` of rows, in groups that end at `offs`, with quantized matrices."""
    if not isinstance(mat_b, QTensor) or isinstance(mat_a, QTensor) or bias is not None:
        reason = "it multiplies float rows [M, K] with quantized matrices [G, K, N], without a bias"
        raise UnsupportedError("grouped_mm cannot take these operands", {"QTensor": reason})
    with torch.autocast(mat_a.device.type, enabled=False):  # torch's own grouped_mm does not follow it
        if offs is None:
            y = batched(mat_a, mat_b)
        else:
            y = ragged_dot(mat_a, mat_b, torch.diff(offs, prepend=offs.new_zeros(1)))
    return y if out_dtype is None else y.to(out_dtype)


FUNCTIONS |= {
    function: _grouped_mm
    for owner, name in ((torch.nn.functional, "grouped_mm"), (torch, "_grouped_mm"))  # the second before torch 2.10
    if (function := getattr(owner, name, None)) is not None
}


def _ragged(x: torch.Tensor, tensors: Sequence[torch.Tensor], form: str, axis: int, backend: str) -> torch.Tensor:
    """`x [M, K]` in groups times the matrices of a form, contracting the given axis of them. The last tensor is the sizes."""
    *leaves, group_sizes = tensors
    q = w = form_of(form).qtensor(leaves)
    if axis == 2:
        w = permuted(q, (0, 2, 1))
    if x.device != q.device:
        raise QuantError(f"x is on {x.device} and q on {q.device}; move one to the other")
    if _chosen(x, w, group_sizes, backend) == "triton":
        return ragged_by_triton(x, w, group_sizes, config_of(q.device), gpu_of(q.device))
    if x.numel() == 0:
        return x.new_zeros((len(x), w.shape[2]))
    count = len(x)
    x = torch.nn.functional.pad(x, (0, 0, 0, padded_count(count, q.policy) - count))
    y = handover.call(_compiled(form, axis), (x, group_sizes.to(torch.int32), *leaves))
    if len(y) > count:
        y = y[:count].clone()
    return y


@functools.lru_cache(maxsize=1024)
def _compiled(form: str, axis: int) -> Callable[..., jax.Array]:
    """The compiled product of the matrices of a form."""

    @jax.jit
    def fn(x: jax.Array, group_sizes: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _jax_product(form, axis, x, group_sizes, leaves)

    return fn


def _jax_product(form: str, axis: int, x: jax.Array, group_sizes: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    q = form_of(form).qarray(leaves).astype(x.dtype)
    if axis == 2:
        q = q.mT
    return jax_ragged_dot(x, q, group_sizes)


handover.operator(
    "ragged(Tensor x, Tensor[] tensors, str form, int axis, str backend) -> Tensor",
    _ragged,
    lambda x, tensors, form, axis, backend: x.new_empty((x.shape[0], form_of(form).shape[3 - axis])),
)


def _ragged_gradient(g: torch.Tensor, tensors: Sequence[torch.Tensor], form: str, axis: int) -> torch.Tensor:
    """The gradient of `x`, the last tensor after the sizes, in a product under a policy (its dgrad)."""
    *leaves, group_sizes, x = tensors
    count = len(x)
    missing = padded_count(count, form_of(form).policy) - count
    g, rows = (torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (g, x))
    return handover.call(_compiled_gradient(form, axis), (g, rows, group_sizes.to(torch.int32), *leaves))[:count].clone()


@functools.lru_cache(maxsize=1024)
def _compiled_gradient(form: str, axis: int) -> Callable[..., jax.Array]:
    @jax.jit
    def fn(g: jax.Array, x: jax.Array, group_sizes: jax.Array, *leaves: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: _jax_product(form, axis, x, group_sizes, leaves), x)[1](g)[0]

    return fn


handover.operator(
    "ragged_gradient(Tensor g, Tensor[] tensors, str form, int axis) -> Tensor",
    _ragged_gradient,
    lambda g, tensors, form, axis: torch.empty_like(tensors[-1]),
)


class _RaggedGradient(PolicyGradient):
    name = "ragged_gradient"


class _Ragged(Product):
    """The sizes of the groups are its last tensor."""

    name = "ragged"
    merges_rows = False
    axes = 3
    gradient = _RaggedGradient


_Ragged.register_gradient()


def _chosen(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, backend: str) -> str:
    """The backend of a product."""
    if backend not in ("triton", "jax", ""):
        raise QuantError(f"backend is {backend!r}, must be triton, jax or None")
    reasons = {}
    for name in (backend,) if backend else ("triton", "jax"):
        if name == "triton":
            reason = unsupported(x, q, group_sizes)
        else:
            reason = handover.refusal(q.device)
            if reason is None and x.dtype not in handover.FLOATS:
                reason = f"x is {x.dtype}, and products accumulate in float32; pass x.float()"
        if reason is None:
            return name
        reasons[name] = reason
    raise UnsupportedError(f"ragged_dot with {q.scheme.name} of shape {tuple(q.shape)} cannot run here", reasons)


def unsupported(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor) -> str | None:
    """Why the Triton kernels do not support the operands; None when they do."""
    device = q.device
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not triton.is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    if x.dtype not in PRECISIONS:
        return f"x is {x.dtype}, must be bfloat16, float16 or float32"
    if x.device != device or group_sizes.device != device:
        return f"x is on {x.device}, group_sizes on {group_sizes.device}, and the matrices are on {device}"
    return unsupported_stack(q)


def unsupported_stack(q: QTensor) -> str | None:
    """Why the kernels do not support a stack of matrices. The reason holds on any device. None when they do."""
    if q.policy is not None:
        return "the matrices have a policy, which the kernels do not support"
    scheme = triton.scheme_for_kernels(q, 1)
    if scheme.tiles(3)[0] not in (None, 1):
        return "several matrices share a scale"
    if q.scheme.pack_axis == -3:
        return "codes are packed along the axis of the groups"
    return Matrix(_of_one(scheme), *q.shape[1:]).unsupported()


def ragged_by_triton(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The product by the kernels, for operands that `unsupported` accepts.

    Args:
        x: floating `[M, K]`.
        q: `[G, K, N]`.
        group_sizes: `[G]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[M, N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul.gpu import launch as triton_launch  # it needs Triton

    q = triton.for_kernels(q, 1)
    matrix = Matrix(_of_one(q.scheme), *q.shape[1:])
    if x.stride(1) != 1:
        x = x.contiguous()
    (scale_g, scale_k, scale_n), (_, codes_k, codes_n) = _strides(q.scale), q.codes.stride()
    zero, unit, table = or_unread(q, table_of(matrix, q.codes.device))
    groups = triton_launch.Groups(q.shape[0], _strides(q.codes)[0], scale_g, _strides(unit)[0])
    launch = triton_launch.grouped_launch(
        *(matrix, len(x), x.stride(0), (codes_k, codes_n), (scale_k, scale_n), config, groups),
        precision=PRECISIONS[x.dtype],
        gpu=gpu,
    )
    y = torch.empty((len(x), matrix.n), dtype=x.dtype, device=x.device)
    launch.run((x, q.codes, q.scale, zero, unit, table, group_sizes.to(torch.int32)), y)
    return y


def _of_one(scheme: Scheme) -> Scheme:
    """The scheme of one matrix of a stack."""
    return scheme.with_tiles(scheme.tiles(3)[1:], scheme.pack_axis)


def _strides(t: torch.Tensor) -> tuple[int, int, int]:
    """The strides of three axes, 0 along an axis of length 1."""
    first, second, third = (stride * (length > 1) for stride, length in zip(t.stride(), t.shape, strict=True))
    return first, second, third


def _check_operands(x: torch.Tensor, q: QTensor, group_sizes: torch.Tensor) -> None:
    if x.ndim != 2 or len(q.shape) != 3 or tuple(group_sizes.shape) != q.shape[:1]:
        shapes = f"{tuple(x.shape)}, {q.shape} and group_sizes {tuple(group_sizes.shape)}"
        raise QuantError(f"ragged_dot multiplies [M, K] with [G, K, N] in groups [G]; got shapes {shapes}")
    if x.shape[1] != q.shape[1]:
        text = f"x has {x.shape[1]} columns and each matrix has {q.shape[1]} rows"
        if x.shape[1] == q.shape[2]:
            text += "; for matrices [G, N, K] use ragged_dot(x, q.mT, group_sizes)"
        raise QuantError(text)
    if not x.is_floating_point() or group_sizes.is_floating_point() or group_sizes.dtype == torch.bool:
        raise QuantError(f"x is {x.dtype} and group_sizes {group_sizes.dtype}; they must be floating and integers")

"""Matmuls of QTensors: fewbit's kernels in JAX, or Triton's on CUDA.

Every matmul is one torch operator, `fewbit::product`, of plain tensors and the JSON of their form, so autograd, torch.func
and torch.compile support it. On a CPU it calls the cached compiled JAX function of its form, 30 us more than the kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import torch

from ..array.scales.absmax import AbsMax
from ..array.scales.minmax import MinMax
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError
from ..formats.integer import Integer
from ..kernels.qmatmul.gpu.config import Gpu, GpuConfig, blocks_for, gpu_config
from ..kernels.qmatmul.gpu.weight import Matrix
from ..ops.dot import dot_general
from ..ops.policy import Policy
from . import dlpack as handover
from . import triton
from .operation import Operation, PolicyGradient, Tensors, applied
from .qtensor import FUNCTIONS, Form, QTensor, form_of, in_memory_order, one_operator_in_graphs, permuted
from .quantize import decoded_leaves, dequantize

Backend: TypeAlias = Literal["triton", "jax", "torch"]

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
"""The tensor core precision of each activation dtype: float16 is exact in TF32, whose exponent range covers every scale."""


@one_operator_in_graphs("matmul(Tensor x, Tensor q, *, str? backend=None) -> Tensor")
def matmul(x: torch.Tensor | QTensor, q: torch.Tensor | QTensor, *, backend: Backend | None = None) -> torch.Tensor:
    """`x @ q` with float32 accumulation, for one or two quantized operands.

    `y[..., n] = sum_k x[..., k] q[k, n]`; `@`, `torch.matmul` and `F.linear` call it. For a matrix `[N, K]`, as of
    `torch.nn.Linear`, use `matmul(x, q.T)`, which copies nothing. It is differentiable in `x`, by the same kernels.

    Args:
        x: floating `[..., K]`; or a QTensor `[M, K]`; of batches `[G, M, K]`.
        q: `[K, N]`, quantized; or floating `[K, N]` or `[K]` if `x` is a QTensor; of batches `[G, K, N]`.
        backend: "jax" for fewbit's kernels in JAX; "triton" for Triton's on CUDA; "torch" for torch's matmul of the decoded
            matrix, also in float64. None chooses: "jax" on a CPU; on CUDA "triton" if it supports the operands, and "torch"
            for so many rows that it is faster (see `explain_matmul`).

    Returns:
        `[..., N]`, of the dtype of `x`.

    Raises:
        QuantError: if the shapes do not match, or `x` is not floating.
        UnsupportedError: if the named backend, or every backend, does not support the operands, with the reasons: float64 needs
            the backend "torch".

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> q = quantize(torch.tensor([[6.0, -0.4, 0.0, 1.2]]), "mxfp4")
    >>> (torch.ones(2, 4) @ q.T).tolist()
    [[6.5], [6.5]]
    """
    if not isinstance(q, QTensor):
        return _from_left(x, q, backend)
    if q.ndim == 3 and x.ndim == 3 and not isinstance(x, QTensor):
        from .ragged import batched  # it needs this module

        return batched(x, q, backend)
    _check_operands(x, q)
    if isinstance(x, QTensor):
        return _codes_product(x, q, backend)
    return product(x, q, 0, backend)


def product(x: torch.Tensor, q: QTensor, axis: int, backend: Backend | None = None) -> torch.Tensor:
    """The matmul of `x` with a quantized matrix, contracting the last axis of `x`.

    Args:
        x: floating `[..., K]`.
        q: `[K, N]` (axis 0) or `[N, K]` (axis 1).
        axis: the contraction axis of `q`.
        backend: as for `matmul`.

    Returns:
        `[..., N]`, of the dtype of `x`.
    """
    if q.requires_grad:
        raise QuantError("the QTensor requires a gradient, which codes do not have; set requires_grad=False")
    x = autocast(x)
    stored, places = in_memory_order(q)
    rows = x.reshape(-1, x.shape[-1])
    y = applied(Product((stored.form.text, places[axis], backend or "")), rows, stored.leaves)
    return y.reshape(*x.shape[:-1], q.shape[1 - axis])


def explain_matmul(x: torch.Tensor | QTensor, q: QTensor) -> str:
    """The backend that `matmul` chooses, and the reasons against those before it.

    Args:
        x: as for `matmul`.
        q: likewise.

    Returns:
        A line of text.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> explain_matmul(torch.ones(2, 64), quantize(torch.ones(8, 64), "mxfp4").T)
    'jax, because triton: the tensor is on cpu; the kernels need a CUDA device'
    """
    _check_operands(x, q)
    chosen, reasons = _chosen(x, q, None)
    if chosen == "triton":
        return triton.ABOUT
    if not reasons:
        return chosen
    return f"{chosen}, because " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _chosen(x: torch.Tensor | QTensor, q: QTensor, backend: str | None) -> tuple[str, dict[str, str]]:
    """The backend of a matmul, and the reasons against those that were asked before it."""
    if backend not in ("triton", "jax", "torch", None):
        raise QuantError(f"backend is {backend!r}, must be triton, jax, torch or None")
    order = ("triton", "torch", "jax") if q.device.type == "cuda" else ("triton", "jax")
    reasons: dict[str, str] = {}
    for name in (backend,) if backend else order:
        reason = _refusal(name, x, q, is_named=backend is not None)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise UnsupportedError(f"x @ {q.scheme.name} of shape {tuple(q.shape)} cannot run here", reasons)


def _refusal(name: str, x: torch.Tensor | QTensor, q: QTensor, *, is_named: bool) -> str | None:
    """Why a backend does not compute `x @ q`; None when it does."""
    if name == "torch":
        return decoded_leaves(q)[1]
    if name == "triton":
        reason = unsupported(x, q)
        if reason is None and not is_named and not isinstance(x, QTensor):
            reason = not_chosen(x, q)
        return reason
    if (reason := handover.refusal(q.device)) or isinstance(x, QTensor) or x.dtype in handover.FLOATS:
        return reason
    return f"x is {x.dtype}, and products accumulate in float32; pass x.float(), or backend='torch' for {x.dtype}"


# --- the operator ---


def _product(x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, axis: int, backend: str) -> torch.Tensor:
    """`x [M, K]` times the matrix of a form, contracting the given axis of it."""
    is_plain = x.is_cpu and leaves[0].is_cpu and backend != "torch" and x.dtype in handover.FLOATS and x.numel() > 0
    if not is_plain or backend == "triton":
        q = form_of(form).qtensor(leaves)
        w = permuted(q, (axis, 1 - axis))
        if x.device != q.device:
            raise QuantError(f"x is on {x.device} and q on {q.device}; move one to the other")
        name, _ = _chosen(x, w, backend or None)
        if x.numel() == 0:
            return x.new_zeros((len(x), w.shape[1]))
        if name == "torch":
            return x @ dequantize(w, x.dtype)
        if name == "triton":
            return by_triton(x, w, config_of(q.device), gpu_of(q.device))
    count = len(x)
    if not (missing := padded_count(count, form_of(form).policy) - count):
        return handover.call(_compiled(form, axis), (x, *leaves))
    x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return handover.call(_compiled(form, axis), (x, *leaves))[:count].clone()


def padded_count(rows: int, policy: Policy | None = None) -> int:
    """The rows after padding: up to 16 unchanged, above at most an eighth more.

    XLA compiles a program for each shape; with padding, prompts of all lengths share eight programs an octave. Rows are not
    padded where zero rows would change scales: under a policy with one scale for several rows, by a mean or a percentile.

    >>> padded_count(7), padded_count(100), padded_count(1000)
    (7, 104, 1024)
    """
    if rows <= 16 or (policy is not None and not _takes_zero_rows(policy)):
        return rows
    step = 1 << max((rows - 1).bit_length() - 4, 0)
    return -(-rows // step) * step


@functools.lru_cache(maxsize=4096)
def _takes_zero_rows(policy: Policy) -> bool:
    """Whether zero rows of `x [M, K]`, and of its gradient, change no scale under the policy."""
    return all(_is_range_or_of_one_row(scheme) for scheme in (policy.activation, policy.dlhs.gradient))


def _is_range_or_of_one_row(scheme: object) -> bool:
    """Whether each scale comes from a range with 0 or from one row, and so do those of quantized scales."""
    if not isinstance(scheme, Scheme):
        return True
    calibration = scheme.calibration
    is_range = isinstance(calibration, AbsMax) or (isinstance(calibration, MinMax) and calibration.contains_zero == 1)
    return (is_range or scheme.tiles(2)[0] == 1) and _is_range_or_of_one_row(scheme.scale)


@functools.lru_cache(maxsize=4096)
def _compiled(form: str, axis: int) -> Callable[..., jax.Array]:
    """The compiled product of the matrices of a form."""

    @jax.jit
    def fn(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return _jax_product(form_of(form), axis, x, leaves)

    return fn


def _jax_product(form: Form, axis: int, x: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    return dot_general(x, form.qarray(leaves).astype(x.dtype), (((1,), (axis,)), ((), ())))


def _empty(x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, axis: int, backend: str) -> torch.Tensor:
    return x.new_empty((x.shape[0], form_of(form).shape[1 - axis]))


handover.operator("product(Tensor x, Tensor[] leaves, str form, int axis, str backend) -> Tensor", _product, _empty)


def _product_gradient(g: torch.Tensor, tensors: Sequence[torch.Tensor], form: str, axis: int) -> torch.Tensor:
    """The gradient of `x`, the last tensor, in a matmul under a policy (its dgrad)."""
    *leaves, x = tensors
    rows = padded_count(len(x), form_of(form).policy)
    if x.numel() == 0:
        return torch.zeros_like(x)
    g, y = (torch.nn.functional.pad(t, (0, 0, 0, rows - len(x))) for t in (g, x))
    return handover.call(_compiled_gradient(form, axis), (g, y, *leaves))[: len(x)].clone()


@functools.lru_cache(maxsize=4096)
def _compiled_gradient(form: str, axis: int) -> Callable[..., jax.Array]:
    @jax.jit
    def fn(g: jax.Array, x: jax.Array, *leaves: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: _jax_product(form_of(form), axis, x, leaves), x)[1](g)[0]

    return fn


handover.operator(
    "product_gradient(Tensor g, Tensor[] tensors, str form, int axis) -> Tensor",
    _product_gradient,
    lambda g, tensors, form, axis: torch.empty_like(tensors[-1]),
)


class _ProductGradient(PolicyGradient):
    name = "product_gradient"


class Product(Operation):
    """The product of rows with quantized matrices; its settings are their form, the contracted axis and the backend."""

    name = "product"
    merges_rows = True
    axes: ClassVar[int] = 1
    """The sum of the two axes of a matrix."""
    gradient: ClassVar[type[PolicyGradient]] = _ProductGradient

    def transposed(self, x: torch.Tensor | None, tensors: Tensors) -> tuple[Operation, Tensors]:
        form, axis, backend = self.settings
        if x is not None:
            return self.gradient((form, axis)), (*tensors, x)
        return type(self)((form, self.axes - axis, backend)), tensors


Product.register_gradient()


# --- torch functions ---


# Their parameters have torch's names, by which they can be passed.


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """`x @ q.T + bias`."""
    x, q = input, weight
    if not isinstance(q, QTensor):
        y = _from_left(x, q.mT, None)
    else:
        _check_operands(x, q, axis=1)
        if isinstance(x, QTensor):
            y = _codes_product(x, permuted(q, (1, 0)), None)
        else:
            y = product(x, q, 1)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y


def _matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # noqa: A002
    return matmul(input, other)


def _mm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if max(input.ndim, mat2.ndim) > 2:
        raise QuantError(f"mm multiplies matrices; got shapes {tuple(input.shape)} and {tuple(mat2.shape)}")
    return matmul(input, mat2)


def _bmm(input: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:  # noqa: A002
    if (input.ndim, mat2.ndim) != (3, 3):
        raise QuantError(f"bmm multiplies batches of matrices; got shapes {tuple(input.shape)} and {tuple(mat2.shape)}")
    return matmul(input, mat2)


def _mv(input: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:  # noqa: A002
    return _mm(input, vec)


def _addmm(
    input: torch.Tensor,  # noqa: A002
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    y = _mm(mat1, mat2)
    if alpha != 1:
        y = y * alpha
    if beta == 0:  # a NaN of the input is dropped, too
        return y
    if beta != 1:
        input = input * beta  # noqa: A001
    return y + input.to(y.dtype)


FUNCTIONS |= {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda q, x: matmul(x, q),
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.bmm: _bmm,
    torch.Tensor.bmm: _bmm,
    torch.mv: _mv,
    torch.Tensor.mv: _mv,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
}


def _from_left(q: torch.Tensor, w: torch.Tensor, backend: Backend | None) -> torch.Tensor:
    """`q @ w` of a quantized matrix and a plain tensor: `(w.mT @ q.T).mT`."""
    if isinstance(q, QTensor) and q.ndim == 3 and w.ndim == 3:
        return matmul(w.mT, q.mT, backend=backend).mT
    if not isinstance(q, QTensor) or q.ndim != 2 or w.ndim < 1:
        raise QuantError(f"matmul multiplies [M, K] with [..., K, N]; got shapes {tuple(q.shape)} and {tuple(w.shape)}")
    if w.ndim == 1:
        _check_operands(w, q, axis=1)
        return product(w, q, 1, backend)
    _check_operands(w.mT, q, axis=1)
    return product(w.mT, q, 1, backend).mT


def autocast(x: torch.Tensor) -> torch.Tensor:
    """The operand in the dtype of `torch.autocast`, if it is on."""
    kind = x.device.type
    # torch raises for a device without autocast, such as meta.
    if x.dtype in handover.FLOATS and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _codes_product(x: QTensor, q: QTensor, backend: Backend | None) -> torch.Tensor:
    """The matmul of two QTensors. It multiplies their codes if no scale varies along the contraction axis."""
    (left, xs), (right, qs) = in_memory_order(x), in_memory_order(q)
    settings = (left.form.text, right.form.text, xs[1], qs[0], backend or "")
    return torch.ops.fewbit.codes_product(left.leaves, right.leaves, *settings)


def _multiplied_codes(
    x_leaves: Sequence[torch.Tensor],
    q_leaves: Sequence[torch.Tensor],
    x_form: str,
    q_form: str,
    x_axis: int,
    q_axis: int,
    backend: str,
) -> torch.Tensor:
    """The product of two matrices of forms, contracting the given axis of each."""
    x = permuted(form_of(x_form).qtensor(x_leaves), (1 - x_axis, x_axis))
    q = permuted(form_of(q_form).qtensor(q_leaves), (q_axis, 1 - q_axis))
    name, _ = _chosen(x, q, backend or None)
    if name == "triton":
        return codes_by_triton(x, q, config_of(q.device), gpu_of(q.device))
    if name == "torch":
        return (dequantize(x, torch.float32) @ dequantize(q, torch.float32)).to(x.dtype)
    return handover.call(_compiled_pair(x_form, q_form, x_axis, q_axis), (*x_leaves, *q_leaves)).to(x.dtype)


def _empty_codes_product(
    x_leaves: Sequence[torch.Tensor],
    q_leaves: Sequence[torch.Tensor],
    x_form: str,
    q_form: str,
    x_axis: int,
    q_axis: int,
    backend: str,
) -> torch.Tensor:
    x, q = form_of(x_form), form_of(q_form)
    return x_leaves[0].new_empty((x.shape[1 - x_axis], q.shape[1 - q_axis]), dtype=getattr(torch, x.dtype))


_SETTINGS = "str x_form, str q_form, int x_axis, int q_axis, str backend"
handover.operator(f"codes_product(Tensor[] x, Tensor[] q, {_SETTINGS}) -> Tensor", _multiplied_codes, _empty_codes_product)


@functools.lru_cache(maxsize=1024)
def _compiled_pair(left: str, right: str, of_left: int, of_right: int) -> Callable[..., jax.Array]:
    @jax.jit
    def fn(*leaves: jax.Array) -> jax.Array:
        forms, rest = (form_of(left), form_of(right)), iter(leaves)
        x, q = (form.qarray(rest).astype("float32") for form in forms)
        return dot_general(x, q, (((of_left,), (of_right,)), ((), ())))

    return fn


# --- Triton ---


def unsupported(x: torch.Tensor | QTensor, q: QTensor) -> str | None:
    """Why the Triton kernels do not support the operands; None when they do."""
    device = q.codes.device
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not triton.is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    if q.policy is not None:
        return "q has a policy, which the kernels do not support"
    if isinstance(x, QTensor):
        return unsupported_codes(x, q, torch.cuda.get_device_capability(device))
    if x.dtype not in PRECISIONS:
        return f"x is {x.dtype}, must be bfloat16, float16 or float32"
    return Matrix(triton.scheme_for_kernels(q), *q.shape).unsupported()


def unsupported_codes(x: QTensor, q: QTensor, capability: tuple[int, int]) -> str | None:
    """Why the kernels do not multiply codes with codes. The reason may be this compute capability. None when they do."""
    fmt = x.scheme.format
    if fmt.bits != 8 or fmt.bits != q.scheme.format.bits or isinstance(fmt, Integer) != isinstance(q.scheme.format, Integer):
        return f"codes of {fmt.name} and {q.scheme.format.name}, must be int8 and int8, or fp8 and fp8"
    names = {t.scheme.format.name for t in (x, q)}
    if not names <= {"int8", "int8_narrow", "e4m3fn", "e5m2"}:
        return f"codes of {', '.join(sorted(names))}, must be int8, int8_narrow, e4m3fn or e5m2"
    if not isinstance(fmt, Integer) and capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores; 8.9 is needed"
    left, right = (Matrix(triton.scheme_for_kernels(t), *t.shape) for t in (permuted(x, (1, 0)), q))
    if reason := left.unsupported() or right.unsupported():
        return reason
    is_plain = all(t.scheme.zero_point is None and t.scale.is_floating_point() for t in (x, q))
    is_whole = left.tile_k == right.tile_k == 0 and {left.tile_n, right.tile_n} <= {0, 1}
    if not (is_plain and is_whole):
        return "the scales must be floats, one a row of x and one a column of q, without zero points"
    return None


def not_chosen(x: torch.Tensor, q: QTensor) -> str | None:
    """Why torch's matmul is preferred to the kernels; None when it is not."""
    m, limit = x.numel() // x.shape[-1], config_of(q.codes.device).torch_from
    if m < limit:
        return None
    return f"from {limit} rows on, dequantizing once and torch's own matmul is faster"


def by_triton(x: torch.Tensor, q: QTensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The matmul by the kernels, for operands that `unsupported` accepts.

    Args:
        x: floating `[..., K]`.
        q: `[K, N]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[..., N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul.gpu import launch as triton_launch  # it needs Triton

    q = triton.for_kernels(q)
    matrix, rows = Matrix(q.scheme, *q.shape), x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
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
    operands = [rows, codes, q.scale, *or_unread(q, table)]
    if launch.takes_sizes:
        operands.append(q.scale)
    if launch.splits == 1:
        y = torch.empty((1, m, matrix.n), dtype=x.dtype, device=x.device)
        launch.run(tuple(operands), y)
    else:  # split K
        y = torch.empty((launch.splits, m, matrix.n), dtype=torch.float32, device=x.device)
        launch.run(tuple(operands), y)
        y = y.sum(0).to(x.dtype)
    return y.reshape(*x.shape[:-1], matrix.n)


def or_unread(q: QTensor, table: torch.Tensor | None) -> list[torch.Tensor]:
    """Zero point, tensor scale and codebook. The scale takes the place of absent ones, which the kernels do not read."""
    return [q.scale if operand is None else operand for operand in (q.zero_point, q.tensor_scale, table)]


def codes_by_triton(x: QTensor, q: QTensor, config: GpuConfig, gpu: Gpu) -> torch.Tensor:
    """The matmul of codes with codes, for operands that `unsupported_codes` accepts.

    Args:
        x: `[M, K]`.
        q: `[K, N]`.
        config: the blocks.
        gpu: the device.

    Returns:
        `[M, N]`, of the dtype of `x`.
    """
    from ..kernels.qmatmul.gpu import launch as triton_launch  # it needs Triton

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
    """The properties of a CUDA device that launches depend on."""
    properties = torch.cuda.get_device_properties(device)
    sm = 10 * properties.major + properties.minor
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin, sm)


def _scale_strides(scale: torch.Tensor) -> tuple[int, int]:
    """The strides of scales along K and N, 0 along an axis of length 1."""
    along_k, along_n = (stride * (length > 1) for stride, length in zip(scale.stride(), scale.shape, strict=True))
    return along_k, along_n


def config_of(device: torch.device) -> GpuConfig:
    """The block sizes for a CUDA device."""
    return gpu_config(torch.cuda.get_device_name(device))


@functools.lru_cache(maxsize=64)
def table_of(matrix: Matrix, device: torch.device) -> torch.Tensor | None:
    """The numbers of a codebook on a device; None for other formats."""
    table = matrix.table()
    if table is None:
        return None
    return torch.tensor(table, device=device)


def _check_operands(x: torch.Tensor | QTensor, q: QTensor, axis: int = 0) -> None:
    if not isinstance(q, QTensor) or q.ndim != 2 or x.ndim < 1 or (isinstance(x, QTensor) and x.ndim != 2):
        shapes = f"{tuple(x.shape)} and {tuple(q.shape)}"
        if q.ndim == 3:
            shapes += "; a stack of matrices takes [G, M, K], or rows in groups by ragged_dot"
        raise QuantError(f"matmul multiplies [..., K] with [K, N]; got shapes {shapes}")
    if x.shape[-1] != q.shape[axis]:
        side = ("rows", "columns")[axis]
        if x.shape[-1] == q.shape[1] and axis == 0:
            side += "; for a matrix [N, K] use x @ q.T"
        raise QuantError(f"x has {x.shape[-1]} columns and q has {q.shape[axis]} {side}")
    if not x.dtype.is_floating_point:
        raise QuantError(f"x is {x.dtype}, must be floating or a QTensor")

"""Products of torch tensors with quantized matrices: fewbit's kernels in JAX, Triton's on CUDA.

Every product is one operator of torch, `fewbit::product`, of plain tensors and the JSON of their form; so autograd and torch.compile
take it like any other. On a CPU it calls the compiled JAX function of its form, which is cached: 30 us over the kernel itself.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import torch

from ..errors import QuantError, UnsupportedError
from ..formats import Integer
from ..kernels.qmatmul.gpu_configs import Gpu, GpuConfig, blocks_for, gpu_config
from ..kernels.qmatmul.gpu_matrix import Matrix
from ..ops import dot_general
from . import handover, triton
from .qtensor import FUNCTIONS, Form, QTensor, form_of, in_memory_order, permuted
from .quantize import decoded_leaves, dequantize

Backend: TypeAlias = Literal["triton", "jax", "torch"]

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
"""How tensor cores multiply activations of a dtype: float16 is exact in TF32, whose exponents hold every scale."""


def matmul(x: torch.Tensor | QTensor, q: torch.Tensor | QTensor, *, backend: Backend | None = None) -> torch.Tensor:
    """`x @ q` with sums in float32, where one or both are quantized; `@`, `torch.matmul` and `F.linear` call it.

    `y[..., n] = sum_k x[..., k] q[k, n]`. A matrix `[N, K]`, as that of `torch.nn.Linear` is, is multiplied as `matmul(x, q.T)`:
    nothing is moved. Gradients reach `x` through the same kernels; the quantized matrix has none.

    Args:
        x: floating `[..., K]`; or a QTensor `[M, K]`.
        q: `[K, N]`, quantized; or floating `[K, N]` or `[K]` where `x` is a QTensor.
        backend: "jax" for fewbit's kernels in JAX; "triton" for Triton's on CUDA; "torch" for torch's product of the decoded
            matrix, also in float64. None takes JAX's on a CPU, and on CUDA Triton's where they serve, torch's product for so
            many rows that it is faster (`explain_matmul` says). One that is named is never replaced.

    Returns:
        `[..., N]`, of the dtype of `x`.

    Raises:
        QuantError: where the shapes do not fit, `x` is not floating, or it is float64 and the backend is not "torch".
        UnsupportedError: when the named backend cannot, or none can, with the reasons.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> q = quantize(torch.tensor([[6.0, -0.4, 0.0, 1.2]]), "mxfp4")
    >>> (torch.ones(2, 4) @ q.T).tolist()
    [[6.5], [6.5]]
    """
    if not isinstance(q, QTensor):
        return _from_left(x, q, backend)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    _check_operands(x, q)
    return _codes_product(x, q, backend) if isinstance(x, QTensor) else product(x, q, 0, backend)


def product(x: torch.Tensor, q: QTensor, axis: int, backend: Backend | None = None) -> torch.Tensor:
    """The product of the last axis of `x` with one axis of a quantized matrix.

    Args:
        x: floating `[..., K]`.
        q: `[K, N]` (axis 0) or `[N, K]` (axis 1).
        axis: the one that is summed over.
        backend: as for `matmul`.

    Returns:
        `[..., N]`, of the dtype of `x`.
    """
    if q.requires_grad:
        raise QuantError("the QTensor requires a gradient, which codes do not have; requires_grad=False is expected")
    x = _autocast(x)
    stored, places = in_memory_order(q)
    rows = x.reshape(-1, x.shape[-1])
    y = torch.ops.fewbit.product(rows, stored.leaves, stored.form.text, places[axis], backend or "")
    return y.reshape(*x.shape[:-1], q.shape[1 - axis])


def explain_matmul(x: torch.Tensor | QTensor, q: QTensor) -> str:
    """Says which backend `matmul` takes, and why not those before it.

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
    return ", because ".join((chosen, "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))).removesuffix(
        ", because "
    )


def _chosen(x: Any, q: QTensor, backend: Backend | None) -> tuple[str, dict[str, str]]:
    """The backend of a product, and why those that were asked before it do not serve."""
    if backend not in ("triton", "jax", "torch", None):
        raise QuantError(f"backend is {backend!r}, must be triton, jax, torch or None")
    refusals: dict[str, Callable[[], str | None]] = {
        "triton": lambda: unsupported(x, q) or (None if backend or isinstance(x, QTensor) else passed_over(x, q)),
        "jax": lambda: handover.refusal(q.device) or _refused_dtype(x),
        "torch": lambda: decoded_leaves(q.form, q.device)[1],
    }
    order = (backend,) if backend else ("triton", "torch", "jax") if q.device.type == "cuda" else ("triton", "jax")
    reasons: dict[str, str] = {}
    for name in order:
        reason = refusals[name]()
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise UnsupportedError(f"x @ {q.scheme.name} of shape {tuple(q.shape)} cannot run here", reasons)


def _refused_dtype(x: Any) -> str | None:
    if isinstance(x, QTensor) or x.dtype in handover.FLOATS:
        return None
    return f"x is {x.dtype}, and sums are made in float32; x.float(), or backend='torch' for a product in {x.dtype}"


# --- the operator ---


def _product(x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, axis: int, backend: str) -> torch.Tensor:
    """`x [M, K]` with the matrix of a form, whose given axis is summed over."""
    is_plain = x.is_cpu and leaves[0].is_cpu and backend != "torch" and x.dtype in handover.FLOATS and x.numel() > 0
    if not is_plain or backend == "triton":
        q = form_of(form).qtensor(leaves)
        w = permuted(q, (1, 0)) if axis else q
        if x.device != q.device:
            raise QuantError(f"x is on {x.device} and q on {q.device}; move one to the other")
        name, _ = _chosen(x, w, backend or None)  # type: ignore[arg-type]
        if x.numel() == 0:
            return x.new_zeros((len(x), w.shape[1]))
        if name == "torch":
            return x @ dequantize(w, x.dtype)
        if name == "triton":
            return by_triton(x, w, config_of(q.device), gpu_of(q.device))
    count = len(x)
    missing = padded_count(count) - count
    x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    y = handover.call(_compiled(form, axis), (x, *leaves))
    return y[:count].clone() if missing else y


def padded_count(rows: int) -> int:
    """How many rows are computed for so many: every count up to 16 itself, above it up to an eighth more.

    XLA compiles a program for each shape; so prompts of any length share eight programs an octave.

    >>> padded_count(7), padded_count(100), padded_count(1000)
    (7, 104, 1024)
    """
    if rows <= 16:
        return rows
    step = 1 << max((rows - 1).bit_length() - 4, 0)
    return -(-rows // step) * step


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


def _product_gradient(
    g: torch.Tensor, x: torch.Tensor, leaves: Sequence[torch.Tensor], form: str, axis: int
) -> torch.Tensor:
    """The gradient of `x` in a product under a policy, as the policy's arms compute it."""
    rows = padded_count(len(x))
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
    "product_gradient(Tensor g, Tensor x, Tensor[] leaves, str form, int axis) -> Tensor",
    _product_gradient,
    lambda g, x, leaves, form, axis: torch.empty_like(x),
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, leaves, ctx.form, ctx.axis, ctx.backend = inputs
    ctx.has_policy = form_of(ctx.form).policy is not None
    ctx.save_for_backward(*leaves, *((x,) if ctx.has_policy else ()))


def _backward(ctx: Any, g: torch.Tensor) -> Any:
    saved = list(ctx.saved_tensors)
    if ctx.has_policy:
        x = saved.pop()
        of_x = torch.ops.fewbit.product_gradient(g, x, saved, ctx.form, ctx.axis)
    else:
        of_x = torch.ops.fewbit.product(g, saved, ctx.form, 1 - ctx.axis, ctx.backend)
    return of_x, [None] * len(saved), None, None, None


torch.library.register_autograd("fewbit::product", _backward, setup_context=_setup, lib=handover.LIBRARY)


# --- functions of torch ---


def _linear(x: Any, q: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ q.T + bias`."""
    if not isinstance(q, QTensor):
        return _plus(_from_left(x, q.mT, None), bias)
    _check_operands(x, q, axis=1)
    y = _codes_product(x, permuted(q, (1, 0)), None) if isinstance(x, QTensor) else product(x, q, 1)
    return _plus(y, bias)


def _addmm(bias: torch.Tensor, x: Any, q: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    y = _matrices(x, q)
    return (y if alpha == 1 else y * alpha) + (bias if beta == 1 else bias * beta).to(y.dtype)


def _matrices(x: Any, q: Any) -> torch.Tensor:
    """`torch.mm` and `mv`, which take matrices and vectors only."""
    if max(x.ndim, q.ndim) > 2:
        raise QuantError(f"mm multiplies matrices; got shapes {tuple(x.shape)} and {tuple(q.shape)}")
    return matmul(x, q)


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)


FUNCTIONS |= {
    torch.nn.functional.linear: _linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.Tensor.__rmatmul__: lambda q, x: matmul(x, q),
    torch.mm: _matrices,
    torch.Tensor.mm: _matrices,
    torch.mv: _matrices,
    torch.Tensor.mv: _matrices,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
}


def _from_left(q: QTensor, w: torch.Tensor, backend: Backend | None) -> torch.Tensor:
    """`q @ w` of a quantized matrix and a plain tensor: `(w.mT @ q.T).mT`."""
    if q.ndim != 2 or w.ndim < 1:
        raise QuantError(f"matmul multiplies [M, K] with [..., K, N]; got shapes {tuple(q.shape)} and {tuple(w.shape)}")
    x = w if w.ndim == 1 else w.mT
    _check_operands(x, q, axis=1)
    y = product(x, q, 1, backend)
    return y if w.ndim == 1 else y.mT


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """The operand in the dtype of `torch.autocast`, where that is on."""
    kind = x.device.type
    if x.dtype in handover.FLOATS and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _codes_product(x: QTensor, q: QTensor, backend: Backend | None) -> torch.Tensor:
    """The product of two quantized matrices: codes with codes where no scale varies along the sum."""
    name, _ = _chosen(x, q, backend)
    if name == "triton":
        return codes_by_triton(x, q, config_of(q.device), gpu_of(q.device))
    if name == "torch":
        return (dequantize(x, torch.float32) @ dequantize(q, torch.float32)).to(x.dtype)
    (left, xs), (right, qs) = in_memory_order(x), in_memory_order(q)
    fn = _compiled_pair(left.form.text, right.form.text, xs[1], qs[0])
    return handover.call(fn, (*left.leaves, *right.leaves)).to(x.dtype)


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
    """Why the kernels do not multiply these, in a sentence; None when they do."""
    device = q.codes.device
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not triton.is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    if q.policy is not None:
        return "q has a policy, which the kernels do not follow"
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
    left, right = Matrix(permuted(x, (1, 0)).scheme, *x.shape[::-1]), Matrix(q.scheme, *_sides(q))
    is_plain = all(t.scheme.zero_point is None and t.scale.is_floating_point() for t in (x, q))
    is_whole = left.tile_k == right.tile_k == 0 and {left.tile_n, right.tile_n} <= {0, 1}
    return None if is_plain and is_whole else "the scales vary along the contraction, or are no floats a row"


def passed_over(x: torch.Tensor, q: QTensor) -> str | None:
    """Why torch's product is taken though the kernels serve; None when it is not."""
    m, limit = x.numel() // x.shape[-1], config_of(q.codes.device).torch_from
    return f"from {limit} rows on, decoding once and torch's own product is faster" if m >= limit else None


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


def _check_operands(x: torch.Tensor | QTensor, q: QTensor, axis: int = 0) -> None:
    if not isinstance(q, QTensor) or q.ndim != 2 or x.ndim < 1 or (isinstance(x, QTensor) and x.ndim != 2):
        hint = "; ragged_dot multiplies rows with a stack of matrices" if q.ndim == 3 else ""
        raise QuantError(f"matmul multiplies [..., K] with [K, N]; got shapes {tuple(x.shape)} and {tuple(q.shape)}{hint}")
    if x.shape[-1] != q.shape[axis]:
        hint = "; a matrix [N, K] is multiplied as x @ q.T" if x.shape[-1] == q.shape[1] and axis == 0 else ""
        side = "rows" if axis == 0 else "columns"
        raise QuantError(f"x has {x.shape[-1]} columns and q has {q.shape[axis]} {side}{hint}")
    if not x.dtype.is_floating_point:
        raise QuantError(f"x is {x.dtype}; floating activations, or a QTensor of them, are multiplied")

"""NVIDIA GPU matmul backend: Triton kernels called through jax-triton."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ....array.qarray import QArray
from ....array.scheme import Scheme
from ...lowering import split_refusal
from ..kernel import AbstractKernel
from ..matrix_view import MatrixView
from ..precision import float32_precision, refused_float32_precision
from ..problem import Problem
from .config import Gpu, GpuConfig, blocks_for, gpu_config
from .weight import Matrix

LEAST_SHARED = 99 * 1024
"""Bytes of shared memory per program that every GPU since Ampere has."""


@dataclasses.dataclass(frozen=True)
class TritonGPU(AbstractKernel):
    """Decodes packed codes in registers; needs jax-triton. A ragged_dot is one launch."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[str] = "cuda"
    experimental: ClassVar[bool] = True

    def refused(self, problem: Problem, weight: MatrixView) -> str | None:
        if importlib.util.find_spec("jax_triton") is None:
            return "it runs on cuda through jax-triton, which is not installed"
        dtype = problem.activation.dtype
        if dtype not in ("bfloat16", "float16", "float32"):
            return f"the activations are {dtype}; bfloat16, float16 and float32 are supported"
        if reason := refused_float32_precision(problem.precision):
            return reason
        rows, columns = (axis.length for axis in weight.merged)
        return _matrix(weight.scheme, rows, columns, contracts_cols=weight.contracts_cols).unsupported()

    def not_chosen(self, problem: Problem) -> str | None:
        return split_refusal()

    def about(self) -> str:
        return "Triton; experimental: tested in an interpreter and cross-compiled, not yet run on a GPU"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, precision: object) -> jax.Array:
        matrix = _matrix(q.scheme, q.shape[1], q.shape[2], contracts_cols=contracts_cols)
        each = [_product(matrix, x[b], _at(q, b), contracts_cols=contracts_cols, precision=precision) for b in range(len(x))]
        return jnp.stack(each).astype(dtype)

    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        from . import launch as triton_launch

        matrix = _matrix(q.scheme, q.shape[1], q.shape[2], contracts_cols=contracts_cols)
        tensor = q.tensor_scale
        if tensor is None:
            tensor = q.scale  # the kernel does not read it
        groups = triton_launch.Groups(q.shape[0], *map(_stack_stride, (q.codes, q.scale, tensor)))
        config, gpu = _device()
        launch = triton_launch.grouped_launch(
            *(matrix, len(x), x.shape[1], _strides(q.codes[0], contracts_cols=contracts_cols)),
            *(_scale_strides(q.scale[0], contracts_cols=contracts_cols), config, groups),
            precision=_passes(x.dtype, precision),
            gpu=gpu,
        )
        leaves = q.codes, q.scale, q.zero_point, q.tensor_scale
        return _called(launch, matrix, x, leaves, sizes)[0].astype(dtype)


def _matrix(scheme: Scheme, rows: int, columns: int, *, contracts_cols: bool) -> Matrix:
    """One matrix of a stack, as `[K, N]`."""
    _, row_tile, column_tile = scheme.tiles(3)
    if contracts_cols:
        return Matrix(scheme.with_tiles((column_tile, row_tile), -3 - scheme.pack_axis), columns, rows)
    return Matrix(scheme.with_tiles((row_tile, column_tile), scheme.pack_axis), rows, columns)


def _at(q: QArray, b: int) -> list[jax.Array | None]:
    """Codes, scales, zero points and tensor scale of one matrix of a stack, each `[R, C]`."""
    return jax.tree.map(lambda leaf: leaf[min(b, len(leaf) - 1)], [q.codes, q.scale, q.zero_point, q.tensor_scale])


def _product(matrix: Matrix, x: jax.Array, leaves: list[Any], *, contracts_cols: bool, precision: object) -> jax.Array:
    """The product with one matrix, `[M, N]`, float32 or of x's dtype."""
    from . import launch as triton_launch  # it needs Triton

    codes, scale, zero, unit = leaves
    config, gpu = _device()
    m, strides = len(x), _strides(codes, contracts_cols=contracts_cols)
    scale_strides = _scale_strides(scale, contracts_cols=contracts_cols)
    if x.dtype == jnp.bfloat16 and m <= config.pairs_rows and triton_launch.pairs_refuses(matrix, strides) is None:
        few = config.pairs[matrix.bits]
        launch = triton_launch.pairs_launch(
            *(matrix, m, x.shape[1], strides[1], scale_strides, few),
            ptx=config.ptx,
            gpu=gpu,
        )
    elif m <= config.gemv_rows and triton_launch.gemv_refuses(matrix, strides, 0) is None:
        words = jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, 4), jnp.int32)
        blocks = config.gemv[matrix.bits]
        launch = triton_launch.gemv_launch(matrix, m, x.shape[1], words.shape[1], scale_strides, blocks)
        codes = words
    else:
        launch = triton_launch.dot_launch(
            *(matrix, m, x.shape[1], strides, scale_strides, blocks_for(config.dot, m)),
            precision=_passes(x.dtype, precision),
            gpu=gpu,
        )
    y = _called(launch, matrix, x, (codes, scale, zero, unit), None)
    return y.sum(0) if launch.splits > 1 else y[0]


def _called(launch: Any, matrix: Matrix, x: jax.Array, leaves: Sequence[Any], sizes: jax.Array | None) -> jax.Array:
    """Launches a kernel: float32 partial sums or one result, `[splits, M, N]`."""
    import jax_triton  # type: ignore[import-not-found]  # pyright: ignore

    codes, scale, zero, unit = leaves
    if zero is not None:
        zero = jnp.broadcast_to(zero, scale.shape)  # one may apply to several scales; the kernels read one for each
    optional = jax.tree.map(jnp.asarray, [zero, unit, matrix.table()])
    if launch.takes_sizes:
        optional.append(sizes)
    # Any array can be passed for an absent one: the kernel does not read it.
    arrays = x, codes, scale, *(scale if array is None else array for array in optional)
    dtype = x.dtype if launch.splits == 1 else jnp.float32
    return jax_triton.triton_call(
        *(*arrays, *launch.numbers),
        kernel=launch.kernel,
        out_shape=jax.ShapeDtypeStruct((launch.splits, len(x), matrix.n), dtype),
        grid=launch.grid,
        **launch.constants,
        **launch.settings,
    )


def _passes(dtype: DTypeLike, precision: object) -> str:
    """The tensor core precision for activations of a dtype."""
    if dtype == jnp.bfloat16:
        return "bf16"
    if dtype == jnp.float16 or float32_precision(precision) == jax.lax.Precision.DEFAULT:
        return "tf32"
    return "tf32x3"


def _strides(array: jax.Array, *, contracts_cols: bool) -> tuple[int, int]:
    """The strides along K and N of a contiguous array `[R, C]`."""
    if contracts_cols:
        return 1, array.shape[1]
    return array.shape[1], 1


def _scale_strides(scale: jax.Array, *, contracts_cols: bool) -> tuple[int, int]:
    """The strides of scales along K and N, 0 along an axis of length one."""
    rows, columns = (0 if n == 1 else stride for n, stride in zip(scale.shape, (scale.shape[1], 1), strict=True))
    if contracts_cols:
        return columns, rows
    return rows, columns


def _stack_stride(leaf: jax.Array) -> int:
    """The stride along the first axis, 0 if it has length one."""
    return leaf[0].size if len(leaf) > 1 else 0


def _device() -> tuple[GpuConfig, Gpu]:
    """The configuration and properties of the default device."""
    device = jax.devices()[0]  # JAX reports only 48 KiB of its shared memory
    sm = round(10 * float(getattr(device, "compute_capability", "8.0")))
    return gpu_config(device.device_kind), Gpu(int(getattr(device, "core_count", 108)), LEAST_SHARED, sm)

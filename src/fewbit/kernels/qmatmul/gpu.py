"""The product on NVIDIA GPUs by the Triton kernels, called from JAX through jax-triton. PyTorch calls them without it."""

import dataclasses
import importlib.util
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ...array import QArray
from .gpu_configs import Gpu, GpuConfig, blocks_for, gpu_config
from .gpu_matrix import Matrix
from .pallas_form import float32_precision
from .problem import Operand, Problem
from .reference import BACKENDS
from .stack import Stack
from .stacked import AbstractStackKernel

LEAST_SHARED = 99 * 1024
"""What every GPU since Ampere lets one program have."""


@dataclasses.dataclass(frozen=True)
class TritonGPU(AbstractStackKernel):
    """Packed bytes decoded in registers, where jax-triton is installed."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[str] = "cuda"

    def refused(self, problem: Problem, x: Operand, stack: Stack) -> str | None:
        if importlib.util.find_spec("jax_triton") is None:
            return "it runs on cuda through jax-triton, which is not installed"
        if x.dtype not in ("bfloat16", "float16", "float32"):
            return f"it multiplies bfloat16, float16 and float32, not {x.dtype}"
        try:
            float32_precision(problem.precision)
        except ValueError:
            return f"precision is {problem.precision!r}; None or a name of jax.lax.Precision is expected"
        return _matrix(
            stack.scheme, stack.merged[0].length, stack.merged[1].length, contracts_cols=stack.contracts_cols
        ).unsupported()

    def passed_over(self, problem: Problem) -> str | None:
        if jax.device_count() == 1:
            return None
        return "there are several devices, and XLA splits no kernel over them; name it within jax.shard_map"

    def about(self) -> str:
        return "Triton; not run on a GPU from JAX by anyone yet, checked in Triton's interpreter"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: Any, precision: Any) -> jax.Array:
        matrix = _matrix(q.scheme, q.shape[1], q.shape[2], contracts_cols=contracts_cols)
        each = [_product(matrix, x[b], _at(q, b), contracts_cols=contracts_cols, precision=precision) for b in range(len(x))]
        return jnp.stack(each).astype(dtype)


BACKENDS.add(TritonGPU.name, TritonGPU())


def _matrix(scheme: Any, rows: int, columns: int, *, contracts_cols: bool) -> Matrix:
    """One matrix of a stack as `[K, N]`."""
    _, row_tile, column_tile = scheme.tiles(3)
    if contracts_cols:
        return Matrix(scheme.with_tiles((column_tile, row_tile), -3 - scheme.pack_axis), columns, rows)
    return Matrix(scheme.with_tiles((row_tile, column_tile), scheme.pack_axis), rows, columns)


def _at(q: QArray, b: int) -> list[jax.Array | None]:
    """Codes, scales, zero points and tensor scale of one matrix of a stack, each `[R, C]`."""
    leaves = (q.codes, q.scale, q.zero_point, q.tensor_scale)
    return [None if leaf is None else leaf[min(b, len(leaf) - 1)] for leaf in leaves]


def _product(matrix: Matrix, x: jax.Array, leaves: list[Any], *, contracts_cols: bool, precision: Any) -> jax.Array:
    """`[M, N]` of one matrix, float32 or as `x` is."""
    import jax_triton  # type: ignore[import-not-found]  # pyright: ignore

    from . import triton_launch  # it needs Triton

    codes, scale, zero, unit = leaves
    config, gpu = _device()
    m, strides = len(x), _strides(codes, contracts_cols=contracts_cols)
    scale_strides = tuple(s if length > 1 else 0 for s, length in _sides(scale, contracts_cols=contracts_cols))
    if m <= config.gemv_rows and triton_launch.gemv_refuses(matrix, strides, 0) is None:
        words = jax.lax.bitcast_convert_type(codes.reshape(len(codes), -1, 4), jnp.int32)
        blocks = config.gemv[matrix.bits]
        launch = triton_launch.gemv_launch(matrix, m, x.shape[1], words.shape[1], scale_strides, blocks)  # type: ignore[arg-type]
        codes = words
    else:
        launch = triton_launch.dot_launch(
            *(matrix, m, x.shape[1], strides, scale_strides, blocks_for(config.dot, m)),  # type: ignore[arg-type]
            precision=_passes(x.dtype, precision),
            gpu=gpu,
        )
    table = matrix.table()
    beside = [scale if leaf is None else leaf for leaf in (zero, unit, table if table is None else jnp.asarray(table))]
    shape = jax.ShapeDtypeStruct((launch.splits, m, matrix.n), x.dtype if launch.splits == 1 else jnp.float32)
    y = jax_triton.triton_call(
        *(x, codes, scale, *beside, *launch.numbers),
        kernel=launch.kernel,
        out_shape=shape,
        grid=launch.grid,
        **launch.constants,
        **launch.settings,
    )
    return y.sum(0) if launch.splits > 1 else y[0]


def _passes(dtype: Any, precision: Any) -> str:
    """How tensor cores multiply activations of a dtype."""
    if dtype == jnp.bfloat16:
        return "bf16"
    is_one_pass = dtype == jnp.float16 or float32_precision(precision) == jax.lax.Precision.DEFAULT
    return "tf32" if is_one_pass else "tf32x3"


def _sides(array: jax.Array, *, contracts_cols: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Stride and length along K, and along N, of an array `[R, C]` whose elements follow each other."""
    rows, columns = (array.shape[1], array.shape[0]), (1, array.shape[1])
    return (columns, rows) if contracts_cols else (rows, columns)


def _strides(array: jax.Array, *, contracts_cols: bool) -> tuple[int, int]:
    along_k, along_n = _sides(array, contracts_cols=contracts_cols)
    return along_k[0], along_n[0]


def _device() -> tuple[GpuConfig, Gpu]:
    """The configuration of the device at hand, and what JAX tells of it; of shared memory it tells only of 48 KiB."""
    device = jax.devices()[0]
    return gpu_config(device.device_kind), Gpu(int(getattr(device, "core_count", 108)), LEAST_SHARED)

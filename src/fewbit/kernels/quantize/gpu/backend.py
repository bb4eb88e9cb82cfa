"""Quantize and dequantize on NVIDIA GPUs by Triton kernels, through jax-triton.

`fewbit.torch` launches the same kernels without jax-triton.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ....array.packing import packed_length
from ....array.qarray import QArray
from ....array.quantize import assembled, tensor_scale_of
from ....array.scheme import Scheme
from ....formats.format import AbstractFormat
from ...backend import AbstractBackend
from ...lowering import split_refusal
from ..problem import Decoding, Quantization
from .problem import TileProblem

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TritonQuantizer(AbstractBackend[Quantization]):
    """A Triton kernel, if jax-triton is installed; gives the same bytes as the reference."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[str] = "cuda"
    experimental: ClassVar[bool] = True

    def unsupported(self, problem: Quantization) -> str | None:
        if (refusal := _refusal(problem.dtype)) is not None:
            return refusal
        if problem.is_stochastic or problem.is_given or problem.is_weighted:
            return "stochastic rounding, given scales and weighted errors: use backend='reference'"
        return TileProblem.of(problem.scheme, problem.shape, problem.scheme.tiles(len(problem.shape))).unsupported()

    def not_chosen(self, problem: Quantization) -> str | None:
        return split_refusal()

    def about(self) -> str:
        return _ABOUT

    def run(self, problem: Quantization, *operands: PyTree) -> QArray:
        return _quantized(problem.scheme, operands[0])


@dataclasses.dataclass(frozen=True)
class TritonDequantizer(AbstractBackend[Decoding]):
    """A Triton kernel, if jax-triton is installed; gives the same numbers as the reference."""

    name: ClassVar[str] = "triton"
    platform: ClassVar[str] = "cuda"
    experimental: ClassVar[bool] = True

    def unsupported(self, problem: Decoding) -> str | None:
        if (refusal := _refusal(problem.dtype)) is not None:
            return refusal
        return TileProblem.of(problem.scheme, problem.shape, problem.tiles).unsupported_layout()

    def not_chosen(self, problem: Decoding) -> str | None:
        return split_refusal()

    def about(self) -> str:
        return _ABOUT

    def run(self, problem: Decoding, *operands: PyTree) -> jax.Array:
        return _decoded(jnp.dtype(problem.dtype), operands[0])


_ABOUT = "Triton; experimental: tested in an interpreter and cross-compiled, not yet run on a GPU"


def _refusal(dtype: str) -> str | None:
    if importlib.util.find_spec("jax_triton") is None:
        return "it runs on cuda through jax-triton, which is not installed"
    if dtype not in _DTYPES:
        return f"the array is {dtype}, must be one of {', '.join(_DTYPES)}"
    return None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _quantized(scheme: Scheme, x: jax.Array) -> QArray:
    from . import quantize as triton  # it needs Triton

    problem, moved = TileProblem.of(scheme, x.shape, scheme.tiles(x.ndim)), jnp.moveaxis(x, scheme.pack_axis, -1)
    unit = tensor_scale_of(x, scheme)
    bytes_in_row = packed_length(problem.length, scheme.format.bits)
    stored = jnp.uint8 if isinstance(scheme.scale, AbstractFormat) else scheme.scale
    shapes = (
        jax.ShapeDtypeStruct((problem.rows, bytes_in_row), jnp.uint8),
        jax.ShapeDtypeStruct((problem.rows, problem.tiles_in_row), stored),  # type: ignore[arg-type]
    )
    rows = moved.reshape(problem.rows, problem.length)
    unread = rows  # any array, in place of one that the kernel does not read
    fractions = jnp.asarray(problem.fractions) if problem.fractions.size else unread
    operands = (rows, unread if unit is None else unit, fractions)
    leaves = _called(problem, triton.quantize_kernel, shapes, problem.encoding(), bytes_in_row, *operands)
    codes, scale = (jnp.moveaxis(leaf.reshape(*moved.shape[:-1], -1), -1, scheme.pack_axis) for leaf in leaves)
    if unit is not None:
        unit = unit.reshape((1,) * x.ndim)
    return assembled(x, scheme, codes, scale, None, unit)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _decoded(dtype: DTypeLike, q: QArray) -> jax.Array:
    from . import dequantize as triton_dequantize  # it needs Triton

    axis, problem = q.scheme.pack_axis, TileProblem.of(q.scheme, q.shape, q.tiles)
    moved = jnp.moveaxis(q.codes, axis, -1)
    of_rows = jnp.broadcast_to(jnp.moveaxis(q.scale, axis, -1), (*moved.shape[:-1], problem.tiles_in_row))
    codes, scale = (leaf.reshape(problem.rows, -1) for leaf in (moved, of_rows))
    shape = jax.ShapeDtypeStruct((problem.rows, problem.length), dtype)
    unit = scale if q.tensor_scale is None else q.tensor_scale
    kernel, constants = triton_dequantize.dequantize_kernel, problem.decoding()
    (rows,) = _called(problem, kernel, (shape,), constants, codes.shape[1], codes, scale, unit)
    return jnp.moveaxis(rows.reshape(*moved.shape[:-1], problem.length), -1, axis)


def _called(
    problem: TileProblem,
    kernel: object,
    shapes: Sequence[jax.ShapeDtypeStruct],
    constants: dict[str, Any],
    bytes_in_row: int,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """The outputs of a kernel; under `vmap` it is launched for one array after the other."""
    import jax_triton  # type: ignore[import-not-found]  # pyright: ignore

    numbers = (problem.rows * problem.tiles_in_row, problem.length, problem.tiles_in_row, bytes_in_row)

    @jax.custom_batching.sequential_vmap
    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results: tuple[jax.Array, ...] = jax_triton.triton_call(
            *(*arrays, *numbers),
            kernel=kernel,
            out_shape=shapes,
            grid=(problem.programs,),
            num_warps=problem.warps,
            enable_fp_fusion=True,
            **constants,
        )
        return results

    return call(*arrays)

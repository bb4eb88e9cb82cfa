"""Launches the Triton quantize and dequantize kernels on CUDA tensors."""

import dataclasses
import functools
import importlib.util
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from ..array.packing import packed_length
from ..array.quantize import tensor_scale_of
from ..array.scales.store import ScaleStore
from ..array.scheme import Scheme
from ..formats.format import AbstractFormat
from ..formats.rounding import rounding_table
from ..kernels.quantize.gpu.problem import TileProblem
from .dlpack import array, tensor
from .qtensor import Form, QTensor

Work: TypeAlias = Literal["quantize", "decode", "sweep"]

ABOUT = "triton (experimental: tested in an interpreter and cross-compiled, not yet run on a GPU)"
"""What `explain` says where the kernels are chosen."""

_TINY = float(np.finfo(np.float32).tiny)


def kernels() -> ModuleType:
    """The module of the quantize kernels, imported late because it needs Triton."""
    from ..kernels.quantize.gpu import quantize as triton

    return triton


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def unsupported(device: torch.device, scheme: Scheme, shape: tuple[int, ...], work: Work = "quantize") -> str | None:
    """Why the Triton kernels do not support the work on a tensor. None when they do."""
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    problem = problem_of(scheme, shape)
    if work == "decode":
        return problem.unsupported_layout()
    if work == "sweep":
        if not isinstance(scheme.scale, AbstractFormat):
            return "the sweep over float scales has no kernel"
        from ..kernels.quantize.gpu import hessian as triton_hessian  # it needs Triton

        if reason := triton_hessian.unsupported(problem):
            return reason
    return problem.unsupported()


def scheme_for_kernels(q: QTensor, batch: int = 0) -> Scheme:
    """The scheme of `for_kernels(q, batch)`."""
    named = q.scheme.tiles(q.ndim)
    tiles = tuple(1 if count == n != 1 else t for t, n, count in zip(named, q.shape, q.scale.shape, strict=True))
    scheme = q.scheme
    if tiles != named:
        scheme = scheme.with_tiles(tiles, scheme.pack_axis)
    if q.tensor_scale is not None and any(count > 1 for count in q.tensor_scale.shape[batch:]):
        scheme = dataclasses.replace(scheme, scale="float32", tensor_scale=False)
    return scheme


def for_kernels(q: QTensor, batch: int = 0) -> QTensor:
    """The same numbers as the kernels read them: with the tiles of the scales, one tensor scale and a zero point for each scale.

    Stacked tensors may have several tensor scales. Their products with the scales are then float32 scales, as in JAX.

    Args:
        q: the QTensor, without quantized scales.
        batch: the first axes that may have a tensor scale for each element.

    Returns:
        The QTensor. Its zero points have the strides of its scales.
    """
    scheme, scale, zero, unit = scheme_for_kernels(q, batch), q.scale, q.zero_point, q.tensor_scale
    is_alike = zero is None or (zero.shape, zero.stride()) == (scale.shape, scale.stride())
    if scheme is q.scheme and is_alike:
        return q
    if unit is not None and not scheme.tensor_scale:
        assert isinstance(q.scheme.scale, AbstractFormat)
        scale, unit = _numbers(q.scheme.scale, q.device)[scale.int()] * unit, None
        scale = torch.where(scale.abs() < _TINY, 0.0, scale)
    if zero is not None:
        scale, zero = scale.contiguous(), zero.expand(scale.shape).contiguous()
    parts = {"codes": q.codes, "scale": scale, "zero_point": zero, "tensor_scale": unit}
    present = [name for name, part in parts.items() if part is not None]
    return QTensor._unchecked(parts, Form.of(scheme, q.shape, q.dtype, present))


@functools.lru_cache(maxsize=16)
def _numbers(holder: AbstractFormat, device: torch.device) -> torch.Tensor:
    """The number of each code of a scale format, float32."""
    return torch.tensor(rounding_table(holder).values, dtype=torch.float32, device=device)


def problem_of(scheme: Scheme, shape: tuple[int, ...]) -> TileProblem:
    """The problem of a tensor of this shape: its rows along the packed axis."""
    return TileProblem.of(scheme, shape, scheme.tiles(len(shape)))


def quantized(W: torch.Tensor, scheme: Scheme, H: torch.Tensor | None = None) -> QTensor:
    """Quantizes a tensor that `unsupported` accepts.

    Args:
        W: floating.
        scheme: the scheme, with its tiles on the axes of `W`.
        H: float32 `[blocks, tile, tile]`: all scales of the scale format are tried for the least `r^T H r`; None: the
            calibration computes the scales.

    Returns:
        The QTensor.
    """
    unit = tensor_scale(W, scheme)
    given = None if H is None else swept(W, scheme, H, unit)
    codes, scale = leaves_of(W, scheme, unit, given)
    if unit is not None:
        unit = unit.reshape((1,) * W.ndim)
    return QTensor(codes, scale, scheme, tuple(W.shape), W.dtype, tensor_scale=unit)


def tensor_scale(W: torch.Tensor, scheme: Scheme) -> torch.Tensor | None:
    """The tensor scale of the scheme's calibration, as fewbit in JAX has it. None without one.

    The largest finite magnitude over the largest product of a number and a scale, or, for a calibration that searches it, the best of
    a few multiples of that. The search runs in JAX on the CPU, and so do calibrations whose ranges exceed the largest magnitude.
    """
    if not scheme.tensor_scale:
        return None
    in_jax = scheme.calibration.searches_tensor_scale or scheme.calibration.exceeds_amax
    if in_jax and (unit := tensor_scale_of(array(W.detach().cpu()), scheme)) is not None:
        return tensor(unit).reshape(()).to(W.device)
    holder: Any = scheme.scale
    largest = scheme.calibration.largest_stored(holder) or ScaleStore(holder).largest
    magnitude = largest_magnitude(W)
    magnitude = torch.where(magnitude < _TINY, 0.0, magnitude)
    scale = magnitude / magnitude.new_tensor(scheme.format.bound * largest)  # a Python float would become its reciprocal
    return torch.where(scale < _TINY, 1.0, scale)


def leaves_of(
    W: torch.Tensor, scheme: Scheme, unit: torch.Tensor | None, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed codes and the stored scales of a tensor. They have as many axes as the tensor.

    Args:
        W: the tensor.
        scheme: the scheme, with its tiles on the axes of `W`.
        unit: the tensor scale, or None.
        given: float32 `[rows, tiles]`, the scale of each tile; None: the calibration computes them.
    """
    problem, axis = problem_of(scheme, tuple(W.shape)), scheme.pack_axis
    rows = W.movedim(axis, -1).contiguous()
    outer = rows.shape[:-1]
    byte_count = packed_length(problem.length, scheme.format.bits)
    codes = torch.empty((problem.rows, byte_count), dtype=torch.uint8, device=W.device)
    holder = scheme.scale
    dtype = torch.uint8 if isinstance(holder, AbstractFormat) else getattr(torch, holder.name)  # type: ignore[union-attr]
    scale = torch.empty((problem.rows, problem.tiles_in_row), dtype=dtype, device=W.device)
    fractions = _fractions(problem, W.device) if problem.fractions.size else None
    kernels().quantize_rows(problem, rows.reshape(problem.rows, problem.length), codes, scale, unit, fractions, given=given)
    codes, scale = (t.reshape(*outer, -1).movedim(-1, axis).contiguous() for t in (codes, scale))
    return codes, scale


@functools.lru_cache(maxsize=16)
def _fractions(problem: TileProblem, device: torch.device) -> torch.Tensor:
    return torch.tensor(problem.fractions, device=device)


def largest_magnitude(W: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of a tensor, float32, in one read."""
    bits = torch.zeros((), dtype=torch.int32, device=W.device)
    kernels().raise_to_amax(W.contiguous(), bits)
    return bits.view(torch.float32)


def swept(W: torch.Tensor, scheme: Scheme, H: torch.Tensor, unit: torch.Tensor | None) -> torch.Tensor:
    """The scales `[rows, tiles]` of least `r^T H r`. They are chosen among the calibration's and all of the scale format."""
    from ..kernels.quantize.gpu import hessian as triton_hessian  # it needs Triton

    problem, holder = problem_of(scheme, tuple(W.shape)), scheme.scale
    assert isinstance(holder, AbstractFormat)
    rows = W.movedim(scheme.pack_axis, -1).reshape(problem.rows, problem.length).contiguous()
    stored = leaves_of(W, scheme, unit)[1].movedim(scheme.pack_axis, -1).reshape(problem.rows, -1)
    values = _numbers(holder, W.device)
    grid = torch.unique(values[torch.isfinite(values) & (values >= ScaleStore(holder).smallest)])
    scale = values[stored.int()]
    if unit is not None:
        scale, grid = scale * unit, grid * unit
    # Above the smallest scale under which everything rounds to zero all errors are equal; the initial scales are below it.
    top = torch.nan_to_num(scale).amax() * (8 * scheme.format.bound / scheme.format.smallest)
    found = scale.contiguous()
    triton_hessian.sweep_rows(problem, rows, H.contiguous(), found, grid[(grid >= _TINY) & (grid <= top)].contiguous())
    return found


def dequantized(q: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes a QTensor whose `scheme_for_kernels` `unsupported` accepts."""
    q = for_kernels(q)
    problem, axis = problem_of(q.scheme, tuple(q.shape)), q.scheme.pack_axis
    codes = q.codes.movedim(axis, -1).contiguous()
    scale = q.scale.movedim(axis, -1).expand(*codes.shape[:-1], -1).contiguous()
    rows = torch.empty((problem.rows, problem.length), dtype=dtype, device=q.codes.device)
    from ..kernels.quantize.gpu import dequantize as triton_dequantize  # it needs Triton

    triton_dequantize.dequantize_rows(problem, codes, scale, q.tensor_scale, rows)
    return rows.reshape(*codes.shape[:-1], problem.length).movedim(-1, axis)

"""Tensors on a CUDA device go to the Triton kernels: what they serve, and the tensors that they read and write."""

import functools
import importlib.util
import math
from typing import Any, Literal, TypeAlias

import torch

from ..array import Scheme
from ..array.packing import packed_length
from ..formats import AbstractFormat
from ..kernels.quantize.triton_problem import TileProblem
from .qtensor import QTensor

Work: TypeAlias = Literal["quantize", "decode", "sweep"]


def kernels() -> Any:
    """The module of the quantizers, imported here because it needs Triton."""
    from ..kernels.quantize import triton

    return triton


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def unsupported(device: torch.device, scheme: Scheme, shape: tuple[int, ...], work: Work = "quantize") -> str | None:
    """Why the Triton kernels do not do the work on a tensor, in a sentence; None when they do."""
    if device.type != "cuda":
        return f"the tensor is on {device.type}; the kernels need a CUDA device"
    if not is_installed():
        return "the package is not installed; pip install 'fewbit[triton]'"
    problem = problem_of(scheme, shape)
    if work == "sweep" and not isinstance(scheme.scale, AbstractFormat):
        return "a sweep over float scales has no kernel"
    if work == "sweep":
        from ..kernels.quantize import triton_hessian  # it needs Triton

        return triton_hessian.unsupported(problem)
    return problem.unsupported_layout() if work == "decode" else problem.unsupported()


def problem_of(scheme: Scheme, shape: tuple[int, ...]) -> TileProblem:
    """What the kernels are asked for a tensor of this shape: its rows along the packed axis."""
    length = shape[scheme.pack_axis]
    return TileProblem(scheme, length, math.prod(shape) // length)


def quantized(W: torch.Tensor, scheme: Scheme, unit: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed codes and the stored scales of a tensor, each with as many axes as it has."""
    problem, axis = problem_of(scheme, tuple(W.shape)), scheme.pack_axis
    rows = W.movedim(axis, -1).contiguous()
    outer = rows.shape[:-1]
    byte_count = packed_length(problem.length, scheme.format.bits)
    codes = torch.empty((problem.rows, byte_count), dtype=torch.uint8, device=W.device)
    held = scheme.scale
    dtype = torch.uint8 if isinstance(held, AbstractFormat) else getattr(torch, held.name)  # type: ignore[union-attr]
    scale = torch.empty((problem.rows, problem.tiles_in_row), dtype=dtype, device=W.device)
    fractions = _fractions(problem, W.device) if problem.fractions.size else None
    kernels().quantize_rows(problem, rows.reshape(problem.rows, problem.length), codes, scale, unit, fractions)
    restored = (t.reshape(*outer, -1).movedim(-1, axis).contiguous() for t in (codes, scale))
    return tuple(restored)  # type: ignore[return-value]


@functools.lru_cache(maxsize=16)
def _fractions(problem: TileProblem, device: torch.device) -> torch.Tensor:
    return torch.tensor(problem.fractions, device=device)


def largest_magnitude(W: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of a tensor, float32, in one read."""
    bits = torch.zeros((), dtype=torch.int32, device=W.device)
    kernels().raise_to_amax(W.contiguous(), bits)
    return bits.view(torch.float32)


def swept(W: torch.Tensor, scheme: Scheme, H: torch.Tensor, start: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """The scales `[rows, tiles]` of least `r^T H r`, from those to start from and those to try."""
    from ..kernels.quantize import triton_hessian  # it needs Triton

    problem, scale = problem_of(scheme, tuple(W.shape)), start.float().contiguous().clone()
    rows = W.movedim(scheme.pack_axis, -1).reshape(problem.rows, problem.length).contiguous()
    triton_hessian.sweep_rows(problem, rows, H.float().contiguous(), scale, candidates.float().contiguous())
    return scale


def dequantized(q: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor that a QTensor stands for."""
    problem, axis = problem_of(q.scheme, q.shape), q.scheme.pack_axis
    codes, scale = (t.movedim(axis, -1).contiguous() for t in (q.codes, q.scale))
    rows = torch.empty((problem.rows, problem.length), dtype=dtype, device=q.codes.device)
    from ..kernels.quantize import triton_dequantize  # it needs Triton

    triton_dequantize.dequantize_rows(problem, codes, scale, q.tensor_scale, rows)
    return rows.reshape(*codes.shape[:-1], problem.length).movedim(-1, axis)

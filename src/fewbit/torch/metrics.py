"""Relative errors of quantized weights and products."""

import dataclasses
import math

import torch

from ..errors import QuantError
from .qtensor import QTensor
from .quantize import contraction_axis, dequantize

_ROWS = 4096
"""The rows of activations in one matmul."""


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Relative errors in the Frobenius norm; times 100 they are percent.

    Attributes:
        weight_error: `||V - W|| / ||W||`, where `V` is the dequantized tensor.
        output_error: the error of the products with the activations; None without activations.
    """

    weight_error: float
    output_error: float | None = None


@torch.no_grad()
def metrics(W: torch.Tensor, q: QTensor | torch.Tensor, X: torch.Tensor | None = None) -> Metrics:
    """The relative errors of a quantized tensor.

    `||V - W|| / ||W||` and `||X (V - W)^T|| / ||X W^T||`, products in float32, sums in float64.

    Args:
        W: the original tensor.
        q: the quantized tensor, or the dequantized one (then `X` is multiplied with its last axis).
        X: activations `[samples, n]`, where `n` is the length of the axis along which `q` was quantized.

    Returns:
        The errors; 0 if nothing differs.

    Raises:
        QuantError: for shapes that do not match.

    >>> import torch
    >>> from fewbit.torch import quantize
    >>> W = torch.tensor([[3.0, 4.0]])
    >>> metrics(W, torch.tensor([[3.0, 4.5]])).weight_error
    0.1
    """
    if isinstance(q, QTensor):
        V, axis = dequantize(q, torch.float32), contraction_axis(q.scheme, q.ndim)
    else:
        V, axis = q.float(), -1
    if V.shape != W.shape:
        raise QuantError(f"q has shape {tuple(V.shape)}, but W has {tuple(W.shape)}")
    off = V - W.float()
    weight_error = _ratio(_square(off), _square(W.float()))
    if X is None:
        return Metrics(weight_error)
    if X.ndim != 2 or X.shape[1] != W.shape[axis]:
        raise QuantError(f"X has shape {tuple(X.shape)}, must be [samples, {W.shape[axis]}]")
    columns = [t.movedim(axis, 0).reshape(t.shape[axis], -1) for t in (off, W.float())]
    parts = [[_square(x.float() @ c) for c in columns] for x in X.split(_ROWS)]
    return Metrics(weight_error, _ratio(*(sum(part) for part in zip(*parts, strict=True))))


def _square(x: torch.Tensor) -> float:
    """The sum of squares, in float64."""
    return float(x.double().square().sum())


def _ratio(off: float, whole: float) -> float:
    """The ratio of two norms, from their squares; 0 if `off` is 0, else infinity if `whole` is 0."""
    if not off:
        return 0.0
    if not whole:
        return math.inf
    return (off / whole) ** 0.5

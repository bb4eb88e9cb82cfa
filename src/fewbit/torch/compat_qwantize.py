"""qwantize's interface: blocks as an axis, and float tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from ..array import scheme as as_scheme
from ..array.packing import unpack
from ..array.quantize import expanded_zero_point, scale_values
from ..array.scheme import Scheme
from ..errors import QuantError
from ..formats.format import AbstractFormat
from . import dlpack as handover
from .qtensor import to_qarray
from .quantize import Method, quantize


def quantize_blocks(
    W: torch.Tensor,
    scheme: str | Scheme | Mapping[str, Any],
    dim: int = -1,
    method: Method | None = None,
    X: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a tensor of blocks; returns float scales and numbers.

    Args:
        W: floating, `[..., blocks, block]`, on JAX's device; the axis `dim` is one block.
        scheme: as for `quantize`; its tile length is replaced by that of `dim`. qwantize has `tensor_scale=False`.
        dim: the axis of the block.
        method: as for `quantize`.
        X: activations `[samples, blocks * block]`, for the method "hessian" only.

    Returns:
        `(scales, quants)`: float32 scales, of the shape of `W` without `dim`, and float32 numbers of the format less their
        integer zero point, of the shape of `W`; `quants * scales.unsqueeze(dim)` dequantizes.

    Raises:
        QuantError: as for `quantize`, and for a scheme with float offsets (`q4_1`).

    >>> import torch
    >>> scales, quants = quantize_blocks(torch.tensor([[[6.0, -0.4], [0.0, 1.2]]]), "mxfp4")
    >>> scales.tolist(), quants.tolist()
    ([[1.0, 0.25]], [[[6.0, -0.5], [0.0, 4.0]]])
    """
    scheme = as_scheme(scheme)
    if not isinstance(scheme.zero_point, AbstractFormat | None):
        raise QuantError(f"scheme {scheme.name} has float offsets, which quants * scales lacks; use fewbit.torch.quantize")
    blocks = W.movedim(dim, -1)
    rows = blocks.flatten(-min(2, blocks.ndim))  # [..., blocks * block]
    q = to_qarray(quantize(rows, scheme.with_tile(blocks.shape[-1]), -1, method, X))
    fmt, packed = q.scheme.format, q.scheme.pack_axis
    numbers = fmt.decode(unpack(q.codes, fmt.bits, q.shape[packed], q.scheme.packing, axis=packed))
    if q.zero_point is not None:
        numbers = numbers - expanded_zero_point(q).astype(numbers.dtype)
    scales, quants = handover.tensor(scale_values(q)), handover.tensor(numbers)
    return scales.reshape(blocks.shape[:-1]), quants.reshape(blocks.shape).movedim(-1, dim)


def dequantize_blocks(scales: torch.Tensor, quants: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Dequantizes: `quants * scales`, one scale for each block.

    Args:
        scales: as `quantize_blocks` returns them.
        quants: likewise.
        dim: the axis of the block.

    Returns:
        A float32 tensor of the shape of `quants`.
    """
    return quants * scales.unsqueeze(dim)

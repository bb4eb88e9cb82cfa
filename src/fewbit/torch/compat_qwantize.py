"""qwantize's interface: blocks as an axis, and float tensors."""

from collections.abc import Mapping
from typing import Any

import torch

from ..array import scheme as as_scheme
from ..array.packing import unpack
from ..array.quantize import scale_values
from ..array.scheme import Scheme
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
        `(scales, quants)`: float32 scales, of the shape of `W` without `dim`, and float32 numbers of the format, of the
        shape of `W`; `quants * scales.unsqueeze(dim)` dequantizes.

    Raises:
        QuantError: as for `quantize`.

    >>> import torch
    >>> scales, quants = quantize_blocks(torch.tensor([[[6.0, -0.4], [0.0, 1.2]]]), "mxfp4")
    >>> scales.tolist(), quants.tolist()
    ([[1.0, 0.25]], [[[6.0, -0.5], [0.0, 4.0]]])
    """
    blocks = W.movedim(dim, -1)
    rows = blocks.flatten(-min(2, blocks.ndim))  # [..., blocks * block]
    q = to_qarray(quantize(rows, as_scheme(scheme).with_tile(blocks.shape[-1]), -1, method, X))
    fmt = q.scheme.format
    numbers = handover.tensor(fmt.decode(unpack(q.codes, fmt.bits, q.shape[-1], q.scheme.packing)))
    scales = handover.tensor(scale_values(q))
    return scales.reshape(blocks.shape[:-1]), numbers.reshape(blocks.shape).movedim(-1, dim)


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

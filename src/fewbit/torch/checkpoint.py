"""QTensors in files: `fewbit.io.write` takes state dicts, and `load` reads directories and files into tensors."""

import os
from typing import Any

import numpy as np
import torch

from ..array import QArray
from ..io import read
from ..io.writer import storable
from . import handover
from .qtensor import QTensor, from_qarray, to_qarray


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Reads a model's file or directory as a state dict: QTensors where it is quantized, plain tensors elsewhere.

    Args:
        path: whatever `fewbit.io.read` opens: a directory that fewbit wrote, safetensors, GGUF, `.npz`.
        device: where the tensors are to be.

    Returns:
        The tensors by name. `module.load_state_dict` takes them after `quantize_`, or with `assign=True`.

    Raises:
        QuantError: as `fewbit.io.read`.

    >>> import tempfile, torch
    >>> from fewbit.torch import quantize
    >>> path = fb.io.write(tempfile.mkdtemp() + "/model", {"up.weight": quantize(torch.ones(4, 64), "nf4")})
    >>> load(path)
    {'up.weight': QTensor(nf4, float32[4, 64], 144 bytes, 4.500 bits/weight)}
    """
    tensors = read(path).tensors
    return {name: _tensor(tensors[name]).to(device) for name in tensors}


def _tensor(value: Any) -> torch.Tensor:
    """The tensor of what a file holds, in memory of its own."""
    if isinstance(value, QArray):
        return from_qarray(value)
    if value.dtype in (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.uint64)):  # JAX would narrow them
        return torch.tensor(np.asarray(value))
    if value.dtype.name.startswith("float8"):
        return torch.tensor(np.asarray(value).view(np.uint8)).view(getattr(torch, value.dtype.name))
    return handover.tensor(value).clone()


@storable.register
def _(value: torch.Tensor, name: str) -> Any:
    """A tensor as an array or QArray."""
    value = value.detach().cpu()
    if isinstance(value, QTensor):
        return to_qarray(value)
    return handover.operand(value)

"""Reads and writes checkpoints of QTensors."""

import os

import jax
import numpy as np
import torch

from ..array.qarray import QArray
from ..errors import QuantError
from ..io import read
from ..io.native.writer import storable
from . import dlpack as handover
from .qtensor import QTensor, from_qarray, to_qarray


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Reads a model file or directory as a state dict of QTensors and plain tensors.

    Args:
        path: as for `fewbit.io.read`: a directory that fewbit wrote, safetensors, GGUF, `.npz`.
        device: the device of the tensors.

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


def _tensor(value: QArray | jax.Array | np.ndarray) -> torch.Tensor:
    """A copy of an array of a checkpoint as a tensor."""
    if isinstance(value, QArray):
        return from_qarray(value)
    if value.dtype in (np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.uint64)):  # JAX would narrow them
        return torch.tensor(np.asarray(value))
    if value.dtype.name.startswith("float8"):
        return torch.tensor(np.asarray(value).view(np.uint8)).view(getattr(torch, value.dtype.name))
    return handover.tensor(value).clone()


@storable.register
def _(value: torch.Tensor, name: str) -> QArray | np.ndarray | jax.Array:
    """A tensor as a QArray or an array."""
    is_packed = value.is_quantized or str(value.dtype) == "torch.float4_e2m1fn_x2"  # dtypes of torch alone
    if value.is_meta or value.layout is not torch.strided or is_packed:
        raise QuantError(
            f"tensor {name!r} is {value.dtype}, {value.layout}, on {value.device}; expected a dense tensor of plain numbers: "
            "load a tensor on meta first, and convert others by to_dense(), dequantize() or view(torch.uint8)"
        )
    value = value.detach().cpu()
    if isinstance(value, QTensor):
        return to_qarray(value)
    return handover.operand(value.resolve_conj().resolve_neg())

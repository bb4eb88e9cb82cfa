"""Tensors as the bytes of their rows, which GGUF stores.

Rows permute, split, stack and join as bytes, so nothing is quantized again.
"""

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np

from ...array.qarray import QArray
from ...errors import QuantError
from .blocks import blocks_from_qarray

PLAIN: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
"""The dtype of each type of unquantized tensors."""

_NAMES = {dtype: name for name, dtype in PLAIN.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a ggml type.

    Attributes:
        type_name: the ggml type.
        data: uint8, `[*rows, bytes of a row]`.
        width: the elements of a row.
        tensor_scale: the float32 scales of NVFP4, one or one for each element of the first axis; else None.
    """

    type_name: str
    data: np.ndarray
    width: int
    tensor_scale: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in elements."""
        return (*self.data.shape[:-1], self.width)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def with_rows(self, data: np.ndarray) -> "Stored":
        """The same type with other rows."""
        return dataclasses.replace(self, data=np.ascontiguousarray(data))

    def values(self) -> np.ndarray:
        """The array of an unquantized tensor."""
        return np.ascontiguousarray(self.data).view(PLAIN[self.type_name])


def stored(value: np.ndarray | jax.Array | QArray, what: str, ternary: str = "TQ2_0") -> Stored:
    """Converts an array or QArray, without loss.

    Args:
        value: the array; its last axis is the contraction axis.
        what: its name, for messages.
        ternary: the ggml type of ternary arrays, "TQ2_0" or "TQ1_0".

    Returns:
        The tensor.

    Raises:
        QuantError: for a dtype or scheme that GGUF lacks, more than 4 axes, or an empty array.
    """
    if len(value.shape) > 4 or math.prod(value.shape) == 0:
        raise QuantError(f"{what} has shape {tuple(value.shape)}; GGUF stores tensors of 1 to 4 axes with elements")
    if isinstance(value, QArray):
        name, data = blocks_from_qarray(value, what, ternary)
        unit = None
        if value.tensor_scale is not None:
            unit = np.asarray(value.tensor_scale, np.float32)
            if unit.size > 1 and unit.shape != (*value.shape[:1], 1, 1):
                raise QuantError(
                    f"{what} has tensor scales of shape {unit.shape} for its shape {tuple(value.shape)}; GGUF stores one, or one "
                    "for each matrix of a stack of three axes"
                )
            unit = unit.reshape(-1)
        shape: tuple[int, ...] = tuple(value.shape)
        return Stored(name, data, shape[-1], unit)
    array = np.ascontiguousarray(value)
    name = _NAMES.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise QuantError(f"{what} has dtype {array.dtype}; GGUF stores {', '.join(d.name for d in PLAIN.values())}")
    array = np.atleast_1d(array).astype(PLAIN[name], copy=False)
    return Stored(name, array.view(np.uint8), array.shape[-1])


def stacked(parts: list[Stored], what: str) -> Stored:
    """The tensors along a new first axis: experts.

    Raises:
        QuantError: when their types differ.
    """
    if len({(part.type_name, part.shape) for part in parts}) > 1:
        kinds = ", ".join(dict.fromkeys(f"{part.type_name} {part.shape}" for part in parts))
        raise QuantError(f"{what} stacks tensors of different types or shapes ({kinds}); GGUF needs one. Quantize all alike")
    units = [part.tensor_scale for part in parts if part.tensor_scale is not None]
    unit = np.concatenate(units) if units else None
    return dataclasses.replace(parts[0], data=np.stack([part.data for part in parts]), tensor_scale=unit)

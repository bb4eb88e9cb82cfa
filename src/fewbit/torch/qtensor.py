"""QTensor: what a quantized torch tensor holds, byte for byte what a QArray holds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..array import QArray, Scheme
from ..errors import QuantError, UnsupportedError


@dataclasses.dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized tensor: packed codes, a scale for each tile, and the Scheme that says what they mean.

    Attributes:
        codes: uint8, shaped like the tensor but for the packed axis (`scheme.pack_axis`), whose length is that of the bytes.
        scale: one element a tile, with as many axes as the tensor: uint8 codes of `scheme.scale` where that is a Format, else
            a float tensor.
        tensor_scale: float32, one element, with as many axes as the tensor, which every scale is multiplied by; or None.
        scheme: what the leaves mean, its tiles on the axis that was quantized.
        shape: the shape of the tensor that this one stands for.
        dtype: its floating dtype, which `dequantize` gives.
        zero_point: like `scale`, codes of `scheme.zero_point` or float offsets; or None. `from_qarray` brings it.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype
    zero_point: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that are really held: packed codes, scales, zero points and tensor scale."""
        held = (self.codes, self.scale, self.zero_point, self.tensor_scale)
        return sum(leaf.numel() * leaf.element_size() for leaf in held if leaf is not None)

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes` over the number of elements."""
        return 8 * self.nbytes / torch.Size(self.shape).numel()

    @property
    def T(self) -> "QTensor":
        """The transpose of a matrix, exactly: views of the same bytes, under a scheme whose axes are exchanged.

        Raises:
            QuantError: where there are not two axes.
        """
        if len(self.shape) != 2:
            raise QuantError(f"T is for matrices; the shape is {self.shape}; mT transposes each of a stack")
        return self.mT

    @property
    def mT(self) -> "QTensor":
        """The transpose of each matrix of a stack, exactly: views of the same bytes, with the last two axes exchanged.

        Raises:
            QuantError: where there are fewer than two axes.
        """
        if len(self.shape) < 2:
            raise QuantError(f"mT is for matrices and stacks of them; the shape is {self.shape}")
        *stack, rows, columns = self.scheme.tiles(len(self.shape))
        packed = {-1: -2, -2: -1}.get(self.scheme.pack_axis, self.scheme.pack_axis)
        scheme = self.scheme.with_tiles((*stack, columns, rows), packed)
        *lengths, r, c = self.shape
        return self._with_leaves(lambda leaf: leaf.mT, scheme=scheme, shape=(*lengths, c, r))

    def to(self, device: torch.device | str) -> "QTensor":
        """The same bytes on another device."""
        return self._with_leaves(lambda leaf: leaf.to(device))

    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor:
        from .products import matmul  # it needs this class

        return matmul(x, self)

    def _with_leaves(self, change: Callable[[torch.Tensor], torch.Tensor], **fields: Any) -> "QTensor":
        """The QTensor of changed tensors."""
        leaves = {name: getattr(self, name) for name in ("codes", "scale", "tensor_scale", "zero_point")}
        changed = {name: change(leaf) for name, leaf in leaves.items() if leaf is not None}
        return dataclasses.replace(self, **changed, **fields)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = ", ".join(map(str, self.shape))
        return (
            f"QTensor({self.scheme.name}, {dtype}[{shape}], {self.nbytes:,} bytes, {self.bits_per_weight:.3f} bits/weight)"
        )


def from_qarray(q: QArray, device: torch.device | str = "cpu") -> QTensor:
    """The QTensor of a QArray, with the same bytes: what `fewbit` loaded or quantized, for torch to multiply with.

    Args:
        q: the QArray; its scales are codes or floats, not quantized themselves.
        device: where the tensors are to be.

    Returns:
        The QTensor.

    Raises:
        UnsupportedError: for scales that are quantized themselves.

    >>> import fewbit as fb
    >>> import jax.numpy as jnp
    >>> from_qarray(fb.quantize(jnp.ones((4, 64)), "uint4_g64"))
    QTensor(uint4_g64, float32[4, 64], 148 bytes, 4.625 bits/weight)
    """
    if isinstance(q.scale, QArray):
        reason = "scales that are quantized themselves; quantize with float scales"
        raise UnsupportedError(f"no QTensor holds {q.scheme.name}", {"torch": reason})
    leaves = (None if leaf is None else _tensor(leaf, device) for leaf in (q.codes, q.scale, q.tensor_scale, q.zero_point))
    codes, scale, tensor_scale, zero_point = leaves
    assert codes is not None
    assert scale is not None
    return QTensor(codes, scale, tensor_scale, q.scheme, q.shape, getattr(torch, np.dtype(q.dtype).name), zero_point)


def _tensor(leaf: Any, device: torch.device | str) -> torch.Tensor:
    """The tensor of an array's bytes; numpy has no bfloat16 that torch knows."""
    array = np.ascontiguousarray(np.asarray(leaf))
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.tensor(array).to(device)

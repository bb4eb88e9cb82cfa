"""QTensor: what a quantized torch tensor holds, byte for byte what a QArray holds."""

import dataclasses

import torch

from ..array import Scheme


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
    """

    codes: torch.Tensor
    scale: torch.Tensor
    tensor_scale: torch.Tensor | None
    scheme: Scheme
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes that are really held: packed codes, scales and tensor scale."""
        held = (self.codes, self.scale, self.tensor_scale)
        return sum(leaf.numel() * leaf.element_size() for leaf in held if leaf is not None)

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes` over the number of elements."""
        return 8 * self.nbytes / torch.Size(self.shape).numel()

    def to(self, device: torch.device | str) -> "QTensor":
        """The same bytes on another device."""
        tensor_scale = None if self.tensor_scale is None else self.tensor_scale.to(device)
        return dataclasses.replace(self, codes=self.codes.to(device), scale=self.scale.to(device), tensor_scale=tensor_scale)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shape = ", ".join(map(str, self.shape))
        return (
            f"QTensor({self.scheme.name}, {dtype}[{shape}], {self.nbytes:,} bytes, {self.bits_per_weight:.3f} bits/weight)"
        )

"""Encoding, decoding and rounding to a format's numbers, in torch, from the format's own table."""

import dataclasses

import numpy as np
import torch

from ..formats import AbstractFormat
from ..formats.rounding import RoundingTable, rounding_table

TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Rounding:
    """A format on a device."""

    table: RoundingTable
    numbers: torch.Tensor
    codes: torch.Tensor
    thresholds: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, fmt: AbstractFormat, device: torch.device) -> "Rounding":
        """The rounding of a format."""
        table = rounding_table(fmt)
        arrays = (table.numbers, table.codes, table.thresholds, table.values)
        return cls(table, *(torch.tensor(array, device=device) for array in arrays))

    def rank(self, x: torch.Tensor) -> torch.Tensor:
        """The place, in ascending order, of the number nearest to each element."""
        return torch.bucketize(x, self.thresholds, out_int32=True)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """The number nearest to each element, float32."""
        return self.numbers[self.rank(x)]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """The code of the number nearest to each float32 element, uint8."""
        code = self.codes[self.rank(x)]
        if self.table.minus_zero is not None:
            is_minus_zero = (code == self.table.zero) & torch.signbit(x)
            code = torch.where(is_minus_zero, self.table.minus_zero, code)
        return torch.where(torch.isnan(x), self.table.nan, code)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The float32 number of each code."""
        return self.values[codes.to(torch.int32)]


def flushed(x: torch.Tensor) -> torch.Tensor:
    """Float32 with zeros, of the same sign, in place of subnormals: what XLA's arithmetic sees and gives on a CPU."""
    return torch.where(x.abs() < TINY, torch.copysign(torch.zeros_like(x), x), x)


def over(x: torch.Tensor, number: float) -> torch.Tensor:
    """`x / number`, rounded once; torch on CUDA would take a product with the reciprocal of a plain number."""
    return x / x.new_tensor(number)

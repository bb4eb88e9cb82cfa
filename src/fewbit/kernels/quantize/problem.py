"""Problems of quantize and dequantize, for backends."""

import dataclasses
from collections.abc import Hashable

from ..._tiles import Tile
from ...array.scheme import Scheme
from ..backend import AbstractProblem


@dataclasses.dataclass(frozen=True)
class Quantization(AbstractProblem):
    """A call of `quantize`.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype.
        scheme: the scheme, with its tiles on the axes of the array.
        key_impl: the implementation of the random key that rounds codes stochastically; None: to nearest.
        is_given: whether the scales are arguments.
        is_weighted: whether the errors of elements are weighted.
        shared_noise: the axes along which elements share a random number, non-negative and ascending.
    """

    operation = "quantize"
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme
    key_impl: Hashable | None = None
    is_given: bool = False
    is_weighted: bool = False
    shared_noise: tuple[int, ...] = ()

    @property
    def is_stochastic(self) -> bool:
        """Whether codes are rounded stochastically."""
        return self.key_impl is not None

    def __str__(self) -> str:
        how = " with stochastic rounding" if self.is_stochastic else ""
        return f"x={self.dtype}[{','.join(map(str, self.shape))}] to {self.scheme.name}{how}"


@dataclasses.dataclass(frozen=True)
class Decoding(AbstractProblem):
    """A call of `dequantize`.

    Attributes:
        shape: its shape.
        dtype: the name of the result's dtype.
        scheme: its scheme.
        tiles: its tiles, derived from the shape of its scales.
    """

    operation = "dequantize"
    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme
    tiles: tuple[Tile, ...]

    def __str__(self) -> str:
        return f"q={self.scheme.name}[{','.join(map(str, self.shape))}] to {self.dtype}"

"""What varies between quantizations: all that a backend needs to say whether it can compute one."""

import dataclasses

from ..._tiles import Tile
from ...array import Scheme


@dataclasses.dataclass(frozen=True)
class Quantization:
    """An array to be quantized.

    Attributes:
        shape: its shape.
        dtype: the name of its dtype.
        scheme: the scheme as it applies to its axes.
        is_stochastic: whether codes are rounded by chance.
        is_given: whether the scales come with the call.
        is_weighted: whether errors of elements count differently.
        shared_noise: the axes along which one random number rounds all elements, counted from the front and in order.
    """

    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme
    is_stochastic: bool = False
    is_given: bool = False
    is_weighted: bool = False
    shared_noise: tuple[int, ...] = ()

    def __str__(self) -> str:
        how = " rounding by chance" if self.is_stochastic else ""
        return f"x={self.dtype}[{','.join(map(str, self.shape))}] to {self.scheme.name}{how}"


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A quantized array to be decoded.

    Attributes:
        shape: its shape.
        dtype: the name of the result's dtype.
        scheme: its scheme.
        tiles: its tiles as its scales have them.
    """

    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme
    tiles: tuple[Tile, ...]

    def __str__(self) -> str:
        return f"q={self.scheme.name}[{','.join(map(str, self.shape))}] to {self.dtype}"

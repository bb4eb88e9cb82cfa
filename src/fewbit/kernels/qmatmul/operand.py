"""Operand: the shape, dtype and scheme of one operand of a product."""

import dataclasses
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp

from ...array.qarray import QArray
from ...array.scheme import Scheme

DimensionNumbers: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Operand:
    """The description of one operand.

    Attributes:
        shape: its logical shape.
        dtype: the name of its logical dtype.
        scheme: its Scheme, with the tiles of its scales; None for an array.
        stacked: axes along which the tensor scale varies, because arrays with one each were stacked.
    """

    shape: tuple[int, ...]
    dtype: str
    scheme: Scheme | None
    stacked: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: "QArray | jax.Array") -> Self:
        """Describes an operand."""
        shape, dtype = tuple(x.shape), jnp.dtype(x.dtype).name
        if not isinstance(x, QArray):
            return cls(shape, dtype, None)
        stacked = ()
        if x.tensor_scale is not None:
            stacked = tuple(a for a, n in enumerate(x.tensor_scale.shape) if n != 1)
        return cls(shape, dtype, _scheme_of(x), stacked)

    def __str__(self) -> str:
        kind = self.dtype
        if self.scheme is not None:
            kind = self.scheme.name
        return f"{kind}[{','.join(map(str, self.shape))}]"


def _scheme_of(q: QArray) -> Scheme:
    """The scheme of a QArray, with tile 1 along stacked axes."""
    named = q.scheme.tiles(q.ndim)
    tiles = tuple(1 if m == n != 1 else t for t, n, m in zip(named, q.shape, q.scale.shape, strict=True))
    return q.scheme if tiles == named else q.scheme.with_tiles(tiles, q.scheme.pack_axis)

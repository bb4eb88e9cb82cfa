"""Problem: a dot_general of quantized operands, described for backends."""

import dataclasses
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...array import QArray, Scheme

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


@dataclasses.dataclass(frozen=True)
class Problem:
    """A `lax.dot_general` of operands that may be quantized.

    Attributes:
        lhs: the left operand.
        rhs: the right operand.
        dimension_numbers: as in `lax.dot_general`: contracting axes of both sides, batch axes of both sides.
        precision: as in `lax.dot_general`.
        preferred_element_type: the result's dtype, or None for the operands' common one.
        accumulator: the dtype in which a product of codes is summed; None for int32 or float32, by format.
        out_sharding: as in `lax.dot_general`.
    """

    lhs: Operand
    rhs: Operand
    dimension_numbers: DimensionNumbers
    precision: Any = None
    preferred_element_type: DTypeLike | None = None
    accumulator: str | None = None
    out_sharding: NamedSharding | PartitionSpec | None = None

    def __str__(self) -> str:
        (left, right), (left_batch, right_batch) = self.dimension_numbers
        batch = f", batch {left_batch} and {right_batch}" if left_batch else ""
        return f"lhs={self.lhs} rhs={self.rhs} over axes {left} and {right}{batch}"

    @property
    def result_dtype(self) -> np.dtype:
        """The dtype of the product."""
        if self.preferred_element_type is not None:
            return np.dtype(self.preferred_element_type)
        return jnp.promote_types(self.lhs.dtype, self.rhs.dtype)


def refused_precision(precision: object) -> str | None:
    """Why exact products summed in float32 do not satisfy a `precision`, or None.

    They satisfy every `jax.lax.Precision`, and each `jax.lax.DotAlgorithm` or preset that sums in float32 or less.

    >>> refused_precision("high"), refused_precision(jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    (None, None)
    >>> refused_precision("F64_F64_F64")
    "precision is 'F64_F64_F64', which sums in float64; the kernel sums in float32"
    """
    sides: tuple[Any, ...] = (precision,)
    if isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm):
        sides = precision
    for side in sides:
        algorithm = side
        if isinstance(side, str):
            algorithm = getattr(jax.lax.DotAlgorithmPreset, side, side)
        if isinstance(algorithm, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
            summed = algorithm.accumulation_type
            if summed is not None and jnp.finfo(summed).bits > 32:
                return f"precision is {side!r}, which sums in {jnp.dtype(summed).name}; the kernel sums in float32"
            continue
        try:
            jax.lax.Precision(side)
        except ValueError:
            return f"precision is {side!r}, which jax.lax.dot_general does not accept"
    return None

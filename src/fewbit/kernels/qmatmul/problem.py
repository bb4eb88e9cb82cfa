"""Problem: a dot_general or ragged_dot, for backends."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...errors import QuantError
from ..backend import AbstractProblem
from .matrix_view import DimensionNumbers as DimensionNumbers
from .matrix_view import MatrixView, matrix_view
from .matrix_view import Operand as Operand


@dataclasses.dataclass(frozen=True)
class Problem(AbstractProblem):
    """A `lax.dot_general` or `lax.ragged_dot` of operands that may be quantized.

    Attributes:
        lhs: the left operand.
        rhs: the right operand.
        dimension_numbers: as in `lax.dot_general`: contracting axes of both sides, batch axes of both sides.
        precision: as in `lax.dot_general`.
        preferred_element_type: the result's dtype, or None for the operands' common one.
        accumulator: the dtype in which a product of codes is summed; None for int32 or float32, by format.
        out_sharding: as in `lax.dot_general`.
        is_ragged: whether the rows of `lhs`, `[M, K]`, are in groups, each multiplied by its own matrix of `rhs`, `[G, K, N]`
            or `[G, N, K]`, as in `lax.ragged_dot`; axis 0 of `rhs` is its only batch axis.
    """

    operation = "qmatmul"
    lhs: Operand
    rhs: Operand
    dimension_numbers: DimensionNumbers
    precision: Any = None
    preferred_element_type: DTypeLike | None = None
    accumulator: str | None = None
    out_sharding: NamedSharding | PartitionSpec | None = None
    is_ragged: bool = False

    @classmethod
    def ragged(
        cls,
        lhs: Operand,
        rhs: Operand,
        contracts_cols: bool = False,
        precision: object = None,
        preferred: DTypeLike | None = None,
        accumulator: str | None = None,
    ) -> "Problem":
        """A ragged_dot that contracts the last axis of the matrices, or the one before it."""
        return cls(lhs, rhs, (((1,), (1 + contracts_cols,)), ((), (0,))), precision, preferred, accumulator, is_ragged=True)

    def __str__(self) -> str:
        (left, right), (left_batch, right_batch) = self.dimension_numbers
        if self.is_ragged:
            return f"rows={self.lhs} matrices={self.rhs} over axes {left} and {right}"
        batch = f", batch {left_batch} and {right_batch}" if left_batch else ""
        return f"lhs={self.lhs} rhs={self.rhs} over axes {left} and {right}{batch}"

    @property
    def result_dtype(self) -> np.dtype:
        """The dtype of the product."""
        if self.preferred_element_type is not None:
            return np.dtype(self.preferred_element_type)
        return product_dtype(self.lhs.dtype, self.rhs.dtype)

    @property
    def is_paired(self) -> bool:
        """Whether both operands are quantized."""
        return self.lhs.scheme is not None and self.rhs.scheme is not None

    @functools.cached_property
    def weight(self) -> tuple[int, MatrixView]:
        """The quantized operand that a kernel reads in place.

        Returns its number, 1 for the right one, and its view as matrices. Of two quantized operands it is the right one,
        unless only the left one can be viewed so. Of a ragged product it is the right one.

        Raises:
            QuantError: if no quantized operand can be viewed as a stack of matrices.
        """
        refusals = []
        for at in (1,) if self.is_ragged else (1, 0):
            operand = (self.lhs, self.rhs)[at]
            if operand.scheme is None:
                continue
            try:
                return at, matrix_view(operand, self.dimension_numbers[0][at], self.dimension_numbers[1][at])
            except QuantError as refusal:
                refusals.append(f"{operand} cannot be viewed as a stack of matrices: {refusal}")
        raise QuantError("; ".join(refusals))

    @property
    def activation(self) -> Operand:
        """The operand that is not `weight`."""
        return (self.lhs, self.rhs)[1 - self.weight[0]]


@functools.cache
def product_dtype(lhs: DTypeLike, rhs: DTypeLike) -> np.dtype:
    """The dtype of `lax.dot_general` of two dtypes, which JAX's implicit promotion may lack.

    >>> product_dtype("float8_e4m3fn", "bfloat16")
    dtype(bfloat16)
    """
    vectors = (jax.ShapeDtypeStruct((1,), dtype) for dtype in (lhs, rhs))
    return jax.eval_shape(lambda x, y: jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))), *vectors).dtype


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

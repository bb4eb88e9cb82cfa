"""AbstractKernel: a matmul backend on packed weights."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from ...array.qarray import QArray
from ...errors import QuantError, UnsupportedError
from ..backend import AbstractBackend
from .matrix_view import MatrixView
from .problem import Problem


@dataclasses.dataclass(frozen=True)
class AbstractKernel(AbstractBackend[Problem]):
    """A backend of one platform, for weights `[B, R, C]`. K is the contracted one of R and C, and N the other.

    Sums are made in float32, for two quantized operands in int32 or float32, and rounded once to the result's dtype.
    """

    platform: ClassVar[str]
    groups_pairs: ClassVar[bool] = False
    """Whether `grouped_pair` is there: a ragged_dot of two quantized operands."""

    def unsupported(self, problem: Problem) -> str | None:
        if problem.is_paired and problem.is_ragged and not self.groups_pairs:
            return "both operands of a ragged_dot are quantized; it supports one"
        if problem.is_paired:
            return self.refused_pair(problem)
        if problem.accumulator is not None:
            return f"it sums in float32, but accumulator={problem.accumulator!r} was requested"
        if problem.out_sharding is not None:
            return "out_sharding is supported by XLA's own products only"
        try:
            return self.refused(problem, problem.weight[1])
        except QuantError as refusal:
            return str(refusal)

    @abc.abstractmethod
    def refused(self, problem: Problem, weight: MatrixView) -> str | None:
        """Why this kernel does not multiply a float array and a weight. None when it does."""

    def refused_pair(self, problem: Problem) -> str | None:
        """Why this kernel does not support two quantized operands; None when it does."""
        return "both operands are quantized; it supports one"

    @abc.abstractmethod
    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, precision: object) -> jax.Array:
        """The batched product `y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`. It is `[B, M, N]` from `x`, `[B, M, K]`."""

    def picked(
        self, x: jax.Array, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        """`stacked` with the matrix at `index` of `q`, for an `x` whose B is 1."""
        settings = {"contracts_cols": contracts_cols, "dtype": dtype, "precision": precision}
        return self.stacked(x, element(q, index, keepdims=True), **settings)

    @abc.abstractmethod
    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        """The grouped product `y[i] = x[i] @ w[g]` or `x[i] @ w[g].T`.

        Row i is one of group g. It is `[M, N]` from `x`, `[M, K]`. `sizes`, int32 `[B]`, are the rows of each group; rows
        beyond their sum give zeros.
        """

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        """`stacked` for two quantized stacks, the first with one code per byte."""
        raise UnsupportedError("a product of two quantized operands", {self.name: "it supports one"})

    def grouped_pair(self, x: QArray, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        """`grouped` for two quantized operands. It is `[1, M, N]` from `x`, `[1, M, K]` with one code per byte."""
        raise UnsupportedError("a ragged_dot of two quantized operands", {self.name: "it supports one"})

    def picked_pair(self, x: QArray, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        """`paired` with the matrix at `index` of `q`, for an `x` whose B is 1."""
        return self.paired(x, element(q, index, keepdims=True), contracts_cols=contracts_cols, dtype=dtype)

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        from .call import multiplied  # it needs this class

        return multiplied(problem, operands, (self,), is_named=True)


def element(q: QArray, index: jax.Array | int, *, keepdims: bool = False) -> QArray:
    """Copies one element of a stack along the first axis of every leaf."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jax.numpy.int32(index), keepdims=keepdims), q)

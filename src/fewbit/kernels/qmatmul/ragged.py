"""ragged_dot with one quantized matrix per group: problem, backends and JAX primitive.

This is the matmul of a mixture of experts: the rows are sorted by expert, and each group of rows uses its expert's matrix.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.lax import RaggedDotDimensionNumbers
from jax.typing import DTypeLike

from ..._registry import Registry
from ...array import QArray
from ...array.quantize import dequantize
from ...errors import QuantError
from ..backend import AbstractBackend, select
from .matrix_view import Stack, contracted_axis, stack_of
from .primitive import kernel_primitive, mapped_first
from .problem import Operand


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """A `lax.ragged_dot` with quantized matrices.

    Attributes:
        lhs: the rows, `[M, K]`.
        rhs: the matrices, `[G, K, N]`, or `[G, N, K]`.
        contracts_cols: whether the matrices' last axis is contracted.
        precision: as in `lax.ragged_dot`.
        preferred_element_type: the result's dtype, or None for the operands' common one.
    """

    lhs: Operand
    rhs: Operand
    contracts_cols: bool = False
    precision: Any = None
    preferred_element_type: DTypeLike | None = None

    def __str__(self) -> str:
        return f"rows={self.lhs} matrices={self.rhs} over axes (1,) and ({contracted_axis(self.contracts_cols)},)"

    @property
    def result_dtype(self) -> np.dtype:
        """The dtype of the product."""
        if self.preferred_element_type is not None:
            return np.dtype(self.preferred_element_type)
        return jnp.promote_types(self.lhs.dtype, self.rhs.dtype)

    @property
    def stack(self) -> Stack:
        """The matrices, viewed as `[B, R, C]`.

        Raises:
            QuantError: if they cannot be viewed as a stack of matrices.
        """
        return stack_of(self.rhs, (contracted_axis(self.contracts_cols),), (0,))


RAGGED: Registry[AbstractBackend[RaggedProblem]] = Registry("ragged_qmatmul")
"""The backends of ragged_dot; the last one that supports a problem is used, the reference if no other does."""


@dataclasses.dataclass(frozen=True)
class RaggedReference(AbstractBackend[RaggedProblem]):
    """`lax.ragged_dot_general` with dequantized matrices, on any device."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: RaggedProblem) -> str | None:
        return None

    def run(self, problem: RaggedProblem, *operands: Any) -> jax.Array:
        return _decoded_product(problem, *operands)


RAGGED.add("reference", RaggedReference())


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _decoded_product(problem: RaggedProblem, x: jax.Array, q: QArray, sizes: jax.Array) -> jax.Array:
    """The product with dequantized matrices, which the backward pass dequantizes again."""
    contracted = ((1,), (contracted_axis(problem.contracts_cols),)), ((), ())
    numbers = RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
    settings = {"precision": problem.precision, "preferred_element_type": problem.preferred_element_type}

    @jax.checkpoint
    def product(x: jax.Array, q: QArray, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot_general(x, dequantize(q), sizes, numbers, **settings)

    return product(x, q, sizes)


@dataclasses.dataclass(frozen=True)
class AbstractRaggedKernel(AbstractBackend[RaggedProblem]):
    """A ragged_dot backend of one platform."""

    platform: ClassVar[str]

    def unsupported(self, problem: RaggedProblem) -> str | None:
        try:
            return self.refused(problem, problem.stack)
        except QuantError as refusal:
            return f"{problem.rhs} cannot be viewed as a stack of matrices: {refusal}"

    @abc.abstractmethod
    def refused(self, problem: RaggedProblem, stack: Stack) -> str | None:
        """Why this kernel does not support a stack; None when it does."""

    @abc.abstractmethod
    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        """`y[i] = x[i] @ w[g]` or `x[i] @ w[g].T` for each row i of group g.

        Args:
            x: `[M, K]`.
            q: `[G, R, C]`.
            sizes: rows per group, `[G]`, int32; rows beyond their sum give zeros.
            contracts_cols: whether K is C, or R.
            dtype: that of the result.
            precision: as in `lax.ragged_dot`.

        Returns:
            `[M, N]`, N being the other one of R and C. Sums are made in float32.
        """

    def run(self, problem: RaggedProblem, *operands: Any) -> jax.Array:
        return _by_kernels(problem, operands, (self,), is_named=True)


def ragged_product(
    problem: RaggedProblem, x: jax.Array, q: QArray, sizes: jax.Array, backend: str | None = None
) -> jax.Array:
    """Computes ragged_dot with the backend selected for the problem and the platform.

    Args:
        problem: the product.
        x: the rows.
        q: the matrices.
        sizes: rows per group.
        backend: a backend's name, which is never replaced by another; None: chosen automatically.

    Returns:
        The product.

    Raises:
        UnsupportedError: if the named backend does not support the problem, or the platform that the program is compiled for.
    """
    chosen = select(RAGGED, problem, backend).backend
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):
        return _empty_product(problem)
    if backend is None and (kernels := _kernels_of(problem)):
        return _by_kernels(problem, (x, q, sizes), kernels, is_named=False)
    return chosen.run(problem, x, q, sizes)


def _empty_product(problem: RaggedProblem) -> jax.Array:
    """Zeros for empty operands; `lax.ragged_dot` needs at least one group."""
    columns = problem.rhs.shape[3 - contracted_axis(problem.contracts_cols)]
    return jnp.zeros((problem.lhs.shape[0], columns), problem.result_dtype)


def _kernels_of(problem: RaggedProblem) -> tuple[AbstractRaggedKernel, ...]:
    """The kernels used when no backend is named: per platform, the last one registered."""
    kernels = [backend for backend in RAGGED if isinstance(backend, AbstractRaggedKernel)]
    usable = [k for k in kernels if k.unsupported(problem) is None and k.not_chosen(problem) is None]
    return tuple({kernel.platform: kernel for kernel in usable}.values())


def _by_kernels(
    problem: RaggedProblem, operands: Sequence[Any], kernels: tuple[AbstractRaggedKernel, ...], *, is_named: bool
) -> jax.Array:
    x, q, sizes = operands
    leaves, form = jax.tree.flatten((x, problem.stack.of(q), sizes.astype(jnp.int32)))
    return primitive.bind(
        *leaves,
        form=form,
        contracts_cols=problem.contracts_cols,
        dtype=np.dtype(problem.result_dtype),
        precision=problem.precision,
        kernels=kernels,
        is_named=is_named,
    )


# --- the primitive ---


def _by_reference(
    x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
) -> jax.Array:
    return RaggedReference().run(RaggedProblem(Operand.of(x), Operand.of(q), contracts_cols, precision, dtype), x, q, sizes)


def _by_kernel(kernel: AbstractRaggedKernel, *operands: Any, **settings: Any) -> jax.Array:
    return kernel.grouped(*operands, **settings)


def _shape(x: ShapedArray, q: QArray, _: object, *, contracts_cols: bool) -> tuple[int, ...]:
    return x.shape[0], q.shape[3 - contracted_axis(contracts_cols)]


def _mapped(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, form: Any, **settings: object
) -> tuple[jax.Array, int]:
    """Batching: a mapped x adds rows to groups; other mapped operands loop."""
    x_axis = axes[0]
    if x_axis is not None and all(axis is None for axis in axes[1:]):
        x, q, sizes = jax.tree.unflatten(form, operands)
        x, count = jnp.moveaxis(x, x_axis, 1), x.shape[x_axis]
        leaves = jax.tree.leaves((x.reshape(-1, x.shape[2]), q, sizes * count))  # x: [M count, K]
        y = primitive.bind(*leaves, form=form, **settings)
        return y.reshape(-1, count, y.shape[1]), 1
    moved = [i for i, axis in enumerate(axes) if axis is not None]

    def one(parts: list[jax.Array]) -> jax.Array:
        own = list(operands)
        for i, part in zip(moved, parts, strict=True):
            own[i] = part
        return primitive.bind(*own, form=form, **settings)

    return jax.lax.map(one, [mapped_first(operands[i], axes[i]) for i in moved]), 0


primitive = kernel_primitive(
    "fewbit_ragged_qmatmul",
    kind=RAGGED.kind,
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    shape=_shape,
    mapped=_mapped,
    is_linear=True,
)

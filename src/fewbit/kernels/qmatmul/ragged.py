"""The product of rows in groups with a quantized matrix for each group: its problem, its backends, and one primitive of JAX.

It is what a mixture of experts computes: the rows of all experts, one group after the other, and the experts' matrices.
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers
from jax.typing import DTypeLike

from ..._registry import Registry
from ...array import QArray
from ...array.quantize import dequantize
from ...errors import QuantError
from ..select import AbstractBackend, select
from .primitive import kernel_primitive
from .problem import Operand
from .stack import Stack, stack_of


@dataclasses.dataclass(frozen=True)
class RaggedProblem:
    """Rows in groups, each multiplied with the matrix of its group.

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
        return f"rows={self.lhs} matrices={self.rhs} over axes (1,) and ({2 if self.contracts_cols else 1},)"

    @property
    def result_dtype(self) -> np.dtype:
        """The dtype of the product."""
        if self.preferred_element_type is not None:
            return np.dtype(self.preferred_element_type)
        return jnp.promote_types(self.lhs.dtype, self.rhs.dtype)

    @property
    def stack(self) -> Stack:
        """The matrices as native kernels take them.

        Raises:
            QuantError: where they are no stack of matrices.
        """
        return stack_of(self.rhs, (2 if self.contracts_cols else 1,), (0,))


RAGGED: Registry[AbstractBackend[RaggedProblem]] = Registry("ragged_qmatmul")
"""The backends of the product in groups; the last that can compute a problem is taken, the reference when no other can."""


@dataclasses.dataclass(frozen=True)
class RaggedReference(AbstractBackend[RaggedProblem]):
    """JAX's own product of the decoded matrices, on any device, for any problem."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: RaggedProblem) -> str | None:
        return None

    def run(self, problem: RaggedProblem, *operands: Any) -> jax.Array:
        return _decoded_product(problem, *operands)


RAGGED.add("reference", RaggedReference())


@functools.partial(jax.jit, static_argnames="problem", inline=True)
def _decoded_product(problem: RaggedProblem, x: Any, q: QArray, sizes: Any) -> jax.Array:
    """JAX's product of the decoded matrices; what is decoded is not kept for the gradient, but decoded again there."""
    contracted = ((1,), (2 if problem.contracts_cols else 1,)), ((), ())
    numbers = RaggedDotDimensionNumbers(contracted, lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
    how = {"precision": problem.precision, "preferred_element_type": problem.preferred_element_type}

    @jax.checkpoint
    def product(x: Any, q: QArray, sizes: Any) -> jax.Array:
        return jax.lax.ragged_dot_general(x, dequantize(q), sizes, numbers, **how)

    return product(x, q, sizes)


@dataclasses.dataclass(frozen=True)
class AbstractRaggedKernel(AbstractBackend[RaggedProblem]):
    """A backend of one platform, which multiplies rows in groups with quantized matrices."""

    platform: ClassVar[str]

    def unsupported(self, problem: RaggedProblem) -> str | None:
        try:
            return self.refused(problem, problem.stack)
        except QuantError as refusal:
            return f"{problem.rhs} is no stack of matrices: {refusal}"

    @abc.abstractmethod
    def refused(self, problem: RaggedProblem, stack: Stack) -> str | None:
        """Why this kernel cannot multiply with a stack; None when it can."""

    @abc.abstractmethod
    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: Any, precision: Any
    ) -> jax.Array:
        """`y[i] = x[i] @ w[g]` or `x[i] @ w[g].T` for each row i of group g, for the matrices `w` that codes stand for.

        Args:
            x: `[M, K]`.
            q: `[G, R, C]`.
            sizes: how many rows each group has, `[G]`, int32; rows beyond their sum give zeros.
            contracts_cols: whether K is C, or R.
            dtype: that of the result.
            precision: as in `lax.ragged_dot`.

        Returns:
            `[M, N]`, N being the other one of R and C. Sums are made in float32.
        """

    def run(self, problem: RaggedProblem, *operands: Any) -> jax.Array:
        return _by_kernels(problem, operands, (self,), is_named=True)


def ragged_product(problem: RaggedProblem, x: Any, q: QArray, sizes: Any, backend: str | None = None) -> jax.Array:
    """The product by the backend that the problem, and the platform it is compiled for, select.

    Args:
        problem: what is to be computed.
        x: the rows.
        q: the matrices.
        sizes: how many rows each group has.
        backend: a name, when the caller insists on one; it is never replaced by another.

    Returns:
        The product.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or not on the platform it is compiled for.
    """
    chosen = select(RAGGED, problem, backend).backend
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):
        return _without_elements(problem)
    kernels = _kernels_of(problem) if backend is None else ()
    operands = x, q, sizes
    return _by_kernels(problem, operands, kernels, is_named=False) if kernels else chosen.run(problem, *operands)


def _without_elements(problem: RaggedProblem) -> jax.Array:
    """The product where an operand is empty: zeros, as JAX's product has them, which cannot do without a group."""
    columns = problem.rhs.shape[1 if problem.contracts_cols else 2]
    return jnp.zeros((problem.lhs.shape[0], columns), problem.result_dtype)


def _kernels_of(problem: RaggedProblem) -> tuple[AbstractRaggedKernel, ...]:
    """The kernels that compute a problem where nobody names one: the one registered last for each platform."""
    kernels = [backend for backend in RAGGED if isinstance(backend, AbstractRaggedKernel)]
    serving = [k for k in kernels if k.unsupported(problem) is None and k.passed_over(problem) is None]
    return tuple({kernel.platform: kernel for kernel in serving}.values())


def _by_kernels(
    problem: RaggedProblem, operands: Any, kernels: tuple[AbstractRaggedKernel, ...], *, is_named: bool
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


def _by_reference(x: Any, q: QArray, sizes: Any, *, contracts_cols: bool, dtype: Any, precision: Any) -> jax.Array:
    return RaggedReference().run(RaggedProblem(Operand.of(x), Operand.of(q), contracts_cols, precision, dtype), x, q, sizes)


def _by_kernel(kernel: AbstractRaggedKernel, *operands: Any, **settings: Any) -> jax.Array:
    return kernel.grouped(*operands, **settings)


def _shape(x: Any, q: QArray, _: Any, *, contracts_cols: bool) -> tuple[int, ...]:
    return x.shape[0], q.shape[1] if contracts_cols else q.shape[2]


def _mapped(operands: Any, axes: Any, *, form: Any, **settings: Any) -> tuple[jax.Array, int]:
    """A mapped x has more rows in each group; products of mapped groups or matrices are made one after the other."""
    x_axis, *met_axes = axes
    if all(axis is None for axis in met_axes):
        x, q, sizes = jax.tree.unflatten(form, operands)
        x, count = jnp.moveaxis(x, x_axis, 1), x.shape[x_axis]
        leaves = jax.tree.leaves((x.reshape(-1, x.shape[2]), q, sizes * count))
        y = primitive.bind(*leaves, form=form, **settings)
        return y.reshape(-1, count, y.shape[1]), 1
    moved = [i for i, axis in enumerate(axes) if axis is not None]

    def one(turn: list[jax.Array]) -> jax.Array:
        own = list(operands)
        for i, part in zip(moved, turn, strict=True):
            own[i] = part
        return primitive.bind(*own, form=form, **settings)

    return jax.lax.map(one, [jnp.moveaxis(operands[i], axes[i], 0) for i in moved]), 0


primitive = kernel_primitive(
    "fewbit_ragged_qmatmul",
    kind=RAGGED.kind,
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    shape=_shape,
    mapped=_mapped,
    is_linear=True,
)

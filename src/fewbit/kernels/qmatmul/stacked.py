"""The product of a stack of float matrices and a stack of quantized ones: one primitive of JAX, a kernel on each platform.

`vmap` makes rows of x, or a longer stack, of the axis it maps.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray
from ...errors import QuantError, UnsupportedError
from ..select import AbstractBackend, select
from .paired import paired_product
from .primitive import kernel_primitive
from .problem import Operand, Problem
from .reference import BACKENDS, Reference
from .stack import Stack, stack_of


@dataclasses.dataclass(frozen=True)
class AbstractStackKernel(AbstractBackend[Problem]):
    """A backend of one platform, which multiplies an array with a quantized stack of matrices."""

    platform: ClassVar[str]

    def unsupported(self, problem: Problem) -> str | None:
        if problem.lhs.scheme is not None and problem.rhs.scheme is not None:
            return self.refused_pair(problem)
        if problem.accumulator is not None:
            return f"it sums in float32, and {problem.accumulator} is asked for"
        if problem.out_sharding is not None:
            return "out_sharding is for XLA's own products"
        try:
            stack = _stack(problem)
        except QuantError as refusal:
            return f"{_sides(problem)[1]} is no stack of matrices: {refusal}"
        return self.refused(problem, _sides(problem)[0], stack)

    @abc.abstractmethod
    def refused(self, problem: Problem, x: Operand, stack: Stack) -> str | None:
        """Why this kernel cannot multiply an operand with a stack; None when it can."""

    def refused_pair(self, problem: Problem) -> str | None:
        """Why this kernel cannot multiply two quantized operands; None when it can."""
        return "both operands are quantized; it takes one"

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: Any) -> jax.Array:
        """The product of two quantized stacks, of which the first has whole codes in bytes, as `stacked` has it."""
        raise UnsupportedError("a product of two quantized operands", {self.name: "it takes one"})

    @abc.abstractmethod
    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: Any, precision: Any) -> jax.Array:
        """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`, for the matrices `w` that a stack of codes stands for.

        Args:
            x: `[B, M, K]`.
            q: `[B, R, C]`.
            contracts_cols: whether K is C, or R.
            dtype: that of the result.
            precision: as in `lax.dot_general`.

        Returns:
            `[B, M, N]`, N being the other one of R and C. Sums are made in float32.
        """

    def picked(
        self, x: jax.Array, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: Any, precision: Any
    ) -> jax.Array:
        """`stacked` with one matrix of `q`, the index-th, for an `x` whose B is 1."""
        settings = {"contracts_cols": contracts_cols, "dtype": dtype, "precision": precision}
        return self.stacked(x, element(q, index, keepdims=True), **settings)

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        return _by_kernels(problem, operands, (self,), is_named=True)


def product(problem: Problem, lhs: Any, rhs: Any, backend: str | None = None) -> jax.Array:
    """The product by the backend that the problem, and the platform it is compiled for, select.

    Args:
        problem: what is to be computed.
        lhs: the left operand.
        rhs: the right operand.
        backend: a name, when the caller insists on one; it is never replaced by another.

    Returns:
        The product.

    Raises:
        UnsupportedError: when the named backend cannot compute the problem, or not on the platform it is compiled for.
    """
    chosen = select(BACKENDS, problem, backend).backend
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):
        return BACKENDS["reference"].run(
            problem, lhs, rhs
        )  # sums of nothing, or no sums: there is nothing for a kernel to do
    kernels = kernels_of(problem) if backend is None and isinstance(chosen, Reference | AbstractStackKernel) else ()
    return _by_kernels(problem, (lhs, rhs), kernels, is_named=False) if kernels else chosen.run(problem, lhs, rhs)


def kernels_of(problem: Problem) -> tuple[AbstractStackKernel, ...]:
    """The kernels that compute a problem where nobody names one: the one registered last for each platform."""
    serving = [
        backend
        for backend in BACKENDS
        if isinstance(backend, AbstractStackKernel)
        and backend.unsupported(problem) is None
        and backend.passed_over(problem) is None
    ]
    return tuple({backend.platform: backend for backend in serving}.values())


def element(q: QArray, index: jax.Array | int, *, keepdims: bool = False) -> QArray:
    """One element of a stack along the first axis, of which every leaf has its part: its bytes are copied."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.int32(index), keepdims=keepdims), q)


def picked_product(
    x: jax.Array, q: QArray, index: jax.Array, numbers: Any, precision: Any, preferred: Any
) -> jax.Array | None:
    """The product with one element of a stack by a kernel that reads it where it lies; None where no kernel does.

    Args:
        x: the left operand.
        q: arrays stacked along the first axis, each with leaves of its own.
        index: which of them is the right operand.
        numbers: the dimension numbers of the product with one of them; without batch axes.
        precision: as in `lax.dot_general`.
        preferred: as in `lax.dot_general`.
    """
    (left, right), batch = numbers
    one = Operand(tuple(q.shape[1:]), jnp.dtype(q.dtype).name, q.scheme)
    problem = Problem(Operand.of(x), one, numbers, precision, preferred)
    many = ((tuple(a + 1 for a in left), tuple(a + 1 for a in right)), ((0,), (0,)))
    stack = Problem(Operand((1, *x.shape), problem.lhs.dtype, None), Operand.of(q), many, precision, problem.result_dtype)
    kernels = () if any(batch) else kernels_of(problem)
    if not kernels or any(kernel.unsupported(stack) for kernel in kernels):
        return None
    return _by_kernels(stack, (x[None], q), kernels, is_named=False, picked=index)[0]


def _by_kernels(
    problem: Problem,
    operands: Any,
    kernels: tuple[AbstractStackKernel, ...],
    *,
    is_named: bool,
    picked: jax.Array | None = None,
) -> jax.Array:
    """The product as one of stacks; or, where a matrix of the right one is picked, with that one alone."""
    if all(isinstance(operand, QArray) for operand in operands):
        return paired_product(problem, operands[0], operands[1], kernels, is_named=is_named)
    q_side = 0 if isinstance(operands[0], QArray) else 1
    x, q = operands[1 - q_side], operands[q_side]
    stack, own = _stack(problem), problem.dimension_numbers[0][q_side]
    met = problem.dimension_numbers[0][1 - q_side]
    contracted = tuple(met[own.index(axis)] for axis in stack.contracted)
    batch = problem.dimension_numbers[1][1 - q_side]
    free = tuple(a for a in range(x.ndim) if a not in contracted and a not in batch)
    lengths = [[x.shape[a] for a in group] for group in (batch, free, contracted)]
    x3 = x.transpose(*batch, *free, *contracted).reshape([int(np.prod(group)) for group in lengths])
    leaves, form = jax.tree.flatten((x3, stack.of(q), picked))
    y = primitive.bind(
        *leaves,
        form=form,
        contracts_cols=stack.contracts_cols,
        dtype=np.dtype(problem.result_dtype),
        precision=problem.precision,
        kernels=kernels,
        is_named=is_named,
    )
    own_free = [q.shape[a] for a in (stack.rows if stack.contracts_cols else stack.cols)]
    if q_side == 0:
        return jnp.swapaxes(y, 1, 2).reshape(*lengths[0], *own_free, *lengths[1])
    return y.reshape(*lengths[0], *lengths[1], *own_free)


def _sides(problem: Problem) -> tuple[Operand, Operand]:
    """The float operand, and the quantized one."""
    return (problem.lhs, problem.rhs) if problem.lhs.scheme is None else (problem.rhs, problem.lhs)


def _stack(problem: Problem) -> Stack:
    """The quantized operand as a stack."""
    side = 0 if problem.lhs.scheme is not None else 1
    q = (problem.lhs, problem.rhs)[side]
    return stack_of(q, problem.dimension_numbers[0][side], problem.dimension_numbers[1][side])


# --- the primitive ---


def _by_reference(
    x: jax.Array, q: QArray, picked: jax.Array | None, *, contracts_cols: bool, dtype: Any, precision: Any
) -> jax.Array:
    q = q if picked is None else element(q, picked, keepdims=True)
    numbers = (((2,), (2 if contracts_cols else 1,)), ((0,), (0,)))
    return Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, precision, dtype), x, q)


def _by_kernel(kernel: AbstractStackKernel, x: jax.Array, q: QArray, picked: jax.Array | None, **settings: Any) -> jax.Array:
    return kernel.stacked(x, q, **settings) if picked is None else kernel.picked(x, q, picked, **settings)


def _shape(x: Any, q: QArray, picked: Any, *, contracts_cols: bool) -> tuple[int, ...]:
    del picked
    return x.shape[0], x.shape[1], q.shape[1] if contracts_cols else q.shape[2]


def _mapped(operands: Any, axes: Any, form: Any, **settings: Any) -> tuple[jax.Array, int]:
    """A mapped x has more rows; a mapped weight makes the stack longer."""
    x, *leaves = operands
    x_axis, *leaf_axes = axes
    if any(axis is not None for axis in leaf_axes) and jax.tree.unflatten(form, operands)[2] is not None:
        own = jax.tree.structure(jax.tree.unflatten(form, operands)[1:])
        alone = jax.vmap(lambda *those: element(*jax.tree.unflatten(own, those), keepdims=True), in_axes=tuple(leaf_axes))
        operands, form = jax.tree.flatten((x, alone(*leaves), None))
        x, *leaves = operands
        leaf_axes = [0] * len(leaves)
        axes = [x_axis, *leaf_axes]
    settings["form"] = form
    count = next(a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None)
    if all(axis is None for axis in leaf_axes):
        x = jnp.moveaxis(x, x_axis, 1)
        rows = x.shape[2]
        y = primitive.bind(x.reshape(x.shape[0], count * rows, x.shape[3]), *leaves, **settings)
        return y.reshape(y.shape[0], count, rows, y.shape[2]), 1
    batch = (x if x_axis is None else jnp.moveaxis(x, x_axis, 0)[0]).shape[0]

    def longer(a: jax.Array, axis: int | None) -> jax.Array:
        a = a[None] if axis is None else jnp.moveaxis(a, axis, 0)
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    y = primitive.bind(*map(longer, operands, axes), **settings)
    return y.reshape(count, batch, *y.shape[1:]), 0


primitive = kernel_primitive(
    "fewbit_qmatmul",
    kind=BACKENDS.kind,
    by_kernel=_by_kernel,
    by_reference=_by_reference,
    shape=_shape,
    mapped=_mapped,
    is_linear=True,
)

"""The JAX primitive that multiplies float matrices by a stack of quantized ones.

Batching: a mapped x adds rows (M); a mapped weight extends the batch (B).
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import DTypeLike

from ...array import QArray
from ...errors import QuantError, UnsupportedError
from ..backend import AbstractBackend, select
from .matrix_view import Stack, contracted_axis, folded_axes, stack_of
from .paired import paired_product
from .primitive import kernel_primitive, mapped_first
from .problem import DimensionNumbers, Operand, Problem
from .reference import BACKENDS, Reference


@dataclasses.dataclass(frozen=True)
class AbstractStackKernel(AbstractBackend[Problem]):
    """A dot_general backend of one platform, for one quantized operand and optionally two."""

    platform: ClassVar[str]

    def unsupported(self, problem: Problem) -> str | None:
        if problem.lhs.scheme is not None and problem.rhs.scheme is not None:
            return self.refused_pair(problem)
        if problem.accumulator is not None:
            return f"it sums in float32, but accumulator={problem.accumulator!r} was requested"
        if problem.out_sharding is not None:
            return "out_sharding is supported by XLA's own products only"
        try:
            stack = _stack(problem)
        except QuantError as refusal:
            return f"{_sides(problem)[1]} cannot be viewed as a stack of matrices: {refusal}"
        return self.refused(problem, _sides(problem)[0], stack)

    @abc.abstractmethod
    def refused(self, problem: Problem, x: Operand, stack: Stack) -> str | None:
        """Why this kernel does not support a product, or None."""

    def refused_pair(self, problem: Problem) -> str | None:
        """Why this kernel does not support two quantized operands; None when it does."""
        return "both operands are quantized; it supports one"

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        """`stacked` for two quantized stacks, the first with one code per byte."""
        raise UnsupportedError("a product of two quantized operands", {self.name: "it supports one"})

    @abc.abstractmethod
    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, precision: object) -> jax.Array:
        """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T` for a quantized stack `w`.

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
        self, x: jax.Array, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        """`stacked` with the matrix at `index` of `q`, for an `x` whose B is 1."""
        settings = {"contracts_cols": contracts_cols, "dtype": dtype, "precision": precision}
        return self.stacked(x, element(q, index, keepdims=True), **settings)

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        return _by_kernels(problem, operands, (self,), is_named=True)


def product(problem: Problem, lhs: QArray | jax.Array, rhs: QArray | jax.Array, backend: str | None = None) -> jax.Array:
    """Computes a product with the backend selected for the problem and the platform.

    Args:
        problem: the product.
        lhs: the left operand.
        rhs: the right operand.
        backend: a backend's name, which is never replaced by another; None: chosen automatically.

    Returns:
        The product.

    Raises:
        UnsupportedError: if the named backend does not support the problem, or the platform that the program is compiled for.
    """
    chosen = select(BACKENDS, problem, backend).backend
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):
        return BACKENDS["reference"].run(problem, lhs, rhs)  # nothing to sum, or no elements: no kernel is needed
    if backend is None and isinstance(chosen, Reference | AbstractStackKernel) and (kernels := kernels_of(problem)):
        return _by_kernels(problem, (lhs, rhs), kernels, is_named=False)
    return chosen.run(problem, lhs, rhs)


def kernels_of(problem: Problem) -> tuple[AbstractStackKernel, ...]:
    """The kernels used when no backend is named: per platform, the last one registered."""
    kernels = [backend for backend in BACKENDS if isinstance(backend, AbstractStackKernel)]
    usable = [k for k in kernels if k.unsupported(problem) is None and k.not_chosen(problem) is None]
    return tuple({kernel.platform: kernel for kernel in usable}.values())


def element(q: QArray, index: jax.Array | int, *, keepdims: bool = False) -> QArray:
    """Copies one element of a stack along the first axis of every leaf."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.int32(index), keepdims=keepdims), q)


def picked_product(
    x: jax.Array,
    q: QArray,
    index: jax.Array,
    numbers: DimensionNumbers,
    precision: object,
    preferred: DTypeLike | None,
) -> jax.Array | None:
    """Multiplies with one element of a stack in place; None if unsupported.

    Args:
        x: the left operand.
        q: arrays stacked along the first axis of every leaf.
        index: the element that is the right operand.
        numbers: the dimension numbers of the product with one element; without batch axes.
        precision: as in `lax.dot_general`.
        preferred: as in `lax.dot_general`.
    """
    (left, right), batch = numbers
    if any(batch):
        return None
    one = Operand(tuple(q.shape[1:]), jnp.dtype(q.dtype).name, q.scheme)
    problem = Problem(Operand.of(x), one, numbers, precision, preferred)
    many = ((tuple(a + 1 for a in left), tuple(a + 1 for a in right)), ((0,), (0,)))
    stack = Problem(Operand((1, *x.shape), problem.lhs.dtype, None), Operand.of(q), many, precision, problem.result_dtype)
    kernels = kernels_of(problem)
    if not kernels or any(kernel.unsupported(stack) for kernel in kernels):
        return None
    return _by_kernels(stack, (x[None], q), kernels, is_named=False, picked=index)[0]


def _by_kernels(
    problem: Problem,
    operands: Sequence[Any],
    kernels: tuple[AbstractStackKernel, ...],
    *,
    is_named: bool,
    picked: jax.Array | None = None,
) -> jax.Array:
    """Binds the primitive, of stacks or of one picked matrix."""
    if all(isinstance(operand, QArray) for operand in operands):
        return paired_product(problem, operands[0], operands[1], kernels, is_named=is_named)
    q_side = int(not isinstance(operands[0], QArray))
    x, q = operands[1 - q_side], operands[q_side]
    stack = _stack(problem)
    groups = stack.groups_of(problem.dimension_numbers, 1 - q_side, x.ndim)
    x3 = folded_axes(x, groups)  # [B, M, K]
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
    return stack.unfolded(y, x, q, groups, 1 - q_side)


def _sides(problem: Problem) -> tuple[Operand, Operand]:
    """The float operand, and the quantized one."""
    if problem.lhs.scheme is None:
        return problem.lhs, problem.rhs
    return problem.rhs, problem.lhs


def _stack(problem: Problem) -> Stack:
    """The quantized operand as a stack."""
    side = int(problem.lhs.scheme is None)
    q = (problem.lhs, problem.rhs)[side]
    return stack_of(q, problem.dimension_numbers[0][side], problem.dimension_numbers[1][side])


# --- the primitive ---


def _by_reference(
    x: jax.Array, q: QArray, picked: jax.Array | None, *, contracts_cols: bool, dtype: DTypeLike, precision: object
) -> jax.Array:
    if picked is not None:
        q = element(q, picked, keepdims=True)
    numbers = (((2,), (contracted_axis(contracts_cols),)), ((0,), (0,)))
    return Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, precision, dtype), x, q)


def _by_kernel(kernel: AbstractStackKernel, x: jax.Array, q: QArray, picked: jax.Array | None, **settings: Any) -> jax.Array:
    if picked is None:
        return kernel.stacked(x, q, **settings)
    return kernel.picked(x, q, picked, **settings)


def _shape(x: ShapedArray, q: QArray, _: object, *, contracts_cols: bool) -> tuple[int, ...]:
    return x.shape[0], x.shape[1], q.shape[3 - contracted_axis(contracts_cols)]


def _mapped(
    operands: Sequence[jax.Array], axes: Sequence[int | None], form: Any, **settings: object
) -> tuple[jax.Array, int]:
    """Batching: a mapped x adds rows (M); a mapped weight extends the batch (B)."""
    x, *leaves = operands
    x_axis, *leaf_axes = axes
    if any(axis is not None for axis in leaf_axes) and jax.tree.unflatten(form, operands)[2] is not None:
        own = jax.tree.structure(jax.tree.unflatten(form, operands)[1:])
        picked = jax.vmap(lambda *those: element(*jax.tree.unflatten(own, those), keepdims=True), in_axes=tuple(leaf_axes))
        operands, form = jax.tree.flatten((x, picked(*leaves), None))
        x, *leaves = operands
        leaf_axes = [0] * len(leaves)
        axes = [x_axis, *leaf_axes]
    settings["form"] = form
    count = next(a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None)
    if all(axis is None for axis in leaf_axes):
        assert x_axis is not None
        x = jnp.moveaxis(x, x_axis, 1)
        rows = x.shape[2]
        y = primitive.bind(x.reshape(x.shape[0], count * rows, x.shape[3]), *leaves, **settings)
        return y.reshape(y.shape[0], count, rows, y.shape[2]), 1
    first = list(map(mapped_first, operands, axes))
    batch = first[0].shape[1]

    def longer(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    y = primitive.bind(*map(longer, first), **settings)
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

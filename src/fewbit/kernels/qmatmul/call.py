"""The primitive's call of a matmul with quantized operands: batching and derivatives.

Its leaves are those of `(x, q, index)`:

- `x`: a float array, or a QArray with one code per byte; `[B, M, K]`, for ragged_dot `[M, K]`, of a QArray `[1, M, K]`.
- `q`: the weights, `[B, R, C]`; `contracts_cols` says whether K is C, or R.
- `index`: None; or the matrix of `q` to multiply with, for an `x` whose B is 1; for ragged_dot the group sizes.

With a float `x` the product is linear in it, and its VJP is a call with the other axis of the weight contracted. Other
gradients are the reference's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad

from ...array.qarray import QArray
from ..lowering import AbstractCall, Leaves, bind, reference_tangents, zero_tangent
from .kernel import AbstractKernel, element
from .matrix_view import contracted_axis, folded_axes
from .paired import code_rows, refolded
from .problem import Operand, Problem
from .reference import Reference


def multiplied(
    problem: Problem,
    operands: Sequence[Any],
    kernels: Sequence[AbstractKernel],
    *,
    is_named: bool,
    index: jax.Array | None = None,
) -> jax.Array:
    """Views the operands as matrices and binds the primitive.

    Args:
        problem: the product, which every kernel supports.
        operands: the left and the right operand, and for ragged_dot the group sizes.
        kernels: at most one per platform.
        is_named: whether the caller named the kernel, so that no other may replace it.
        index: the matrix of a stack to multiply with; None: all.
    """
    at, view = problem.weight
    x, q = operands[1 - at], view.of(operands[at])
    dtype = np.dtype(problem.result_dtype)
    call = ProductCall(tuple(kernels), is_named, view.contracts_cols, dtype, problem.precision, problem.is_ragged, None)
    if problem.is_ragged and isinstance(x, QArray):
        return call.of(code_rows(x, ((), (0,), (1,))), q, operands[2].astype(jnp.int32))[0]
    if problem.is_ragged:
        return call.of(x, q, operands[2].astype(jnp.int32))
    groups = view.groups_of(problem.dimension_numbers, 1 - at, x.ndim)
    if isinstance(x, QArray):
        rows: Any = code_rows(x, groups)
    else:
        rows = folded_axes(x, groups)  # [B, M, K]
    return view.unfolded(call.of(rows, q, index), x, operands[at], groups, 1 - at)


@dataclasses.dataclass(frozen=True)
class ProductCall(AbstractCall):
    """A product of rows and matrices.

    Attributes:
        contracts_cols: whether K is the last axis of the weights.
        dtype: of the result.
        precision: as in `lax.dot_general`.
        is_ragged: whether it is a ragged_dot.
        form: the tree structure of `(x, q, index)`; None before there are operands.
    """

    kernels: tuple[AbstractKernel, ...]
    contracts_cols: bool
    dtype: np.dtype
    precision: Any
    is_ragged: bool
    form: Any

    @property
    def operation(self) -> str:
        return Problem.operation

    def of(self, x: Any, q: QArray, index: jax.Array | None) -> jax.Array:
        """The product of operands."""
        leaves, form = jax.tree.flatten((x, q, index))
        return bind(dataclasses.replace(self, form=form), *leaves)[0]

    def by_kernel(self, kernel: AbstractKernel, *leaves: jax.Array) -> Leaves:
        x, q, index = jax.tree.unflatten(self.form, leaves)
        shared: dict[str, Any] = {"contracts_cols": self.contracts_cols, "dtype": self.dtype}
        if isinstance(x, QArray) and self.is_ragged:
            y = kernel.grouped_pair(x, q, index, **shared)
        elif isinstance(x, QArray) and index is not None:
            y = kernel.picked_pair(x, q, index, **shared)
        elif isinstance(x, QArray):
            y = kernel.paired(x, q, **shared)
        elif index is None:
            y = kernel.stacked(x, q, precision=self.precision, **shared)
        elif self.is_ragged:
            y = kernel.grouped(x, q, index, precision=self.precision, **shared)
        else:
            y = kernel.picked(x, q, index, precision=self.precision, **shared)
        return [y]

    def by_reference(self, *leaves: jax.Array) -> Leaves:
        x, q, index = jax.tree.unflatten(self.form, leaves)
        if self.is_ragged:
            is_pair = isinstance(x, QArray)
            if is_pair:
                x = jax.tree.map(lambda leaf: leaf[0], x)
            problem = Problem.ragged(Operand.of(x), Operand.of(q), self.contracts_cols, self.precision, self.dtype)
            y = Reference().run(problem, x, q, index)
            return [y[None] if is_pair else y]
        if index is not None:
            q = element(q, index, keepdims=True)
        numbers = (((2,), (contracted_axis(self.contracts_cols),)), ((0,), (0,)))
        return [Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, self.precision, self.dtype), x, q)]

    def results(self, *leaves: ShapedArray) -> Sequence[jax.ShapeDtypeStruct]:
        x, q, _index = jax.tree.unflatten(self.form, leaves)
        columns = q.shape[3 - contracted_axis(self.contracts_cols)]
        return [jax.ShapeDtypeStruct((*x.shape[:-1], columns), self.dtype)]

    # derivatives

    def tangents(self, leaves: Leaves, tangents: Leaves) -> Leaves:
        """Linear in a float x; the reference's along scales."""
        if type(tangents[0]) is ad.Zero or isinstance(jax.tree.unflatten(self.form, leaves)[0], QArray):
            return reference_tangents(self, leaves, tangents)
        along_x = bind(self, tangents[0], *leaves[1:])
        others = [zero_tangent(leaves[0]), *tangents[1:]]
        if all(type(t) is ad.Zero for t in others):
            return along_x
        return [a + b for a, b in zip(along_x, reference_tangents(self, leaves, others), strict=True)]

    def transposed(self, cotangents: Leaves, *leaves: Any) -> Leaves:
        """The cotangent of x, the only operand in which the product is linear."""
        x, *others = leaves
        turned = dataclasses.replace(self, contracts_cols=not self.contracts_cols, dtype=x.aval.dtype)
        return [bind(turned, cotangents[0], *others)[0], *([None] * len(others))]

    # batching: a mapped x adds rows (M), a mapped weight extends the batch (B)

    def batched(self, leaves: Leaves, axes: Sequence[int | None]) -> tuple[Leaves, Sequence[int]]:
        count = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
        x_leaves = self.form.children()[0].num_leaves
        is_shared = all(axis is None for axis in axes[x_leaves:])
        if self.is_ragged and not is_shared:
            return [self._looped(leaves, axes)], [0]
        x, q, index = jax.tree.unflatten(self.form, list(map(_mapped_first, leaves, axes)))
        if is_shared:
            q, index = jax.tree.map(lambda a: a[0], (q, index))
            return [self._with_more_rows(x, q, index, count)], [1]
        if index is not None:  # each element takes its own matrix
            q, index = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape[1:])), (q, index))
            q = jax.vmap(functools.partial(element, keepdims=True))(q, index)
        batch = x.shape[1]

        def longer(a: jax.Array) -> jax.Array:
            return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

        y = self.of(refolded(x, longer), jax.tree.map(longer, q), None)
        return [y.reshape(count, batch, *y.shape[1:])], [0]

    def _with_more_rows(self, x: Any, q: QArray, index: jax.Array | None, count: int) -> jax.Array:
        """The product with an `x` whose first axis is mapped. The result has it as axis 1."""
        if self.is_ragged and isinstance(x, QArray):
            assert index is not None
            rows = x.shape[2]

            def among(a: jax.Array) -> jax.Array:  # each row's copies follow one another, so that groups stay together
                a = jnp.broadcast_to(a, (count, 1, rows, a.shape[3])).transpose(1, 2, 0, 3)
                return a.reshape(1, rows * count, a.shape[3])

            y = self.of(refolded(x, among), q, index * count)
            return y.reshape(1, rows, count, y.shape[2]).swapaxes(1, 2)
        if self.is_ragged:
            assert index is not None
            y = self.of(x.swapaxes(0, 1).reshape(-1, x.shape[2]), q, index * count)
            return y.reshape(-1, count, y.shape[1])
        batch, rows = x.shape[1:3]

        def taller(a: jax.Array) -> jax.Array:
            a = jnp.broadcast_to(a, (count, a.shape[1], rows, a.shape[3])).swapaxes(0, 1)
            return a.reshape(a.shape[0], count * rows, a.shape[3])

        y = self.of(refolded(x, taller), q, index)
        return y.reshape(batch, count, rows, y.shape[2])

    def _looped(self, leaves: Leaves, axes: Sequence[int | None]) -> jax.Array:
        """One product after another, along a new first axis."""
        moved = [i for i, axis in enumerate(axes) if axis is not None]

        def one(parts: list[jax.Array]) -> jax.Array:
            own = list(leaves)
            for i, part in zip(moved, parts, strict=True):
                own[i] = part
            return bind(self, *own)[0]

        return jax.lax.map(one, [_mapped_first(leaves[i], axes[i]) for i in moved])


def _mapped_first(leaf: jax.Array, axis: int | None) -> jax.Array:
    """The array with its mapped axis (None: a new one) first."""
    if axis is None:
        return leaf[None]
    return jnp.moveaxis(leaf, axis, 0)

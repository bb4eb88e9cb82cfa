"""The JAX primitive of matmuls with quantized weights.

Its operands are the leaves of `(x, q, index)`, its settings `form`, their tree structure, and

- `x`: a float array, or a QArray with one code per byte; `[B, M, K]`, for ragged_dot `[M, K]`, of a QArray `[1, M, K]`.
- `q`: the weights, `[B, R, C]`; `contracts_cols` says whether K is C, or R.
- `index`: None; or the matrix of `q` to multiply with, for an `x` whose B is 1; for ragged_dot the group sizes.
- `kernels`: at most one per platform. The lowering takes that of the platform that the program is compiled for, else the
  reference, unless the caller named the kernel (`is_named`).

With a float `x` the product is linear in it, and its VJP is the primitive with the other axis of the weight contracted. Other
gradients are the reference's.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ...array.qarray import QArray
from ...errors import UnsupportedError
from ..lowering import PLATFORMS
from .kernel import AbstractKernel, element
from .matrix_view import contracted_axis, folded_axes
from .paired import code_rows, refolded
from .problem import Operand, Problem
from .reference import Reference

Leaves: TypeAlias = Sequence[Any]

primitive = Primitive("fewbit_qmatmul")


def bound(
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
    x, q = operands[1 - at], operands[at]
    settings = {
        "contracts_cols": view.contracts_cols,
        "dtype": np.dtype(problem.result_dtype),
        "precision": problem.precision,
        "kernels": tuple(kernels),
        "is_named": is_named,
        "is_ragged": problem.is_ragged,
    }
    if problem.is_ragged and isinstance(x, QArray):
        rows = code_rows(x, ((), (0,), (1,)))
        return _bind((rows, view.of(q), operands[2].astype(jnp.int32)), settings)[0]
    if problem.is_ragged:
        return _bind((x, view.of(q), operands[2].astype(jnp.int32)), settings)
    groups = view.groups_of(problem.dimension_numbers, 1 - at, x.ndim)
    if isinstance(x, QArray):
        rows: Any = code_rows(x, groups)
    else:
        rows = folded_axes(x, groups)  # [B, M, K]
    return view.unfolded(_bind((rows, view.of(q), index), settings), x, q, groups, 1 - at)


def _bind(operands: tuple[Any, QArray, jax.Array | None], settings: dict[str, Any]) -> jax.Array:
    leaves, form = jax.tree.flatten(operands)
    return primitive.bind(*leaves, **{**settings, "form": form})


# --- lowering ---


def _lowered(platform: str | None, *leaves: jax.Array, **settings: Any) -> jax.Array:
    """The product by the platform's kernel, else by the reference if none was named."""
    kernels, is_named, form = (settings.pop(name) for name in ("kernels", "is_named", "form"))
    x, q, index = jax.tree.unflatten(form, leaves)
    for kernel in kernels:
        if kernel.platform == platform:
            return _by_kernel(kernel, x, q, index, **settings)
    if is_named:
        where = f"the program is compiled for {platform or 'another platform'}"
        reasons = {kernel.name: f"it runs on {kernel.platform}, and {where}" for kernel in kernels}
        raise UnsupportedError("qmatmul cannot run here", reasons)
    return _by_reference(x, q, index, **settings)


def _by_kernel(
    kernel: AbstractKernel,
    x: Any,
    q: QArray,
    index: jax.Array | None,
    *,
    is_ragged: bool,
    precision: object,
    **settings: Any,
) -> jax.Array:
    if isinstance(x, QArray) and is_ragged:
        assert index is not None
        return kernel.grouped_pair(x, q, index, **settings)
    if isinstance(x, QArray) and index is not None:
        return kernel.picked_pair(x, q, index, **settings)
    if isinstance(x, QArray):
        return kernel.paired(x, q, **settings)
    if index is None:
        return kernel.stacked(x, q, precision=precision, **settings)
    if is_ragged:
        return kernel.grouped(x, q, index, precision=precision, **settings)
    return kernel.picked(x, q, index, precision=precision, **settings)


def _by_reference(
    x: Any, q: QArray, index: jax.Array | None, *, contracts_cols: bool, dtype: DTypeLike, precision: object, is_ragged: bool
) -> jax.Array:
    if is_ragged and isinstance(x, QArray):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        problem = Problem.ragged(Operand.of(x), Operand.of(q), contracts_cols, precision, dtype)
        return Reference().run(problem, x, q, index)[None]
    left, right = Operand.of(x), Operand.of(q)
    if is_ragged:
        return Reference().run(Problem.ragged(left, right, contracts_cols, precision, dtype), x, q, index)
    if index is not None:
        q = element(q, index, keepdims=True)
        right = Operand.of(q)
    numbers = (((2,), (contracted_axis(contracts_cols),)), ((0,), (0,)))
    return Reference().run(Problem(left, right, numbers, precision, dtype), x, q)


@functools.cache
def _compiled(**settings: object) -> Any:
    return jax.jit(functools.partial(primitive.bind, **settings))


def _run(*leaves: ArrayLike, **settings: object) -> jax.Array:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, endlessly
        return _compiled(**settings)(*leaves)


def _result(*leaves: ShapedArray, form: Any, contracts_cols: bool, dtype: Any, **_: object) -> ShapedArray:
    x, q, _index = jax.tree.unflatten(form, leaves)
    columns = q.shape[3 - contracted_axis(contracts_cols)]
    lengths = (*x.shape[:-1], columns)
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in leaves))
    plain = leaves[0].sharding.update(spec=PartitionSpec(*[None] * len(lengths)))
    return ShapedArray(lengths, dtype, sharding=plain, manual_axis_type=ManualAxisType(varying=varying))


# --- derivatives ---


def _is_linear(leaves: Leaves, form: Any) -> bool:
    """Whether the product is linear in its first leaf: a float array."""
    return not isinstance(jax.tree.unflatten(form, leaves)[0], QArray)


def _tangent(leaves: Leaves, tangents: Leaves, **settings: Any) -> tuple[jax.Array, Any]:
    """JVP: the primitive on the linear operand's tangent, the reference along scales."""
    y = primitive.bind(*leaves, **settings)
    moved, parts = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero], []
    if moved[:1] == [0] and _is_linear(leaves, settings["form"]):
        moved = moved[1:]
        parts.append(primitive.bind(tangents[0], *leaves[1:], **settings))
    if moved:
        plain = {name: setting for name, setting in settings.items() if name not in ("form", "kernels", "is_named")}

        def of_moved(*those: jax.Array) -> jax.Array:
            own = list(leaves)
            for i, leaf in zip(moved, those, strict=True):
                own[i] = leaf
            return _by_reference(*jax.tree.unflatten(settings["form"], own), **plain)

        parts.append(jax.jvp(of_moved, [leaves[i] for i in moved], [tangents[i] for i in moved])[1])
    if not parts:
        return y, ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]
    return y, functools.reduce(jnp.add, parts)


def _transposed(gradient: Any, x: Any, *leaves: object, contracts_cols: bool, dtype: Any, **settings: Any) -> list[Any]:
    """The cotangent of x, the only operand in which the product is linear."""
    if type(gradient) is ad.Zero:
        return [None] * (1 + len(leaves))
    of_x = primitive.bind(gradient, *leaves, contracts_cols=not contracts_cols, dtype=x.aval.dtype, **settings)
    return [of_x, *([None] * len(leaves))]


# --- batching: a mapped x adds rows (M), a mapped weight extends the batch (B) ---


def _mapped(leaves: Leaves, axes: Sequence[int | None], *, form: Any, **settings: Any) -> tuple[jax.Array, int]:
    """The batching rule."""
    count = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    x_leaves = form.children()[0].num_leaves
    is_shared = all(axis is None for axis in axes[x_leaves:])
    if settings["is_ragged"] and not is_shared:
        return _looped(leaves, axes, {**settings, "form": form}), 0
    x, q, index = jax.tree.unflatten(form, list(map(_mapped_first, leaves, axes)))
    if is_shared:
        q, index = jax.tree.map(lambda a: a[0], (q, index))
        return _with_more_rows(x, q, index, count, settings), 1
    if index is not None:  # each element takes its own matrix
        q, index = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape[1:])), (q, index))
        q = jax.vmap(functools.partial(element, keepdims=True))(q, index)
    batch = x.shape[1]

    def longer(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    y = _bind((refolded(x, longer), jax.tree.map(longer, q), None), settings)
    return y.reshape(count, batch, *y.shape[1:]), 0


def _with_more_rows(x: Any, q: QArray, index: jax.Array | None, count: int, settings: dict[str, Any]) -> jax.Array:
    """The product with an `x` whose first axis is mapped. The result has it as axis 1."""
    if settings["is_ragged"] and isinstance(x, QArray):
        assert index is not None
        rows = x.shape[2]

        def among(a: jax.Array) -> jax.Array:  # each row's copies follow one another, so that groups stay together
            a = jnp.broadcast_to(a, (count, 1, rows, a.shape[3])).transpose(1, 2, 0, 3)
            return a.reshape(1, rows * count, a.shape[3])

        y = _bind((refolded(x, among), q, index * count), settings)
        return y.reshape(1, rows, count, y.shape[2]).swapaxes(1, 2)
    if settings["is_ragged"]:
        assert index is not None
        y = _bind((x.swapaxes(0, 1).reshape(-1, x.shape[2]), q, index * count), settings)
        return y.reshape(-1, count, y.shape[1])
    batch, rows = x.shape[1:3]

    def taller(a: jax.Array) -> jax.Array:
        a = jnp.broadcast_to(a, (count, a.shape[1], rows, a.shape[3])).swapaxes(0, 1)
        return a.reshape(a.shape[0], count * rows, a.shape[3])

    y = _bind((refolded(x, taller), q, index), settings)
    return y.reshape(batch, count, rows, y.shape[2])


def _looped(leaves: Leaves, axes: Sequence[int | None], settings: dict[str, Any]) -> jax.Array:
    """One product after another, along a new first axis."""
    moved = [i for i, axis in enumerate(axes) if axis is not None]

    def one(parts: list[jax.Array]) -> jax.Array:
        own = list(leaves)
        for i, part in zip(moved, parts, strict=True):
            own[i] = part
        return primitive.bind(*own, **settings)

    return jax.lax.map(one, [_mapped_first(leaves[i], axes[i]) for i in moved])


def _mapped_first(leaf: jax.Array, axis: int | None) -> jax.Array:
    """The array with its mapped axis (None: a new one) first."""
    if axis is None:
        return leaf[None]
    return jnp.moveaxis(leaf, axis, 0)


primitive.def_impl(_run)
primitive.def_abstract_eval(_result)
ad.primitive_jvps[primitive] = _tangent
ad.primitive_transposes[primitive] = _transposed
batching.primitive_batchers[primitive] = _mapped
for _platform in (*PLATFORMS, None):
    _rule = mlir.lower_fun(functools.partial(_lowered, _platform), multiple_results=False)
    mlir.register_lowering(primitive, _rule, platform=_platform)

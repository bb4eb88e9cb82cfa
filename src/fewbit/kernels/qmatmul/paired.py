"""The product of two quantized stacks whose codes are integers: one primitive of JAX, a kernel on each platform.

It stands beside that of `stacked.py`, for both operands are codes here, and the product is linear in none of them. What JAX
differentiates, the scales, the reference differentiates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec

from ...array import QArray
from ...errors import QuantError, UnsupportedError
from .codes import fits_int32, is_whole, side
from .integers import bytes_of
from .problem import Operand, Problem
from .reference import BACKENDS, Reference
from .stack import Stack, stack_of

Axes = tuple[int, ...]

primitive = Primitive("fewbit_paired_qmatmul")

LEAST_TILE = 8
"""The shortest tile along the contraction that pays for sums of integers."""


def pair_refusal(problem: Problem) -> str | None:
    """Why a product of two quantized operands is none of stacks of integers with scales per row, column or tile; None if it is."""
    for operand in (problem.lhs, problem.rhs):
        assert operand.scheme is not None
        if not is_whole(operand.scheme):
            return f"{operand} has no codes that are integers of at most 8 bits with whole zero points"
    if problem.accumulator not in (None, "int32"):
        return f"it sums in int32, and {problem.accumulator} is asked for"
    if problem.out_sharding is not None:
        return "out_sharding is for XLA's own products"
    try:
        at, stack = _weight(problem)
        _tile(problem, at, stack)
    except QuantError as refusal:
        return str(refusal)
    return None


def paired_product(problem: Problem, lhs: QArray, rhs: QArray, kernels: tuple[Any, ...], *, is_named: bool) -> jax.Array:
    """The product of two operands that `pair_refusal` does not refuse.

    Args:
        problem: what is to be computed.
        lhs: the left operand.
        rhs: the right operand.
        kernels: the kernels that may compute it, one a platform; elsewhere the reference does.
        is_named: whether the caller insists on them.
    """
    at, stack = _weight(problem)
    x, q = (lhs, rhs)[1 - at], (lhs, rhs)[at]
    own, met = problem.dimension_numbers[0][at], problem.dimension_numbers[0][1 - at]
    contracted = tuple(met[own.index(axis)] for axis in stack.contracted)
    batch = problem.dimension_numbers[1][1 - at]
    free = tuple(a for a in range(x.ndim) if a not in contracted and a not in batch)
    groups = batch, free, contracted
    axis = next(iter(contracted)) if len(contracted) == 1 else None
    tile = None if axis is None or x.scale.shape[axis] == 1 else x.tiles[axis]
    numbers = side(x, jnp.int8, but=axis)
    zero = None if numbers.zero is None else _folded(numbers.zero, x.shape, groups, tile)
    x3 = bytes_of(_moved(numbers.values, groups), _folded(numbers.scale, x.shape, groups, tile), zero, tile)
    y = _bind(
        x3,
        stack.of(q),
        contracts_cols=stack.contracts_cols,
        dtype=np.dtype(problem.result_dtype),
        kernels=kernels,
        is_named=is_named,
    )
    lengths = [[x.shape[a] for a in group] for group in groups]
    own_free = [q.shape[a] for a in (stack.rows if stack.contracts_cols else stack.cols)]
    if at == 0:
        return jnp.swapaxes(y, 1, 2).reshape(*lengths[0], *own_free, *lengths[1])
    return y.reshape(*lengths[0], *lengths[1], *own_free)


def _weight(problem: Problem) -> tuple[int, Stack]:
    """The operand that is read as a stack, where it lies: the right one, or the left one where that cannot be."""
    refusals = []
    for at in (1, 0):
        operand = (problem.lhs, problem.rhs)[at]
        try:
            return at, stack_of(operand, problem.dimension_numbers[0][at], problem.dimension_numbers[1][at])
        except QuantError as refusal:
            refusals.append(f"{operand} is no stack of matrices: {refusal}")
    raise QuantError("; ".join(refusals))


def _tile(problem: Problem, at: int, stack: Stack) -> int:
    """How many codes along the contraction share scales on both sides.

    Raises:
        QuantError: where those of the two sides do not meet, or are too few.
    """
    x = (problem.lhs, problem.rhs)[1 - at]
    assert x.scheme is not None
    met, tiles = problem.dimension_numbers[0][1 - at], x.scheme.tiles(len(x.shape))
    own = stack.merged[1 if stack.contracts_cols else 0]
    cut = [tile for a in met if (tile := tiles[a]) is not None and tile < x.shape[a]]
    if cut and len(met) > 1:
        raise QuantError(f"the scales of {x} vary along one of several contracted axes")
    if cut and own.tile is not None and own.tile != cut[0]:
        raise QuantError(f"scales are one for {cut[0]} and for {own.tile} contracted codes; equal tiles are expected")
    tile = own.tile or (cut[0] if cut else own.length)
    if tile < min(LEAST_TILE, own.length):
        raise QuantError(f"only {tile} contracted codes share a scale; at least {LEAST_TILE} are expected")
    assert problem.lhs.scheme is not None
    assert problem.rhs.scheme is not None
    if not fits_int32(problem.lhs.scheme, problem.rhs.scheme, tile):
        raise QuantError(f"sums of {tile} products of its codes may not fit in int32")
    return tile


def _moved(a: jax.Array, groups: tuple[Axes, ...]) -> jax.Array:
    """An array with the axes of each group as one."""
    return a.transpose([axis for group in groups for axis in group]).reshape(
        [int(np.prod([a.shape[axis] for axis in group])) for group in groups]
    )


def _folded(a: jax.Array, shape: tuple[int, ...], groups: tuple[Axes, ...], tile: int | None) -> jax.Array:
    """What one operand has for each tile, the axes of each group as one: 1 long, or as long as the operand is there."""
    wide = list(a.shape)
    for group in groups if tile is None else groups[:2]:
        if any(a.shape[axis] != 1 for axis in group):
            for axis in group:
                wide[axis] = shape[axis]
    return _moved(jnp.broadcast_to(a, wide), groups)


def _bind(x: QArray, q: QArray, **settings: Any) -> jax.Array:
    leaves, form = jax.tree.flatten((x, q))
    return primitive.bind(*leaves, form=form, **settings)


# --- what each platform makes of the primitive ---


def _on(platform: str | None, *leaves: jax.Array, form: Any, **settings: Any) -> jax.Array:
    """The product by the kernel of a platform, by the reference where it has none and none was named."""
    kernels, is_named = settings.pop("kernels"), settings.pop("is_named")
    for kernel in kernels:
        if kernel.platform == platform:
            return kernel.paired(*jax.tree.unflatten(form, leaves), **settings)
    if is_named:
        where = "another platform" if platform is None else platform
        reasons = {
            kernel.name: f"it runs on {kernel.platform}, and the program is compiled for {where}" for kernel in kernels
        }
        raise UnsupportedError(f"{BACKENDS.kind} cannot run here", reasons)
    return _by_reference(*jax.tree.unflatten(form, leaves), **settings)


def _by_reference(x: QArray, q: QArray, *, contracts_cols: bool, dtype: Any, **_: Any) -> jax.Array:
    numbers = (((2,), (2 if contracts_cols else 1,)), ((0,), (0,)))
    return Reference().run(Problem(Operand.of(x), Operand.of(q), numbers, None, dtype), x, q)


@functools.cache
def _compiled(**settings: Any) -> Any:
    return jax.jit(functools.partial(primitive.bind, **settings))


@primitive.def_impl
def _run(*leaves: Any, **settings: Any) -> jax.Array:
    return _compiled(**settings)(*leaves)


@primitive.def_abstract_eval
def _result(*leaves: Any, form: Any, contracts_cols: bool, dtype: Any, **_: Any) -> Any:
    x, q = jax.tree.unflatten(form, leaves)
    shape = (x.shape[0], x.shape[1], q.shape[1] if contracts_cols else q.shape[2])
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in leaves))
    plain = leaves[0].sharding.update(spec=PartitionSpec(None, None, None))
    return ShapedArray(shape, dtype, sharding=plain, manual_axis_type=ManualAxisType(varying=varying))


def _tangent(leaves: Any, tangents: Any, form: Any, **settings: Any) -> tuple[jax.Array, Any]:
    """The derivative along scales, which is the reference's."""
    y = primitive.bind(*leaves, form=form, **settings)
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not moved:
        return y, ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]

    def of_moved(*those: jax.Array) -> jax.Array:
        held = list(leaves)
        for i, leaf in zip(moved, those, strict=True):
            held[i] = leaf
        return _by_reference(*jax.tree.unflatten(form, held), **settings)

    return y, jax.jvp(of_moved, [leaves[i] for i in moved], [tangents[i] for i in moved])[1]


def _mapped(leaves: Any, axes: Any, *, form: Any, **settings: Any) -> tuple[jax.Array, int]:
    """A mapped x alone has more rows; else both stacks are longer."""
    count = next(a.shape[axis] for a, axis in zip(leaves, axes, strict=True) if axis is not None)
    first = [a[None] if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(leaves, axes, strict=True)]
    x, q = jax.tree.unflatten(form, first)
    batch, rows = x.codes.shape[1:3]
    has_mapped_weight = any(axis is not None for axis in axes[-len(jax.tree.leaves(q)) :])

    def longer(a: jax.Array) -> jax.Array:
        return jnp.broadcast_to(a, (count, batch, *a.shape[2:])).reshape(count * batch, *a.shape[2:])

    def taller(a: jax.Array) -> jax.Array:
        a = jnp.broadcast_to(a, (count, a.shape[1], rows, a.shape[3])).swapaxes(0, 1)
        return a.reshape(a.shape[0], count * rows, a.shape[3])

    fold = longer if has_mapped_weight else taller
    signed = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int8)
    zero = None if x.zero_point is None else fold(signed(x.zero_point))
    held = bytes_of(fold(signed(x.codes)), fold(x.scale), zero, x.scheme.tiles(3)[2])
    if has_mapped_weight:
        y = _bind(held, jax.tree.map(longer, q), **settings)
        return y.reshape(count, batch, *y.shape[1:]), 0
    y = _bind(held, jax.tree.map(lambda a: a[0], q), **settings)
    return y.reshape(batch, count, rows, y.shape[2]), 1


ad.primitive_jvps[primitive] = _tangent
batching.primitive_batchers[primitive] = _mapped
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    _lowered = mlir.lower_fun(functools.partial(_on, _platform), multiple_results=False)
    mlir.register_lowering(primitive, _lowered, platform=_platform)
mlir.register_lowering(primitive, mlir.lower_fun(functools.partial(_on, None), multiple_results=False))

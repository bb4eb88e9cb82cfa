"""Matmuls as JAX primitives, lowered to one kernel per platform or the reference.

The kernel is chosen when the program is lowered, for the platform that it is compiled for. A product that is linear in a float
operand has as VJP itself with the other axis of the weight contracted; other gradients are the reference's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec
from jax.typing import ArrayLike

from ...errors import UnsupportedError
from ..insist import PLATFORMS

Product: TypeAlias = Callable[..., jax.Array]
Shape: TypeAlias = Callable[..., tuple[int, ...]]
Leaves: TypeAlias = Sequence[Any]


def kernel_primitive(
    name: str,
    *,
    kind: str,
    by_kernel: Product,
    by_reference: Product,
    shape: Shape,
    mapped: Callable[..., tuple[jax.Array, int]],
    is_linear: bool,
) -> Primitive:
    """Registers a matmul primitive whose operands are the leaves of arrays and QArrays.

    Its parameters are `form`, the tree structure of those leaves; `contracts_cols`, the result's `dtype` and further settings of
    the product; the `kernels`, at most one per platform; and `is_named`, whether the caller named the backend.

    Args:
        name: of the primitive.
        kind: of the product, for errors.
        by_kernel: the product `(kernel, *operands, contracts_cols, dtype, ...)`.
        by_reference: the product `(*operands, contracts_cols, dtype, ...)`.
        shape: the result's shape, from `(*operands, contracts_cols)`.
        mapped: the batching rule.
        is_linear: whether the first operand is a float array in which the product is linear.
    """
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_run, primitive))
    primitive.def_abstract_eval(functools.partial(_result, shape))
    ad.primitive_jvps[primitive] = functools.partial(_tangent, primitive, by_reference, is_linear)
    if is_linear:
        ad.primitive_transposes[primitive] = functools.partial(_transposed, primitive)
    batching.primitive_batchers[primitive] = mapped
    for platform in (*PLATFORMS, None):
        rule = mlir.lower_fun(functools.partial(_on, platform, kind, by_kernel, by_reference), multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _on(
    platform: str | None, kind: str, by_kernel: Product, by_reference: Product, *leaves: jax.Array, **settings: Any
) -> jax.Array:
    """The product by the platform's kernel, else by the reference if none was named."""
    kernels, is_named, form = (settings.pop(name) for name in ("kernels", "is_named", "form"))
    operands = jax.tree.unflatten(form, leaves)
    for kernel in kernels:
        if kernel.platform == platform:
            return by_kernel(kernel, *operands, **settings)
    if is_named:
        where = f"the program is compiled for {platform or 'another platform'}"
        reasons = {kernel.name: f"it runs on {kernel.platform}, and {where}" for kernel in kernels}
        raise UnsupportedError(f"{kind} cannot run here", reasons)
    return by_reference(*operands, **settings)


@functools.cache
def _compiled(primitive: Primitive, **settings: object) -> Any:
    return jax.jit(functools.partial(primitive.bind, **settings))


def _run(primitive: Primitive, *leaves: ArrayLike, **settings: object) -> jax.Array:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, endlessly
        return _compiled(primitive, **settings)(*leaves)


def _result(shape: Shape, *leaves: ShapedArray, form: Any, contracts_cols: bool, dtype: Any, **_: object) -> ShapedArray:
    lengths = shape(*jax.tree.unflatten(form, leaves), contracts_cols=contracts_cols)
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in leaves))
    plain = leaves[0].sharding.update(spec=PartitionSpec(*[None] * len(lengths)))
    return ShapedArray(lengths, dtype, sharding=plain, manual_axis_type=ManualAxisType(varying=varying))


def _tangent(
    primitive: Primitive, by_reference: Product, is_linear: bool, leaves: Leaves, tangents: Leaves, **settings: Any
) -> tuple[jax.Array, Any]:
    """JVP: the primitive on the linear operand's tangent, the reference along scales."""
    y = primitive.bind(*leaves, **settings)
    moved, parts = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero], []
    if is_linear and moved[:1] == [0]:
        moved = moved[1:]
        parts.append(primitive.bind(tangents[0], *leaves[1:], **settings))
    if moved:
        plain = {name: setting for name, setting in settings.items() if name not in ("form", "kernels", "is_named")}

        def of_moved(*those: jax.Array) -> jax.Array:
            own = list(leaves)
            for i, leaf in zip(moved, those, strict=True):
                own[i] = leaf
            return by_reference(*jax.tree.unflatten(settings["form"], own), **plain)

        parts.append(jax.jvp(of_moved, [leaves[i] for i in moved], [tangents[i] for i in moved])[1])
    if not parts:
        return y, ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]
    return y, functools.reduce(jnp.add, parts)


def _transposed(
    primitive: Primitive, gradient: Any, x: Any, *leaves: object, contracts_cols: bool, dtype: Any, **settings: Any
) -> list[Any]:
    """The cotangent of x, the only operand in which the product is linear."""
    if type(gradient) is ad.Zero:
        return [None] * (1 + len(leaves))
    of_x = primitive.bind(gradient, *leaves, contracts_cols=not contracts_cols, dtype=x.aval.dtype, **settings)
    return [of_x, *([None] * len(leaves))]


def mapped_first(leaf: jax.Array, axis: int | None) -> jax.Array:
    """The array with its mapped axis (None: a new one) first."""
    if axis is None:
        return leaf[None]
    return jnp.moveaxis(leaf, axis, 0)

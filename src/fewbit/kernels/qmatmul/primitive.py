"""Products as primitives of JAX: a kernel on each platform that has one, the reference elsewhere.

A traced program holds the product once, with the kernels that can compute it; which of them does is settled where the program
is compiled, by the platform that it is compiled for. The gradient of one that is linear in a float operand is itself with the
other axis of the weight contracted; what else is differentiated, the reference differentiates.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import ManualAxisType, PartitionSpec

from ...errors import UnsupportedError
from ..insist import PLATFORMS


def kernel_primitive(
    name: str,
    *,
    kind: str,
    by_kernel: Callable[..., jax.Array],
    by_reference: Callable[..., jax.Array],
    shape: Callable[..., tuple[int, ...]],
    mapped: Callable[..., tuple[jax.Array, int]],
    is_linear: bool,
) -> Primitive:
    """A primitive whose operands are the leaves of arrays and QArrays that meet in a product.

    Its parameters are `form`, the structure of those leaves; `contracts_cols`, `dtype` of the result and what else the product
    takes; the `kernels`, one for each platform that has one; and `is_named`, whether the caller insists on them.

    Args:
        name: of the primitive.
        kind: of the product, for errors.
        by_kernel: the product `(kernel, *operands, contracts_cols, dtype, ...)`.
        by_reference: the product `(*operands, contracts_cols, dtype, ...)`.
        shape: of the result, from `(*operands, contracts_cols)`.
        mapped: the batching rule.
        is_linear: whether the first operand is a float array, in which the product is linear.
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


def _on(platform: str | None, kind: str, by_kernel: Any, by_reference: Any, *leaves: Any, **settings: Any) -> jax.Array:
    """The product by the kernel of a platform, by the reference where it has none and none was named."""
    kernels, is_named, form = (settings.pop(name) for name in ("kernels", "is_named", "form"))
    operands = jax.tree.unflatten(form, leaves)
    for kernel in kernels:
        if kernel.platform == platform:
            return by_kernel(kernel, *operands, **settings)
    if is_named:
        where = "another platform" if platform is None else platform
        reasons = {
            kernel.name: f"it runs on {kernel.platform}, and the program is compiled for {where}" for kernel in kernels
        }
        raise UnsupportedError(f"{kind} cannot run here", reasons)
    return by_reference(*operands, **settings)


@functools.cache
def _compiled(primitive: Primitive, **settings: Any) -> Any:
    return jax.jit(functools.partial(primitive.bind, **settings))


def _run(primitive: Primitive, *leaves: Any, **settings: Any) -> jax.Array:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, without end
        return _compiled(primitive, **settings)(*leaves)


def _result(shape: Any, *leaves: Any, form: Any, contracts_cols: bool, dtype: Any, **_: Any) -> ShapedArray:
    lengths = shape(*jax.tree.unflatten(form, leaves), contracts_cols=contracts_cols)
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in leaves))
    plain = leaves[0].sharding.update(spec=PartitionSpec(*[None] * len(lengths)))
    return ShapedArray(lengths, dtype, sharding=plain, manual_axis_type=ManualAxisType(varying=varying))


def _tangent(
    primitive: Primitive, by_reference: Any, is_linear: bool, leaves: Any, tangents: Any, form: Any, **settings: Any
) -> tuple[jax.Array, Any]:
    """The derivative along the linear operand is the product of the tangent; that along scales is the reference's."""
    y = primitive.bind(*leaves, form=form, **settings)
    moved, parts = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero], []
    if is_linear and moved[:1] == [0]:
        moved = moved[1:]
        parts.append(primitive.bind(tangents[0], *leaves[1:], form=form, **settings))
    if moved:
        plain = {name: setting for name, setting in settings.items() if name not in ("kernels", "is_named")}

        def of_moved(*those: jax.Array) -> jax.Array:
            held = list(leaves)
            for i, leaf in zip(moved, those, strict=True):
                held[i] = leaf
            return by_reference(*jax.tree.unflatten(form, held), **plain)

        parts.append(jax.jvp(of_moved, [leaves[i] for i in moved], [tangents[i] for i in moved])[1])
    return y, functools.reduce(jnp.add, parts) if parts else ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]


def _transposed(
    primitive: Primitive, gradient: Any, x: Any, *leaves: Any, contracts_cols: bool, dtype: Any, **settings: Any
) -> list[Any]:
    """The gradient of x, the only operand that the product is linear in."""
    if type(gradient) is ad.Zero:
        return [None] * (1 + len(leaves))
    of_x = primitive.bind(gradient, *leaves, contracts_cols=not contracts_cols, dtype=x.aval.dtype, **settings)
    return [of_x, *([None] * len(leaves))]

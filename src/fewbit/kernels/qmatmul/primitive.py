"""Products that are linear in their float operand as primitives of JAX: a kernel on each platform, the reference elsewhere.

The gradient of such a primitive is itself with the other axis of the weight contracted. A traced program holds the product
once, with the kernels that can compute it; which of them does is settled where the program is compiled, by the platform that
it is compiled for.
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

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def linear_primitive(
    name: str,
    *,
    kind: str,
    by_kernel: Callable[..., jax.Array],
    by_reference: Callable[..., jax.Array],
    shape: Callable[..., tuple[int, ...]],
    mapped: Callable[..., tuple[jax.Array, int]],
) -> Primitive:
    """A primitive whose operands are a float array x, and the leaves of what it meets: QArrays, and integers beside them.

    Its parameters are `form`, the structure of those leaves, `contracts_cols`, `dtype` of the result and `precision`; the
    `kernels`, one for each platform that has one; and `is_named`, whether the caller insists on them.

    Args:
        name: of the primitive.
        kind: of the product, for errors.
        by_kernel: the product `(kernel, x, *met, contracts_cols, dtype, precision)`.
        by_reference: the product `(x, *met, contracts_cols, dtype, precision)`.
        shape: of the result, from `(x, *met, contracts_cols)`.
        mapped: the batching rule.
    """
    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_run, primitive))
    primitive.def_abstract_eval(functools.partial(_result, shape))
    ad.primitive_jvps[primitive] = functools.partial(_tangent, primitive, by_reference)
    ad.primitive_transposes[primitive] = functools.partial(_transposed, primitive)
    batching.primitive_batchers[primitive] = mapped
    for platform in (*PLATFORMS, None):
        rule = mlir.lower_fun(functools.partial(_on, platform, kind, by_kernel, by_reference), multiple_results=False)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _on(
    platform: str | None, kind: str, by_kernel: Any, by_reference: Any, x: Any, *leaves: Any, **settings: Any
) -> jax.Array:
    """The product by the kernel of a platform, by the reference where it has none and none was named."""
    kernels, is_named, form = (settings.pop(name) for name in ("kernels", "is_named", "form"))
    met = jax.tree.unflatten(form, leaves)
    for kernel in kernels:
        if kernel.platform == platform:
            return by_kernel(kernel, x, *met, **settings)
    if is_named:
        where = "another platform" if platform is None else platform
        reasons = {
            kernel.name: f"it runs on {kernel.platform}, and the program is compiled for {where}" for kernel in kernels
        }
        raise UnsupportedError(f"{kind} cannot run here", reasons)
    return by_reference(x, *met, **settings)


@functools.cache
def _compiled(primitive: Primitive, **settings: Any) -> Any:
    return jax.jit(functools.partial(primitive.bind, **settings))


def _run(primitive: Primitive, *operands: Any, **settings: Any) -> jax.Array:
    return _compiled(primitive, **settings)(*operands)


def _result(shape: Any, x: Any, *leaves: Any, form: Any, contracts_cols: bool, dtype: Any, **_: Any) -> ShapedArray:
    lengths = shape(x, *jax.tree.unflatten(form, leaves), contracts_cols=contracts_cols)
    varying = frozenset().union(*(leaf.manual_axis_type.varying for leaf in (x, *leaves)))
    plain = x.sharding.update(spec=PartitionSpec(*[None] * len(lengths)))
    return ShapedArray(lengths, dtype, sharding=plain, manual_axis_type=ManualAxisType(varying=varying))


def _tangent(
    primitive: Primitive, by_reference: Any, primals: Any, tangents: Any, form: Any, **settings: Any
) -> tuple[jax.Array, Any]:
    """The derivative along x is the product of the tangent; that along scales is the reference's."""
    x, *leaves = primals
    y = primitive.bind(*primals, form=form, **settings)
    along_x, *along_leaves = tangents
    moved = [i for i, t in enumerate(along_leaves) if type(t) is not ad.Zero]
    parts = [] if type(along_x) is ad.Zero else [primitive.bind(along_x, *leaves, form=form, **settings)]
    if moved:
        plain = {name: settings[name] for name in ("contracts_cols", "dtype", "precision")}

        def of_moved(*those: jax.Array) -> jax.Array:
            held = list(leaves)
            for i, leaf in zip(moved, those, strict=True):
                held[i] = leaf
            return by_reference(x, *jax.tree.unflatten(form, held), **plain)

        parts.append(jax.jvp(of_moved, [leaves[i] for i in moved], [along_leaves[i] for i in moved])[1])
    return y, functools.reduce(jnp.add, parts) if parts else ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]


def _transposed(
    primitive: Primitive, gradient: Any, x: Any, *leaves: Any, contracts_cols: bool, dtype: Any, **settings: Any
) -> list[Any]:
    """The gradient of x, the only operand that the product is linear in."""
    if type(gradient) is ad.Zero:
        return [None] * (1 + len(leaves))
    of_x = primitive.bind(gradient, *leaves, contracts_cols=not contracts_cols, dtype=x.aval.dtype, **settings)
    return [of_x, *([None] * len(leaves))]

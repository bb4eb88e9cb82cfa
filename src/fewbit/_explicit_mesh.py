"""Arrays on meshes with Explicit axes, over which shardings are part of the types."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """The sharding of an array over the Explicit axes of its mesh. None without such axes."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    if isinstance(x, Tracer):
        return sharding
    assert isinstance(x.sharding, NamedSharding)  # whose spec has the automatic axes, too
    return NamedSharding(x.sharding.mesh, sharding.spec)


def with_auto_axes(fn: Callable[..., jax.Array], x: jax.Array, *others: jax.Array, reduced: Sequence[int] = ()) -> jax.Array:
    """`fn(x, *others)`, where XLA chooses the shardings within `fn`, for operations that JAX has on no explicit mesh.

    Args:
        fn: a function of arrays, which uses no others, whose result has as many axes as the first.
        x: the first argument.
        others: further ones.
        reduced: the axes along which the result is replicated; along the others it is sharded like `x`.

    Returns:
        The result.
    """
    sharding = explicit_sharding(x)
    if sharding is None:
        return fn(x, *others)
    entries = [None if axis in reduced else entry for axis, entry in enumerate(sharding.spec)]
    out = NamedSharding(sharding.mesh, PartitionSpec(*entries))
    result: Any = jax.sharding.auto_axes(fn, out_sharding=out)(x, *others)
    return result

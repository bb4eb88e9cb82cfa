"""Platform branches, named backends, arrays on several devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jax.typing import ArrayLike

from ..errors import UnsupportedError
from .backend import AbstractBackend

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

T = TypeVar("T")


def on_platform(platform: str, native: Callable[..., T], reference: Callable[..., T]) -> Callable[..., T]:
    """`native` on one platform and `reference` on the others, with the JVP of the reference."""

    @jax.custom_jvp
    def either(*operands: object) -> T:
        return jax.lax.platform_dependent(*operands, default=reference, **{platform: native})

    @either.defjvp
    def _(primals: Sequence[object], tangents: Sequence[object]) -> tuple[T, T]:
        return jax.jvp(reference, primals, tangents)

    return either


def split_refusal() -> str | None:
    """Why a Pallas or Triton kernel is not chosen on several devices. None on one, and inside `jax.shard_map` on TPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
    if jax.device_count() == 1 or (jax.default_backend() == "tpu" and is_manual):
        return None
    return "there are several devices, and XLA cannot partition this kernel; use jax.shard_map, or name the backend"


def are_split(*arrays: object) -> bool:
    """Whether an array is on several devices. Eager code knows how it is sharded; a jitted function, on an auto mesh, does not."""
    concrete = (a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer))
    return any(len(a.sharding.device_set) > 1 for a in concrete)


# --- a named backend ---

_primitive = Primitive("fewbit_required_platform")


def require_platform(x: jax.Array, backend: AbstractBackend[Any], operation: str) -> jax.Array:
    """The array; compiling it for another platform than the backend's raises.

    The platform is known when a program is lowered, not when it is traced; so the array passes through an identity primitive
    whose lowering rule checks the platform.

    Args:
        x: the array.
        backend: the backend that was named.
        operation: its operation, for errors.

    Returns:
        `x`.

    Raises:
        UnsupportedError: on another platform; for a traced program, when it is compiled.
    """
    if backend.platform is None:
        return x
    return _bound(x, platform=backend.platform, name=backend.name, operation=operation)


def _bound(x: ArrayLike, **settings: str) -> jax.Array:
    y: jax.Array = _primitive.bind(x, **settings)
    return y


def _lowered(here: str | None, _: object, x: T, *, platform: str, name: str, operation: str) -> list[T]:
    if here != platform:
        reason = f"it runs on {platform}, and the program is compiled for {here or 'another platform'}"
        raise UnsupportedError(f"{operation} cannot run here", {name: reason})
    return [x]


@functools.cache
def _compiled(**settings: str) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(_bound, **settings))


def _run(x: ArrayLike, **settings: str) -> jax.Array:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, without end
        return _compiled(**settings)(x)


def _tangent(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], **settings: str
) -> tuple[jax.Array, jax.Array | ad.Zero]:
    (x,), (t,) = primals, tangents
    if not isinstance(t, ad.Zero):
        t = _bound(t, **settings)
    return _bound(x, **settings), t


_primitive.def_impl(_run)
_primitive.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_primitive] = _tangent
ad.primitive_transposes[_primitive] = lambda gradient, x, **settings: [gradient]
batching.primitive_batchers[_primitive] = lambda xs, axes, **settings: (_bound(xs[0], **settings), axes[0])
for _platform in (*PLATFORMS, None):
    mlir.register_lowering(_primitive, functools.partial(_lowered, _platform), platform=_platform)

"""A backend that was named is never replaced: the program is not compiled for a platform that the backend does not run on.

For which platform is known where a program is lowered, not where it is traced; so the array passes an identity that only the
backend's own platform lowers.
"""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..errors import UnsupportedError
from .select import AbstractBackend

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")

_primitive = Primitive("fewbit_insisted")


def insisted(x: jax.Array, backend: AbstractBackend[Any], kind: str) -> jax.Array:
    """The array, in programs that are compiled for the platform of a backend; for another one, compiling them raises.

    Args:
        x: the array.
        backend: the backend that was named.
        kind: what its registry holds, for errors.

    Returns:
        `x`.

    Raises:
        UnsupportedError: on another platform; from a program that is traced, when it is compiled.
    """
    return x if backend.platform is None else _bound(x, platform=backend.platform, name=backend.name, kind=kind)


def _bound(x: Any, **settings: Any) -> jax.Array:
    y: jax.Array = _primitive.bind(x, **settings)
    return y


def _lowered(here: str | None, _: Any, x: Any, *, platform: str, name: str, kind: str) -> list[Any]:
    if here != platform:
        where = "another platform" if here is None else here
        raise UnsupportedError(
            f"{kind} cannot run here", {name: f"it runs on {platform}, and the program is compiled for {where}"}
        )
    return [x]


@functools.cache
def _compiled(**settings: Any) -> Any:
    return jax.jit(functools.partial(_bound, **settings))


def _run(x: Any, **settings: Any) -> jax.Array:
    with jax.disable_jit(False):  # else the compiled function would bind the primitive again, without end
        y: jax.Array = _compiled(**settings)(x)
        return y


def _tangent(primals: Any, tangents: Any, **settings: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return _bound(x, **settings), t if type(t) is ad.Zero else _bound(t, **settings)


_primitive.def_impl(_run)
_primitive.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_primitive] = _tangent
ad.primitive_transposes[_primitive] = lambda gradient, x, **settings: [gradient]
batching.primitive_batchers[_primitive] = lambda xs, axes, **settings: (_bound(xs[0], **settings), axes[0])
for _platform in (*PLATFORMS, None):
    mlir.register_lowering(_primitive, functools.partial(_lowered, _platform), platform=_platform)

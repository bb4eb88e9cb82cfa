"""Runs a kernel on its own platform and plain JAX on the others."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

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

"""One program for all platforms: a kernel on the one that has it, plain JAX on the others."""

from collections.abc import Callable
from typing import Any

import jax


def on_platform(platform: str, native: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`native` on one platform and `reference` on the others, with the derivatives of the reference."""

    @jax.custom_jvp
    def either(*operands: Any) -> Any:
        return jax.lax.platform_dependent(*operands, default=reference, **{platform: native})

    @either.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(reference, primals, tangents)

    return either

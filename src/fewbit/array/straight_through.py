"""Straight-through gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@jax.custom_jvp
def passed_through(x: Float[Array, "*s"], value: Float[Array, "*s"], is_passed: Bool[Array, "*s"]) -> Float[Array, "*s"]:
    """The straight-through estimator: `value`, with the derivative of `x` where `is_passed`, else zero.

    Linear in the tangent, so forward mode, reverse mode and their compositions work. `value` counts as a constant.

    Args:
        x: what is differentiated.
        value: the result.
        is_passed: where the gradient of the result goes to `x`.

    Returns:
        `value`.

    >>> jax.grad(lambda x: passed_through(x, jnp.round(x), x > 0).sum())(jnp.array([-1.2, 3.4])).tolist()
    [0.0, 1.0]
    """
    return value


@passed_through.defjvp
def _passed_tangent(primals: tuple[Array, Array, Array], tangents: tuple[Array, object, object]) -> tuple[Array, Array]:
    x, value, is_passed = primals
    return passed_through(x, value, is_passed), jnp.where(is_passed, tangents[0], jnp.zeros_like(tangents[0]))

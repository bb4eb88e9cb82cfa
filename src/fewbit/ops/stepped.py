"""The scales that earlier steps decided, as they go through a trace: what is read goes in, what was seen comes out backwards.

A product that takes its scales from earlier steps must tell the largest magnitudes of this one. They come out as the
cotangents of the scales, so `jax.grad` collects them through loops, branches and rematerialization. JAX adds the cotangents
of a value that is used in several places; magnitudes of several places join by maximum. So no value is used twice here: it
is copied first, by functions whose derivative rule takes the maximum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepScales:
    """The scales of one product for this step; their cotangents are the largest magnitudes that the step saw.

    Attributes:
        weight: float32: a scalar, or one for each element of a parameter's leading axes.
        activation: likewise; None where it is not quantized.
        gradient: likewise.
    """

    weight: Any
    activation: Any
    gradient: Any

    @property
    def ndim(self) -> int:
        """How many leading axes of the parameter have scales of their own."""
        return self.weight.ndim


def largest_magnitude(x: Float[Array, "*s"]) -> Float[Array, ""]:
    """The largest magnitude of an array, float32, and 0 where an element is not finite.

    Args:
        x: the array. It is not differentiated.

    Returns:
        The magnitude, which says nothing about the steps to come where it is 0.
    """
    magnitude = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
    # XLA's maximum may lose a NaN, so what is not finite is found before it.
    return jnp.where(jnp.isfinite(magnitude).all(), jnp.max(magnitude, initial=0.0), 0.0)


@jax.custom_vjp
def forked(tree: Any) -> tuple[Any, Any]:
    """The values twice; their cotangents join by maximum."""
    return tree, tree


forked.defvjp(lambda tree: ((tree, tree), None), lambda _, seen: (jax.tree.map(jnp.maximum, *seen),))


def copies(tree: Any, count: int) -> Any:
    """The values `count` times along a new leading axis; their cotangents join by maximum.

    Args:
        tree: the values.
        count: how many turns of a loop, or devices, take one each.

    Returns:
        A tree of the same structure.
    """

    @jax.custom_vjp
    def copied(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)

    copied.defvjp(
        lambda tree: (copied(tree), None), lambda _, seen: (jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), seen),)
    )
    return copied(tree)


def widest(scales: StepScales) -> StepScales:
    """The scales for a parameter that is used whole: the largest of its elements; every element sees what is seen."""
    if not scales.ndim:
        return scales
    shape = scales.weight.shape

    @jax.custom_vjp
    def joined(scales: StepScales) -> StepScales:
        return jax.tree.map(jnp.max, scales)

    joined.defvjp(
        lambda scales: (joined(scales), None),
        lambda _, seen: (jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape), seen),),
    )
    return joined(scales)


@jax.custom_batching.custom_vmap
def seen_with(magnitude: Float[Array, ""], scale: Float[Array, ""]) -> Float[Array, ""]:
    """A magnitude as the cotangent of its scale: under `jax.vmap` the largest of all, where they share the scale."""
    return magnitude


@seen_with.def_vmap
def _seen_by_all(_: int, are_batched: list[bool], magnitude: Array, scale: Array) -> tuple[Array, bool]:
    has_many, has_own_scales = are_batched
    return (jnp.max(magnitude, axis=0), False) if has_many and not has_own_scales else (magnitude, has_many)


@jax.custom_vjp
def noted(y: Float[Array, "*s"], x: Float[Array, "*s"], scale: Float[Array, ""]) -> Float[Array, "*s"]:
    """`y` as it is; what made it of `x` with a scale was no product, and the scale sees the largest magnitude of `x`."""
    return y


def _noted_forward(y: Array, x: Array, scale: Array) -> tuple[Array, Any]:
    return y, (seen_with(largest_magnitude(x), scale), jax.tree.map(jnp.zeros_like, x))


def _noted_backward(saved: Any, gradient: Array) -> tuple[Array, Array, Array]:
    seen, zeros = saved
    return gradient, zeros, seen


noted.defvjp(_noted_forward, _noted_backward)

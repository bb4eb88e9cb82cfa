"""Delayed scales; their cotangent is the step's amax.

So `jax.grad` collects amax through loops, branches and rematerialization. JAX adds the cotangents of a value that is used in
several places, but amax values combine by maximum. So no scale is used twice: it is copied first, by functions whose VJP
takes the maximum.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepScales:
    """The delayed scales of one product; their cotangents are this step's amax.

    Attributes:
        weight: float32: a scalar, or one scale per element of a parameter's leading axes.
        activation: likewise; None where it is not quantized.
        gradient: likewise.
    """

    weight: Any
    activation: Any
    gradient: Any

    @property
    def ndim(self) -> int:
        """The number of the parameter's leading axes with separate scales."""
        return self.weight.ndim


def largest_magnitude(x: Float[Array, "*s"]) -> Float[Array, ""]:
    """The amax of an array in float32, without a gradient.

    It is 0, which later steps ignore, where an element is not finite.
    """
    magnitude = jnp.abs(jax.lax.stop_gradient(x).astype(jnp.float32))
    # XLA's maximum may lose a NaN, so what is not finite is found before it.
    return jnp.where(jnp.isfinite(magnitude).all(), jnp.max(magnitude, initial=0.0), 0.0)


@jax.custom_vjp
def forked(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Two copies of the values; the cotangent is the maximum of theirs."""
    return tree, tree


forked.defvjp(lambda tree: ((tree, tree), None), lambda _, seen: (jax.tree.map(jnp.maximum, *seen),))


def copies(tree: PyTree, count: int) -> PyTree:
    """Repeats the values along a new leading axis.

    It is an axis of loop iterations or devices; the cotangent is the maximum along it.
    """

    @jax.custom_vjp
    def copied(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)

    copied.defvjp(
        lambda tree: (copied(tree), None), lambda _, seen: (jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), seen),)
    )
    return copied(tree)


def widest(scales: StepScales) -> StepScales:
    """The largest scale over a parameter's leading axes; every element gets the cotangent."""
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


def amax_cotangent(magnitude: Float[Array, ""], scale: Float[Array, ""]) -> Float[Array, ""]:
    """The amax as the cotangent of its scale.

    It is the maximum over all that share the scale: the elements of a `jax.vmap`, and the devices of a `jax.shard_map`
    within which the function is differentiated or trained.
    """
    devices = _manual_axes(magnitude) - _manual_axes(scale)
    if devices:
        magnitude = jax.lax.pmax(magnitude, tuple(sorted(devices)))
    return _seen_by_each(magnitude, scale)


def _manual_axes(x: Array) -> frozenset[str]:
    """The axes of a `shard_map`'s mesh along which the value differs; none under `check_vma=False`."""
    return jax.typeof(x).manual_axis_type.varying


@jax.custom_batching.custom_vmap
def _seen_by_each(magnitude: Float[Array, "*b"], scale: Float[Array, "*c"]) -> Float[Array, "*b"]:
    return magnitude


@_seen_by_each.def_vmap
def _seen_by_all(_: int, are_batched: list[bool], magnitude: Array, scale: Array) -> tuple[Array, bool]:
    has_many, has_own_scales = are_batched
    if has_many and not has_own_scales:
        magnitude, has_many = jnp.max(magnitude, axis=0), False
    return _seen_by_each(magnitude, scale), has_many  # again, for a `jax.vmap` around this one


@jax.custom_vjp
def noted(y: Float[Array, "*s"], x: Float[Array, "*s"], scale: Float[Array, ""]) -> Float[Array, "*s"]:
    """`y` unchanged, for operations other than products. The scale's cotangent is the amax of `x`."""
    return y


def _noted_forward(y: Array, x: Array, scale: Array) -> tuple[Array, Any]:
    return y, (amax_cotangent(largest_magnitude(x), scale), jax.tree.map(jnp.zeros_like, x))


def _noted_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array, Array]:
    seen, zeros = saved
    return gradient, zeros, seen


noted.defvjp(_noted_forward, _noted_backward)

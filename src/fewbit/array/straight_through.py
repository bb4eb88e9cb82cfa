"""Gradients that pass straight through a rounding, and which elements the numbers of their tile cover, where they may."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._tiles import blocked, blocked_scale, unblocked
from ..formats import AbstractFormat
from ..formats.format import quotient
from .qarray import QArray
from .quantize import scale_values
from .scales import ScaleStore, Target

# A scale and a quotient by it are rounded once each, so the edge of a range may come out two roundings beyond itself.
_EDGE = 1 + 2.0**-22


def is_covered(x: Float[Array, "*s"], q: QArray) -> Bool[Array, "*s"]:
    """Whether each element lies within half a step of the numbers that its tile can hold; NaN does.

    Args:
        x: the array that was quantized.
        q: what it was quantized to.

    Returns:
        A mask of the shape of `x`: False where the code saturates and its error is larger than rounding makes it.
    """
    tiles, fmt = q.tiles, q.scheme.format
    scale = blocked_scale(scale_values(q), tiles)
    divisor = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    wide = blocked(x.astype(jnp.float32), tiles)[0]
    if q.zero_point is not None:
        target = Target(fmt, ScaleStore(np.dtype(np.float32)), q.scheme.zero_holder)
        wide = wide - target.loaded_offset(blocked_scale(q.zero_point, tiles), divisor)
    low, high = _edges(fmt)
    ratio = quotient(wide, divisor)
    return unblocked(~((ratio < low * _EDGE) | (ratio > high * _EDGE)), x.shape, tiles)


def _edges(fmt: AbstractFormat) -> tuple[float, float]:
    """Half a step below the smallest number of a format, and half a step above its largest."""
    values = fmt.values()
    numbers = np.unique(values[(values >= fmt.min) & (values <= fmt.max)])
    return float(1.5 * numbers[0] - 0.5 * numbers[1]), float(1.5 * numbers[-1] - 0.5 * numbers[-2])


@jax.custom_jvp
def passed_through(x: Float[Array, "*s"], value: Float[Array, "*s"], is_passed: Bool[Array, "*s"]) -> Float[Array, "*s"]:
    """`value`, with the derivative of `x` where `is_passed` and zero elsewhere; linear, so every mode of JAX works.

    Args:
        x: what the derivative is taken of.
        value: what is returned; it counts as a constant.
        is_passed: where the derivative of `x` passes.

    Returns:
        `value`.

    >>> jax.grad(lambda x: passed_through(x, jnp.round(x), x > 0).sum())(jnp.array([-1.2, 3.4])).tolist()
    [0.0, 1.0]
    """
    return value


@passed_through.defjvp
def _passed_tangent(primals: tuple[Array, Array, Array], tangents: tuple[Any, Any, Any]) -> tuple[Array, Array]:
    x, value, is_passed = primals
    return passed_through(x, value, is_passed), jnp.where(is_passed, tangents[0], jnp.zeros_like(tangents[0]))

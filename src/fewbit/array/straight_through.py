"""Straight-through gradients, and the mask of elements that do not saturate."""

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
from .scales.search.candidates import numbers_of

# A scale and a quotient by it are rounded once each, so the end of a range may be off by two roundings.
_EDGE = 1 + 2.0**-22


def is_covered(x: Float[Array, "*s"], q: QArray) -> Bool[Array, "*s"]:
    """A mask of `x`: False where the code saturates, by more than half a step. True for NaN.

    Args:
        x: the array before quantization.
        q: its quantized form.

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
    """The range of a format, extended by half a step at both ends."""
    numbers = numbers_of(fmt)
    return float(1.5 * numbers[0] - 0.5 * numbers[1]), float(1.5 * numbers[-1] - 0.5 * numbers[-2])


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

"""Fake quantization with a straight-through gradient."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Key

from ..array.covered import is_covered
from ..array.scheme import Scheme
from ..array.straight_through import passed_through
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize, quantize

Gradient = Literal["identity", "clipped"]

_GRADIENTS = ("identity", "clipped")


def fake_quant(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] = -1,
    key: Key[Array, ""] | None = None,
    gradient: Gradient = "identity",
    scale: ArrayLike | None = None,
    offset: ArrayLike | None = None,
) -> Float[Array, "*s"]:
    """Quantizes and dequantizes an array; the gradient passes straight through.

    The value is `dequantize(quantize(x, scheme, axis=axis, key=key, scale=scale, offset=offset))`, bit for bit, with the
    same zeros, NaN tiles and short last tiles. The derivative is not that of the value, which is zero almost everywhere, but

        dy = dx                                      gradient="identity"
        dy = dx where low <= x <= high, 0 elsewhere  gradient="clipped"

    where `low` and `high` are half a step beyond the outermost numbers of the element's tile; outside, codes saturate. Where
    the calibration covers its tile (absmax, minmax), the two are the same. A NaN passes its gradient. Scale, offset and mask
    are constants; forward and reverse mode agree to every order.

    Args:
        x: floating array of at least one axis.
        scheme: a Scheme, or anything that `fb.scheme` takes.
        axis: the axis that a product contracts, as in `fb.quantize`.
        key: a JAX random key for stochastic rounding; None rounds to the nearest.
        gradient: "identity", or "clipped" to stop the gradient of elements that saturate.
        scale: the scale of each tile in place of the calibration, as in `fb.quantize`: a static range, or delayed scaling.
        offset: the number that code value 0 decodes to, given with `scale` when the scheme has a zero point.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        QuantError: for what `fb.quantize` refuses, and for another gradient.

    Reference: Bengio et al., arXiv 1308.3432 (straight-through estimator).

    >>> x = jnp.array([0.4, -1.0, 2.6])
    >>> fake_quant(x, "int4", scale=0.25).tolist()
    [0.5, -1.0, 1.75]
    >>> jax.grad(lambda x: fake_quant(x, "int4", scale=0.25, gradient="clipped").sum())(x).tolist()
    [1.0, 1.0, 0.0]
    """
    if gradient not in _GRADIENTS:
        raise QuantError(f"gradient is {gradient!r}, must be one of {', '.join(_GRADIENTS)}")
    # passed_through takes no derivative of the value; stopping it here keeps the scale search out of the derivative's trace.
    constant, scale, offset = jax.lax.stop_gradient((x, scale, offset))
    q = quantize(constant, scheme, axis=axis, key=key, scale=scale, offset=offset)
    x = jnp.asarray(x)
    is_passed = jnp.ones_like(x, jnp.bool_)
    if gradient == "clipped":
        is_passed = is_covered(jax.lax.stop_gradient(x), q)
    value = dequantize(q)
    if value.dtype.itemsize <= 2:  # XLA would skip the rounding to a narrow dtype when the value is widened again
        value = jax.lax.optimization_barrier(value)
    return passed_through(x, value, is_passed)

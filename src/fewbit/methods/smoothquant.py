"""SmoothQuant: moves outliers of activations into the weights."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from .scaling import AbstractScaling, ScaledProduct, to_channels


@dataclasses.dataclass(frozen=True)
class SmoothQuant(AbstractScaling):
    """Divides each channel of an input by a scale. Activations with outliers can then be quantized, too.

    `s_k = max |x_k| ** alpha / max |W_k| ** (1 - alpha)`, with the maxima over the calibration data and over the weights that read
    the input. A channel that is always zero, in the input or the weights, has the scale 1.

    Attributes:
        alpha: how much of the difficulty moves to the weights, from 0 to 1.

    Reference: Xiao et al., SmoothQuant, arXiv 2211.10438, equation 4.
    """

    name = "smoothquant"
    collect = ("absmax",)

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise QuantError(f"alpha is {self.alpha}, must be from 0 to 1")

    def scales(
        self, products: Sequence[ScaledProduct], channels: Int[Array, " K"], size: int, *, by_expert: bool = False
    ) -> Float[Array, "*E S"]:
        def largest(parts: list[Array]) -> Array:
            found = [to_channels(part, channels, size, "max", by_expert=by_expert) for part in parts]
            return jnp.max(jnp.stack(found), axis=0)

        x = largest([product.observation.absmax for product in products])
        weights = [jnp.moveaxis(jnp.abs(product.weight), product.axis, -1) for product in products]
        w = largest([weight.astype(jnp.float32) for weight in weights])
        is_used = (x > 0) & (w > 0)
        return jnp.where(is_used, jnp.where(is_used, x, 1) ** self.alpha / jnp.where(is_used, w, 1) ** (1 - self.alpha), 1)

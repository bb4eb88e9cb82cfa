"""Delayed scaling: scales from the amax history of earlier steps."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..errors import QuantError
from ..formats.format import FORMATS, AbstractFormat, quotient
from ..ops.qat.delayed_scales import largest_magnitude


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScale:
    """The current scale of one tensor and its amax history; a pytree.

    A step quantizes with `state.scale`, which depends on earlier steps only, so that the product does not wait for the amax
    of the array; then it keeps `state.update(x)`. One state is for one tensor (weight, activation or gradient). Do not pass
    it to the optimizer: it is replaced, never averaged, clipped or decayed.

    Attributes:
        amax_history: float32, the amax of each of the last steps; 0 where there was none.
        scale: float32, the scale for this step.
        format: the format of the codes: E4M3 for weights and activations, E5M2 for gradients. Static.
        margin: the scale is `2**margin` times what the history requires. Static.

    Reference: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; NVIDIA Transformer Engine,
        DelayedScaling.

    >>> state = DelayedScale.init().update(jnp.array([1.75, -7.0]))
    >>> float(state.scale)
    0.015625
    >>> fb.fake_quant(jnp.array([3.01, 70.0]), "fp8_tensor", scale=state.scale).tolist()
    [3.0, 7.0]
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    amax_history: Any
    scale: Any
    format: AbstractFormat = dataclasses.field(metadata={"static": True})
    margin: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def init(cls, format: AbstractFormat | str = "e4m3fn", *, length: int = 1024, margin: int = 0) -> Self:  # noqa: A002
        """The state before the first step: an empty history and scale 1.

        Args:
            format: the format of the codes, or its name.
            length: the number of steps in the history.
            margin: the scale is `2**margin` times what the history requires, so that values may grow by as much before they
                saturate.

        Raises:
            QuantError: for an unknown format or a length below 1.
        """
        if length < 1:
            raise QuantError(f"length is {length}, must be at least 1 step")
        if isinstance(format, str):
            format = FORMATS[format]  # noqa: A001
        return cls(jnp.zeros(length, jnp.float32), jnp.ones((), jnp.float32), format, margin)

    def update(self, x: ArrayLike) -> Self:
        """The state after a step that quantized `x`, whose amax replaces the oldest one.

        The new scale is `2**margin * max(history) / format.bound`, unchanged while the history is all zero. An amax that is
        not finite enters as 0.

        Args:
            x: the floating array of this step. It is not differentiated.
        """
        if self.scale.ndim:
            raise QuantError(f"the state is stacked (its scale has shape {self.scale.shape}); update it under jax.vmap")
        return self.advance(largest_magnitude(jnp.asarray(x)))

    def advance(self, amax: Float[ArrayLike, "*b"]) -> Self:
        """The state after a step with a known amax. It is as `update` of an array with this amax.

        Args:
            amax: the amax; of a stacked state one for each element.
        """
        amax = jnp.asarray(amax, jnp.float32)
        amax = jnp.where(jnp.isfinite(amax), amax, jnp.zeros_like(amax))
        return self._with_history(jnp.roll(self.amax_history, -1, axis=-1).at[..., 0].set(amax))

    def merge(self, other: "DelayedScale") -> Self:
        """Merges the states of one step computed in parts, such as micro-batches or pipeline stages.

        Every part is `update`d from the state before the step; each entry of the history becomes the maximum of both, and
        the scale follows from it. A part with zeros only changes nothing.

        Args:
            other: the state of another part, of the same format, margin and length; both may be stacked.

        Raises:
            QuantError: for a state of another format, margin or length.
        """
        mine, theirs = ((s.format.name, s.margin, s.amax_history.shape) for s in (self, other))
        if mine != theirs:
            raise QuantError(f"delayed scales of different kinds cannot be merged: {mine} and {theirs}")
        widest = dataclasses.replace(self, scale=jnp.maximum(self.scale, other.scale))
        return widest._with_history(jnp.maximum(self.amax_history, other.amax_history))

    def _with_history(self, history: Float[Array, "*b h"]) -> Self:
        """The state of a new history, with the scale that follows from it."""
        amax = jnp.max(history, axis=-1)
        scale = quotient(amax * jnp.float32(2.0**self.margin), jnp.float32(self.format.bound))
        is_known = (amax > 0) & jnp.isfinite(scale)
        return dataclasses.replace(self, amax_history=history, scale=jnp.where(is_known, scale, self.scale))

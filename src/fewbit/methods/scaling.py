"""The interface of scalings, which choose scales for products' inputs."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..array.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class ScaledProduct:
    """A weight whose input is scaled.

    Attributes:
        weight: the weight, perhaps with an axis of experts first.
        scheme: its scheme.
        axis: its contraction axis, negative.
        observation: the `Observation` of the input.
    """

    weight: Array
    scheme: Scheme
    axis: int
    observation: Any


@dataclasses.dataclass(frozen=True)
class AbstractScaling(abc.ABC):
    """Chooses the scales `s` of an input. `W x = (W diag(s)) (x / s)`. A frozen dataclass.

    Attributes:
        name: its name in the command line, such as "awq".
        collect: what `fb.observe` must collect for it.
    """

    name: ClassVar[str]
    collect: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def scales(
        self, products: Sequence[ScaledProduct], channels: Int[Array, " K"], size: int, *, by_expert: bool = False
    ) -> Float[Array, "*E S"]:
        """The scales of one input, positive float32.

        Args:
            products: the quantized weights that read it, `K` elements each.
            channels: which of the S scales each element has: heads that share a value share its scales.
            size: the number of scales (S).
            by_expert: whether the weights are stacks of experts with an input each; they get scales each.
        """


def to_channels(
    x: Float[Array, "*B K"], channels: Int[Array, " K"], size: int, reduce: str, *, by_expert: bool
) -> Float[Array, "*E S"]:
    """A statistic of each element of an input, as one of each scale.

    Args:
        x: the statistic, such as `[E, K]` of experts.
        channels: as in `AbstractScaling.scales`.
        size: likewise.
        reduce: "add" or "max".
        by_expert: whether the first axis stays; all others are reduced.
    """
    x = x.reshape(*x.shape[:by_expert], -1, x.shape[-1])
    x = x.sum(-2) if reduce == "add" else x.max(-2)
    return getattr(jnp.zeros((*x.shape[:-1], size), x.dtype).at[..., channels], reduce)(x)


def times_scales(weight: Float[Array, "..."], s: Float[Array, "*E K"], axis: int) -> Float[Array, "..."]:
    """A weight times the scales of its input.

    Args:
        weight: the weight.
        s: the scale of each element of its contraction axis, for each expert if they differ.
        axis: the contraction axis, negative.
    """
    shape = [*s.shape[:-1], *(1,) * (weight.ndim - s.ndim + 1)]
    shape[axis] = s.shape[-1]
    return weight * s.reshape(shape)


def moments_error(error: Float[Array, "*E N K"], hessian: Float[Array, "*E K K"]) -> Float[Array, "*E"]:
    """`tr(E H E^T)`, the squared error of a product's output."""
    product = jnp.einsum("...nk,...kl->...nl", error, hessian, precision=jax.lax.Precision.HIGHEST)
    return jnp.sum(product * error, axis=(-2, -1))

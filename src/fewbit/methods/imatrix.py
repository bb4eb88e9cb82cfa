"""Importance weights: the scales of least error in the product's output.

An error `e` in column k of a weight costs `h_k e**2` in the output on average, with the mean square `h_k` of input k: the diagonal
of the Hessian, and llama.cpp's importance matrix. Every element is still rounded to the nearest; only scales and zero points
change.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..array.qarray import QArray
from ..array.quantize import in_units
from ..array.scales.calibration import AbstractCalibration, Scale, Target, Tiles, better
from ..array.scales.search.mse import MSE
from ..array.scales.signed_max import SignedMax
from ..array.scheme import Scheme
from ..errors import QuantError
from ..kernels.quantize.dispatch import quantize
from ..recipe.method import AbstractMethod
from .weight_matrices import MatrixAxes


@dataclasses.dataclass(frozen=True)
class IMatrix(AbstractMethod):
    """Rounds to nearest, with scales of least weighted squared error. The weights are the mean squares of the inputs.

    A scheme whose calibration searches (`mse`, `mx,optimal`) searches with these weights. For any other, each tile takes the better
    of its own scale and that of `mse`; so no tile is worse than with `RTN`, by the weighted error, unless the scales are quantized
    themselves afterwards. A weight whose inputs were all zero, such as an expert without tokens, is rounded as by `RTN`.

    Attributes:
        damping: what is added to each mean square, as a part of their mean; without it, a channel that was zero on the calibration
            data may get any error.

    Reference: llama.cpp, tools/imatrix.
    """

    name = "imatrix"
    collect = ("squares",)

    damping: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise QuantError(f"damping is {self.damping}, must be 0 or more")

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        if observation is None or observation.squares is None:
            raise QuantError('imatrix needs the squares of the inputs; fb.observe with collect=("squares",)')
        # An expert without tokens is rounded to nearest. Where no error counts, the calibration's own scale is kept; a
        # calibration that searches itself needs all errors to count alike.
        unseen = 1.0 if scheme.calibration.uses_error_weights else 0.0
        weights = channel_weights(x.shape, axis, observation.squares, self.damping, unseen, observation.batch)
        return with_searched_scales(scheme, lambda searched: quantize(x, searched, axis=axis, error_weights=weights))


def with_searched_scales(scheme: Scheme, quantized: Callable[[Scheme], QArray]) -> QArray:
    """A weight in a scheme, with the better of its own scales and those of `mse`.

    Args:
        scheme: the scheme. A calibration that is a search by weighted error is kept.
        quantized: quantizes the weight in a scheme, whose calibration is another.

    Returns:
        The array, in `scheme` with its own calibration.
    """
    searched = scheme
    if not scheme.calibration.uses_error_weights:
        searched = dataclasses.replace(scheme, calibration=BetterScale(scheme.calibration))
    q = quantized(searched)
    return dataclasses.replace(q, scheme=dataclasses.replace(q.scheme, calibration=scheme.calibration))


def channel_weights(
    shape: tuple[int, ...],
    axis: tuple[int, ...],
    squares: Float[Array, "*B K"],
    damping: float,
    unseen: float,
    batch: tuple[int, ...] | None = None,
) -> Float[Array, "..."]:
    """The mean square of each input relative to the mean of all, broadcastable to the weight.

    Args:
        shape: the weight's shape.
        axis: the contraction axes, negative.
        squares: the sums of `x**2` of the contracted inputs, for each element of the batch axes if it has more.
        damping: is added to each.
        unseen: the weight where all inputs were zero.
        batch: the weight's batch axes, in the order of `squares`; None: the first ones, or the groups of a convolution.

    Returns:
        The weights.

    Raises:
        QuantError: for sums of another shape.
    """
    axes = MatrixAxes.of(shape, axis, squares.shape, batch)
    mean = jnp.mean(squares, axis=-1, keepdims=True)
    weights = jnp.where(mean > 0, squares / jnp.where(mean > 0, mean, 1.0) + damping, unseen)
    order = (*axes.groups, *axes.contracted)
    weights = weights.reshape([axes.shape[a] for a in order])
    weights = jnp.expand_dims(weights.transpose([order.index(a) for a in sorted(order)]), axes.others)
    if axes.shape != shape:  # the outputs of one group of a convolution have the same weights
        weights = jnp.broadcast_to(weights, axes.shape).reshape(shape)
    return weights


@dataclasses.dataclass(frozen=True)
class BetterScale(AbstractCalibration):
    """The better of a calibration's own scale and that of `mse`. The weighted error of each tile decides.

    For `signed_max`, whose scales may be negative, `mse` searches both signs.

    Attributes:
        own: the calibration.
    """

    name: ClassVar[str] = "better"
    uses_error_weights: ClassVar[bool] = True
    searches_tensor_scale: ClassVar[bool] = True

    own: AbstractCalibration

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        tried = [self.own.scale(tiles, target), MSE().scale(tiles, target)]
        if isinstance(self.own, SignedMax):
            mirrored, _ = MSE().scale(dataclasses.replace(tiles, x=-tiles.x), target)
            tried.append((-mirrored, None))

        def measured(scale: jax.Array, offset: jax.Array | None) -> tuple[jax.Array, ...]:
            stored, kept = target.store.snapped(scale), offset
            divisor = jnp.where(stored == 0, 1.0, stored)
            if offset is not None:
                kept = target.loaded_offset(target.stored_zero(offset, divisor), divisor)
            values = target.format.nearest(in_units(tiles.x, divisor, kept)) * stored
            if kept is not None:
                values = values + kept
            shape = tiles.amax.shape
            ends = (scale,) if offset is None else (scale, offset)
            return (*(jnp.broadcast_to(end, shape) for end in ends), tiles.error(values))

        best, *others = (measured(*one) for one in tried)
        for one in others:
            best = better(one, best)
        return best[0], None if len(best) == 2 else best[1]

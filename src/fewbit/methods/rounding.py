"""Learned rounding: rounding directions and clips by gradient descent.

The codes are those of the scheme for `w + v g` and the scales `c s`, with the scheme's own scales `s`, the gap `g` between the two
numbers around a weight, offsets `v` in -1/2 .. 1/2 and a clip `c` of each tile. Both descend the output error `tr(E H E^T)`, with the
Hessian `H = X^T X` of the inputs, where rounding counts as the identity. As in SignRound all steps of a round have one length,
which falls to 0; but an offset takes a shorter one where the curvature `H_kk` says that it suffices. The Hessian stands for all inputs
at once, so nothing is drawn at random.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._tiles import blocked
from ..array.qarray import QArray
from ..array.quantize import expanded_offset, expanded_scale, in_units, scale_values
from ..array.scales.search.candidates import numbers_of
from ..array.scheme import Scheme
from ..errors import QuantError
from ..formats.format import AbstractFormat
from ..kernels.quantize.dispatch import dequantize, quantize
from ..recipe.method import AbstractMethod
from .weight_matrices import WeightMatrices


@dataclasses.dataclass(frozen=True)
class LearnedRounding(AbstractMethod):
    """Learns the rounding of each weight and the clip of each tile.

    It reduces the output error: each weight becomes one of its two neighbours. Each output takes its best round (all take
    the same where they share tiles); or the weight is rounded to nearest, if that is better.

    Attributes:
        rounds: the number of steps; their length falls from `1 / rounds` to 0, so that an offset can just reach a half.
        lowest: the smallest clip, as a part of the scheme's scale; 1 learns the rounding alone. Scales that are stored in a few bits
            are not clipped, since each step would round the whole tile anew.

    Reference: Cheng et al., SignRound (AutoRound), arXiv 2309.05516, which takes the error of a whole block.
    """

    name = "rounding"
    collect = ("hessian",)

    rounds: int = 200
    lowest: float = 0.5

    def __post_init__(self) -> None:
        if self.rounds < 1 or not 0 < self.lowest <= 1:
            raise QuantError(f"rounds is {self.rounds} and lowest {self.lowest}; they must be 1 or more, and above 0 to 1")

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        if observation is None or observation.hessian is None:
            raise QuantError('rounding needs the second moments of the inputs; fb.observe with collect=("hessian",)')
        if x.size == 0:  # nothing to learn
            return quantize(x, scheme, axis=axis)
        return _learned(x, scheme, observation.hessian, axis, observation.batch, self)


@functools.partial(jax.jit, static_argnames=("scheme", "axis", "batch", "settings"))
def _learned(
    x: Float[Array, "..."],
    scheme: Scheme,
    hessian: Float[Array, "*B K K"],
    axis: tuple[int, ...],
    batch: tuple[int, ...] | None,
    settings: LearnedRounding,
) -> QArray:
    """The weight quantized by learned rounding."""
    start, w = quantize(x, scheme, axis=axis), x.astype(jnp.float32)
    view = WeightMatrices.of(start, axis, hessian.shape, batch)
    scale, offset = scale_values(start), tile_offsets(start)
    moments, gap = view.moments(hessian), gaps(start, w)
    columns = view.columns_first(w)
    curvature = view.restored(jnp.broadcast_to(jnp.diagonal(moments, axis1=1, axis2=2)[..., None], columns.shape)) * gap
    lowest = settings.lowest
    if isinstance(scheme.scale, AbstractFormat | Scheme):
        lowest = 1.0

    outputs = columns.shape[2]
    has_own_tiles = math.prod(view.counts[a] for a in view.axes.others) == outputs

    def measured(q: QArray) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The decoded weight, half the gradient, and the error of each output. The gradient is that of the output error."""
        values = dequantize(q, jnp.float32)
        columns = view.columns_first(values - w)  # [G, K, N]
        gradient = jnp.einsum("gkl,gln->gkn", moments, columns, precision="highest")
        errors = jnp.sum(gradient * columns, axis=1, keepdims=True)  # [G, 1, N]
        if not has_own_tiles:
            errors = jnp.broadcast_to(jnp.sum(errors), errors.shape)
        return values, view.restored(gradient), errors

    def taken(wins: jax.Array, new: tuple[jax.Array, jax.Array], old: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        """The offsets and clips of the outputs that win, and the old ones of the others."""
        by_weight = view.restored(jnp.broadcast_to(wins, (len(wins), moments.shape[1], outputs)))
        by_tile = jnp.all(wins)
        if has_own_tiles:
            tiles = math.prod(view.counts[a] for a in view.contracted)
            by_tile = view.restored_tiles(jnp.broadcast_to(wins, (len(wins), tiles, outputs)))
        return jnp.where(by_weight, new[0], old[0]), jnp.where(by_tile, new[1], old[1])

    def rounded(v: jax.Array, clip: jax.Array) -> QArray:
        clipped = jax.tree.map(lambda end: end * clip, (scale, offset))
        return quantize(w + v * gap, scheme, axis=axis, scale=clipped[0], offset=clipped[1])

    def step(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        v, clip, best, *found = state
        values, gradient, errors = measured(rounded(v, clip))
        found = taken(errors < best, (v, clip), (found[0], found[1]))
        rounding = values - (w + v * gap)
        slope = gradient * jnp.where(jnp.abs(rounding) > gap, values, rounding)  # a saturated weight moves with its scale
        tiles, within = blocked(slope, start.tiles)
        by_tile = tiles.sum(within).reshape(clip.shape)
        length = (1 - i / settings.rounds) / settings.rounds
        needed = gradient / jnp.where(curvature > 0, curvature, 1.0)
        v = jnp.clip(v - length * jnp.clip(needed, -1.0, 1.0), -0.5, 0.5)
        clip = jnp.clip(clip - length * jnp.sign(by_tile), lowest, 1.0)
        return v, clip, jnp.minimum(errors, best), *found

    zeros, ones = jnp.zeros_like(w), jnp.ones_like(scale)
    state = (zeros, ones, jnp.full((len(moments), 1, outputs), jnp.inf, jnp.float32), zeros, ones)
    *_, best_v, best_clip = jax.lax.fori_loop(0, settings.rounds, step, state)
    found = dataclasses.replace(rounded(best_v, best_clip), dtype=start.dtype)
    is_better = jnp.sum(measured(found)[2]) < jnp.sum(measured(start)[2])
    return jax.tree.map(lambda ours, nearest: jnp.where(is_better, ours, nearest), found, start)


def tile_offsets(q: QArray) -> Float[Array, "*t"] | None:
    """The value of code 0 of each tile, float32. None for a symmetric scheme."""
    if q.zero_point is None:
        return None
    if isinstance(q.scheme.zero_point, AbstractFormat):
        return -q.scheme.zero_point.decode(q.zero_point) * scale_values(q)
    return jnp.broadcast_to(q.zero_point.astype(jnp.float32), scale_values(q).shape)


def gaps(q: QArray, w: Float[Array, "..."]) -> Float[Array, "..."]:
    """The distance between the two numbers around each weight, under the scales of `q`.

    >>> q = fb.quantize(jnp.array([[6.0, 0.7]]), "mxfp4")
    >>> gaps(q, jnp.array([[5.0, 0.7]])).tolist()
    [[2.0, 0.5]]
    """
    numbers = jnp.asarray(numbers_of(q.scheme.format), jnp.float32)
    scale = jnp.broadcast_to(expanded_scale(q), w.shape)
    units = in_units(w, jnp.where(scale == 0, 1.0, scale), expanded_offset(q))
    above = jnp.clip(jnp.searchsorted(numbers, units), 1, len(numbers) - 1)
    return (numbers[above] - numbers[above - 1]) * jnp.abs(scale)

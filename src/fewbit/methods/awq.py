"""AWQ: scales of inputs and clipping of blocks by the output error.

Large channels of an input make rounding errors of their columns expensive. AWQ multiplies the columns by `s = mean |x| ** alpha`
and divides the input by it; `alpha` is searched, and so is the part of its amax at which each block is clipped. The output error of
a rounded weight is `tr(E H E^T)` with `E = W - Q` and the second moments `H = X^T X`, so that no activations are stored.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .._tiles import Tile, blocked, unblocked
from ..array.packing import pack
from ..array.qarray import QArray
from ..array.quantize import expanded_offset, expanded_scale
from ..array.scales.calibration import is_lower
from ..array.scheme import Scheme
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize, quantize
from ..recipe.method import AbstractMethod
from .gptq import rounded
from .scaling import AbstractScaling, ScaledProduct, moments_error, times_scales, to_channels
from .weight_matrices import WeightMatrices

_SMALLEST = 1e-4


@dataclasses.dataclass(frozen=True)
class AWQScaling(AbstractScaling):
    """Scales the columns of large channels up. The factor is the power of their mean magnitude with the least output error.

    `s_k = mean |x_k| ** alpha`, divided by `sqrt(max s min s)`, for `alpha = 0, 1 / grid, ..`; the error is that of all products
    that read the input, their weights rounded to nearest. `alpha = 0` is no scaling. Means below 1e-4 count as 1e-4.

    Attributes:
        grid: how many powers are tried.

    Reference: Lin et al., AWQ, arXiv 2306.00978, equations 4 and 5.
    """

    name = "awq"
    collect = ("hessian", "abssum")

    grid: int = 20

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise QuantError(f"grid is {self.grid}, must be 1 or more")

    def scales(
        self, products: Sequence[ScaledProduct], channels: Int[Array, " K"], size: int, *, by_expert: bool = False
    ) -> Float[Array, "*E S"]:
        return _best_scales(
            [product.weight for product in products],
            [product.observation for product in products],
            channels,
            layouts=tuple((product.scheme, product.axis) for product in products),
            size=size,
            grid=self.grid,
            by_expert=by_expert,
        )


@functools.partial(jax.jit, static_argnames=("layouts", "size", "grid", "by_expert"))
def _best_scales(
    weights: Sequence[Array],
    observations: Sequence[Any],
    channels: Int[Array, " K"],
    *,
    layouts: tuple[tuple[Scheme, int], ...],
    size: int,
    grid: int,
    by_expert: bool,
) -> Float[Array, "*E S"]:
    """The scales of least output error."""
    statistics = [(one.abssum, jnp.broadcast_to(one.count[..., None], one.abssum.shape)) for one in observations]
    totals = [
        sum(to_channels(part, channels, size, "add", by_expert=by_expert) for part in parts)
        for parts in zip(*statistics, strict=True)
    ]
    mean = jnp.maximum(totals[0] / jnp.maximum(totals[1], 1), _SMALLEST)

    def at(alpha: Array) -> Array:
        s = mean**alpha
        return s / jnp.sqrt(jnp.max(s, -1, keepdims=True) * jnp.min(s, -1, keepdims=True))

    def loss(alpha: Array) -> Array:
        s, total = at(alpha)[..., channels], jnp.zeros(mean.shape[:-1], jnp.float32)
        for weight, (scheme, axis), one in zip(weights, layouts, observations, strict=True):
            w = weight.astype(jnp.float32)
            q = times_scales(dequantize(quantize(times_scales(w, s, axis), scheme, axis=axis)), 1 / s, axis)
            error = moments_error(jnp.moveaxis(q - w, axis, -1), one.hessian)
            total = total + (error if by_expert else jnp.sum(error))
        return total

    alphas = jnp.arange(grid, dtype=jnp.float32) / grid
    best = alphas[jnp.argmin(lax.map(loss, alphas), axis=0)]  # the smallest of equals
    return at(best[..., None])


@dataclasses.dataclass(frozen=True)
class AWQ(AbstractMethod):
    """Clips each block for the least output error, and rounds to nearest. A block is clipped at a part of its amax.

    The scale of a block is the one that the scheme's calibration gives the block clipped at `1 - i / grid` of its amax, and
    elements beyond the range take its last number. A block's error is `e^T H e` with its own part of H; blocks of several rows add
    theirs. Rows whose whole error does not fall are rounded without clipping. Scales of inputs, the other half of AWQ, need the op that
    produces the input: `AWQScaling`, which `fewbit quantize --method awq` folds into fewbit's decoders.

    Attributes:
        grid: the steps of the clipping.
        shrink: the largest part that is clipped.

    Reference: Lin et al., AWQ, arXiv 2306.00978, section 5.1 (weight clipping).
    """

    name = "awq"
    collect = ("hessian",)

    grid: int = 20
    shrink: float = 0.5

    def __post_init__(self) -> None:
        if self.grid < 1 or not 0 <= self.shrink < 1:
            raise QuantError(
                f"grid is {self.grid} and shrink {self.shrink}; grid must be 1 or more, shrink from 0 to below 1"
            )

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        if observation is None or observation.hessian is None:
            raise QuantError('awq needs the second moments of the inputs; fb.observe with collect=("hessian",)')
        if x.size == 0:  # no tile has an error to lower
            return quantize(x, scheme, axis=axis)
        ratios = tuple(1 - i / self.grid for i in range(max(round(self.shrink * self.grid), 1)))
        return quantize_clipped(x, scheme, observation.hessian, axis=axis, batch=observation.batch, ratios=ratios)


@functools.partial(jax.jit, static_argnames=("scheme", "axis", "batch", "ratios"))
def quantize_clipped(
    x: Float[Array, "..."],
    scheme: Scheme,
    hessian: Float[Array, "*B K K"],
    *,
    axis: tuple[int, ...],
    batch: tuple[int, ...] | None = None,
    ratios: tuple[float, ...],
) -> QArray:
    """Quantizes a weight with each block clipped for the least output error.

    Args:
        x: the weight.
        scheme: the scheme, with tiles on its last axis.
        hessian: the sum of `x x^T` over the inputs; with a matrix for each element of the batch axes, if it has more.
        axis: the contraction axes, negative.
        batch: the weight's batch axes, in the order of `hessian`; None: the first ones, or the groups of a convolution.
        ratios: the parts of its amax at which a block may be clipped; 1 is always tried.

    Raises:
        QuantError: for a Hessian of another shape.
        UnsupportedError: for a scheme with tiles on several axes that are not contracted.
    """
    start = quantize(x, scheme, axis=axis)
    view = WeightMatrices.of(start, axis, hessian.shape, batch)
    w = view.columns_first(x.astype(jnp.float32)).swapaxes(1, 2)  # [G, N, K]
    if start.tensor_scale is not None:
        w = w / start.tensor_scale.reshape(())
    scale, zero_point = _Blocks.of(w, view.moments(hessian), view).best_scales(ratios)
    bound = start.scheme
    scale = view.restored_tiles(scale)
    if isinstance(bound.scale, Scheme):
        elements, within = blocked(x.astype(jnp.float32), start.tiles)
        amax = jnp.max(jnp.abs(elements), axis=within).reshape(scale.shape)
        scale = jnp.where(amax > 0, scale, 0.0)  # a float scale of 1 for an all-zero block would widen the range
        scale = quantize(scale, bound.scale, axis=bound.pack_axis)
    q = dataclasses.replace(start, scale=scale, zero_point=jax.tree.map(view.restored_tiles, zero_point))
    codes, _ = rounded(bound.format, x.astype(jnp.float32), expanded_scale(q), expanded_offset(q))
    return dataclasses.replace(q, codes=pack(codes, bound.format.bits, bound.packing, axis=bound.pack_axis))


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A weight as rows, and the second moments of the inputs of its blocks.

    Attributes:
        rows: the weight, in units of its tensor scale.
        hessian: the second moments.
        blocks: for each block of columns its part of them, zero where a last block is padded.
        scheme: the scheme of the rows; scales that are quantized themselves are float32 here.
    """

    rows: jax.Array  # [G N, K]
    hessian: jax.Array  # [G, K, K]
    blocks: jax.Array  # [G, T, t, t]
    scheme: Scheme

    @classmethod
    def of(cls, w: Float[Array, "G N K"], hessian: Float[Array, "G K K"], view: WeightMatrices) -> "_Blocks":
        """The blocks of a weight."""
        length = w.shape[2]
        tile = view.tile or length
        padded = jnp.pad(hessian, ((0, 0), (0, -length % tile), (0, -length % tile)))
        starts = range(0, length, tile)
        blocks = jnp.stack([padded[:, i : i + tile, i : i + tile] for i in starts], axis=1)
        scheme = view.scheme
        if isinstance(scheme.scale, Scheme):
            scheme = dataclasses.replace(scheme, scale=jnp.dtype(jnp.float32))
        return cls(w.reshape(-1, length), hessian, blocks, scheme)

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """How many rows and columns share a scale."""
        return self.scheme.tiles(2)

    def best_scales(self, ratios: tuple[float, ...]) -> tuple[Array, Array | None]:
        """The stored scales and zero points of least error, `[G, T, rows of tiles]`."""
        start, error_weights = quantize(self.rows, self.scheme), None
        view, within = blocked(self.rows, self.tiles)
        amax = jnp.max(jnp.abs(view), axis=within, keepdims=True)
        if self.scheme.calibration.uses_error_weights:
            diagonal = jnp.diagonal(self.hessian, axis1=1, axis2=2)
            error_weights = jnp.repeat(diagonal, len(self.rows) // len(diagonal), axis=0)

        def step(best: tuple[Any, Array], ratio: Array) -> tuple[tuple[Any, Array], None]:
            clipped = unblocked(jnp.clip(view, -ratio * amax, ratio * amax), self.rows.shape, self.tiles)
            q = quantize(clipped, self.scheme, error_weights=error_weights)
            error = self.error(q)
            wins = is_lower(error, best[1])
            leaves = jax.tree.map(lambda new, old: jnp.where(wins, new, old), (q.scale, q.zero_point), best[0])
            return (leaves, jnp.where(wins, error, best[1])), None

        first = (start.scale, start.zero_point)
        (best, _), _ = lax.scan(step, (first, self.error(start)), jnp.asarray(ratios, jnp.float32))
        found = dataclasses.replace(start, scale=best[0], zero_point=best[1])
        wins = is_lower(self.row_error(found), self.row_error(start))[:, None]
        leaves = jax.tree.map(lambda new, old: jnp.where(wins, new, old), best, first)
        groups = len(self.hessian) if len(leaves[0]) % len(self.hessian) == 0 else 1  # experts may share one scale
        return jax.tree.map(lambda leaf: leaf.reshape(groups, -1, leaf.shape[1]).swapaxes(1, 2), leaves)

    def error(self, q: QArray) -> Array:
        """The output error of each block under some scales, with the nearest codes."""
        groups, count, tile, _ = self.blocks.shape
        errors = jnp.pad(self.rounding_error(q), ((0, 0), (0, count * tile - self.rows.shape[1])))
        cut = errors.reshape(groups, -1, count, tile)  # [G, N, T, t]
        products = jnp.einsum("gntk,gtkl->gntl", cut, self.blocks, precision=lax.Precision.HIGHEST)
        return self.over_row_tiles(jnp.sum(products * cut, axis=-1).reshape(-1, count))  # [rows of tiles, T]

    def row_error(self, q: QArray) -> Array:
        """The output error of each row of tiles."""
        errors = self.rounding_error(q).reshape(len(self.hessian), -1, self.rows.shape[1])  # [G, N, K]
        products = jnp.einsum("gnk,gkl->gnl", errors, self.hessian, precision=lax.Precision.HIGHEST)
        return self.over_row_tiles(jnp.sum(products * errors, axis=-1).reshape(-1, 1))[:, 0]

    def rounding_error(self, q: QArray) -> Array:
        """`Q - W` with the nearest codes under some scales."""
        return rounded(self.scheme.format, self.rows, expanded_scale(q), expanded_offset(q))[1] - self.rows

    def over_row_tiles(self, errors: Array) -> Array:
        """The sums over rows that share scales."""
        view, within = blocked(errors, (self.tiles[0], 1))
        return jnp.sum(view, axis=within).reshape(-1, errors.shape[1])

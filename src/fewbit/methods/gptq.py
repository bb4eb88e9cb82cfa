"""GPTQ: rounds columns in turn, and corrects the next ones.

For a weight `W` `[N, K]` and the Hessian `H = X^T X` of its inputs, the output error of codes `Q` is `tr(E H E^T)` with
`E = W - Q`. With `H = U D U^T`, `U` unit upper triangular, it is the sum over the columns of `D_k |w_k + E_<k U_<k,k - q_k|**2`: each
column is rounded after the errors of the columns before it were added, weighted by U. This is GPTQ's update without the
inverse of H (Chee et al., arXiv 2307.13304, prove the two equal). The scale of a tile is chosen when its first column is reached, by
the scheme's own calibration, with `D` as error weights where the calibration searches. It is chosen for the weights of the tile T
that would make up for the errors before it, `W_T + E_<T U_<T,T (U_TT)^-1`; the columns themselves are rounded without the inverse,
which takes back what the errors inside the tile add.

Columns are blocked twice: spans of about 128 take the errors of all columns before them in one GEMM, tiles those of their span
in another; within a tile a column takes a GEMV. Arrays are transposed, `[K, N]`, so that a column is contiguous.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..array.packing import pack
from ..array.qarray import QArray
from ..array.quantize import expanded_offset, expanded_scale, in_units
from ..array.scheme import Scheme
from ..errors import QuantError
from ..formats.format import AbstractFormat, settled
from ..kernels.quantize.dispatch import quantize
from ..recipe.method import AbstractMethod
from .imatrix import BetterScale
from .weight_matrices import WeightMatrices

S = TypeVar("S")

_SPAN = 128
_FIXED_TILE = 32


@dataclasses.dataclass(frozen=True)
class GPTQ(AbstractMethod):
    """Rounds columns one after another, and corrects the next ones for the error so far.

    Attributes:
        damping: what is added to the diagonal of the Hessian, as a part of its mean. Where the sum has no Cholesky
            factor, ten times as much is added, and so on.
        act_order: whether columns of large second moments come first. Tiles keep their columns: the tiles are ordered, and
            the columns in each. Codes are stored in the order of the weight.

    Reference: Frantar et al., GPTQ, arXiv 2210.17323.
    """

    name = "gptq"
    collect = ("hessian",)

    damping: float = 0.01
    act_order: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise QuantError(f"damping is {self.damping}, must be 0 or more")

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        if observation is None or observation.hessian is None:
            raise QuantError('gptq needs the second moments of the inputs; fb.observe with collect=("hessian",)')
        if x.size == 0:  # no tile has an error to lower
            return quantize(x, scheme, axis=axis)
        return quantize_columns(
            x,
            scheme,
            observation.hessian,
            axis=axis,
            batch=observation.batch,
            damping=self.damping,
            act_order=self.act_order,
        )


@functools.partial(jax.jit, static_argnames=("scheme", "axis", "batch", "damping", "act_order"))
def quantize_columns(
    x: Float[Array, "..."],
    scheme: Scheme,
    hessian: Float[Array, "*B K K"],
    *,
    axis: tuple[int, ...],
    batch: tuple[int, ...] | None = None,
    damping: float,
    act_order: bool,
) -> QArray:
    """Quantizes a weight by GPTQ.

    Args:
        x: the weight.
        scheme: the scheme, with tiles on its last axis.
        hessian: the sum of `x x^T` over the inputs; with a matrix for each element of the batch axes, if it has more.
        axis: the contraction axes, negative.
        batch: the weight's batch axes, in the order of `hessian`; None: the first ones, or the groups of a convolution.
        damping: as in `GPTQ`.
        act_order: as in `GPTQ`.

    Raises:
        QuantError: for a Hessian of another shape.
        UnsupportedError: for a scheme with tiles on several axes that are not contracted.
    """
    start = quantize(x, scheme, axis=axis)
    view = WeightMatrices.of(start, axis, hessian.shape, batch)
    w, width = view.columns_first(x.astype(jnp.float32)), view.tile or 1
    has_fixed_scales = view.tile is None or isinstance(scheme.scale, Scheme)  # those of `quantize`
    if has_fixed_scales:
        width = 1
    elif start.tensor_scale is not None:
        w = w / start.tensor_scale.reshape(())
    hessian, order = view.moments(hessian), None
    if act_order:
        order = column_order(jnp.diagonal(hessian, axis1=1, axis2=2), width)
        hessian = _taken(_taken(hessian, order, 1), order, 2)
    upper, diagonal = jax.vmap(lambda one: factored(one, damping))(hessian)
    if isinstance(scheme.calibration, BetterScale):  # without inputs no error counts, which keeps the scheme's own scales
        has_inputs = jnp.trace(hessian, axis1=1, axis2=2) > 0
        diagonal = jnp.where(has_inputs[:, None], diagonal, 0.0)
    fixed = None
    if has_fixed_scales:
        if scheme.calibration.uses_error_weights:
            weights = diagonal if order is None else _taken(diagonal, jnp.argsort(order, axis=1), 1)
            error_weights = view.restored(jnp.broadcast_to(weights[..., None], w.shape))
            start = quantize(x, scheme, axis=axis, error_weights=error_weights)
        fixed = expanded_scale(start), expanded_offset(start)
        fixed = jax.tree.map(lambda leaf: view.columns_first(jnp.broadcast_to(leaf, x.shape)), fixed)
    if order is not None:
        w, fixed = jax.tree.map(lambda leaf: _taken(leaf, order, 1), (w, fixed))
    found = _Columns(w, upper, diagonal, fixed, view).quantized()  # type: ignore[arg-type]
    if order is not None:
        found = dataclasses.replace(found, codes=_taken(found.codes, jnp.argsort(order, axis=1), 1))
    bound = start.scheme
    packed = pack(view.restored(found.codes), bound.format.bits, bound.packing, axis=bound.pack_axis)
    if fixed is not None:
        return dataclasses.replace(start, codes=packed)
    leaves = found.scale, found.zero_point
    if order is not None:
        tiles = jnp.argsort(order[:, ::width] // width, axis=1)
        leaves = jax.tree.map(lambda leaf: _taken(leaf, tiles, 1), leaves)
    scale, zero_point = jax.tree.map(view.restored_tiles, leaves)
    return dataclasses.replace(start, codes=packed, scale=scale, zero_point=zero_point)


def column_order(second_moments: Float[Array, "G K"], tile: int) -> Int[Array, "G K"]:
    """The columns by descending second moment, tile by tile.

    The columns of a tile stay together, and a short last tile is last.
    """
    length = second_moments.shape[1]
    means = jnp.stack([second_moments[:, i : i + tile].mean(1) for i in range(0, length, tile)], 1)  # [G, T]
    if length % tile:
        means = means.at[:, -1].set(-jnp.inf)
    by_tile = jnp.repeat(-means, tile, axis=1)[:, :length]
    places = jnp.broadcast_to(jnp.arange(length) // tile, second_moments.shape)
    return jnp.lexsort((-second_moments, places, by_tile))


def factored(hessian: Float[Array, "K K"], damping: float) -> tuple[Float[Array, "K K"], Float[Array, " K"]]:
    """`U` and `D` of `H = U D U^T`, after damping. `U` is unit upper triangular, `D` diagonal.

    A column whose inputs were always zero has `U = 0` beyond its diagonal, so that it is rounded to nearest.
    """
    mean, identity = jnp.trace(hessian) / len(hessian), jnp.eye(len(hessian), dtype=jnp.float32)
    normal = jnp.where(mean > 0, hessian / jnp.where(mean > 0, mean, 1.0), identity)[::-1, ::-1]

    def cholesky(damping: jax.Array) -> jax.Array:
        return lax.linalg.cholesky(normal + damping * identity)

    def retried(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        more = jnp.maximum(10 * state[0], jnp.float32(1e-6))
        return more, cholesky(more)

    def has_failed(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return ~jnp.isfinite(state[1]).all() & (state[0] < 1e6)

    first = jnp.float32(damping)
    root = lax.while_loop(has_failed, retried, (first, cholesky(first)))[1][::-1, ::-1]
    return root / jnp.diagonal(root)[None], jnp.square(jnp.diagonal(root))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Found:
    """The columns rounded so far; the rest is zero.

    Attributes:
        errors: `W - Q`, float32.
        codes: the codes.
        scale: the stored scale of each tile, in rows of one tile of K; None where scales are fixed.
        zero_point: the stored zero points, likewise; None where there are none.
    """

    errors: jax.Array  # [G, K, N]
    codes: jax.Array  # [G, K, N]
    scale: jax.Array | None  # [G, T, R]
    zero_point: jax.Array | None  # [G, T, R]


@dataclasses.dataclass(frozen=True)
class _Columns:
    """The columns of a weight in the order of rounding. Their Hessian is `U D U^T`.

    Attributes:
        w: the weight, in units of its tensor scale.
        upper: U.
        diagonal: D.
        fixed: scale and offset of each element, where they are given; else None.
        view: the view of the weight.
    """

    w: jax.Array  # [G, K, N]
    upper: jax.Array  # [G, K, K]
    diagonal: jax.Array  # [G, K]
    fixed: tuple[jax.Array, jax.Array | None] | None
    view: WeightMatrices

    @property
    def tile(self) -> int:
        """How many columns are rounded one by one before a GEMM."""
        if self.fixed is not None:
            return _FIXED_TILE
        assert self.view.tile is not None
        return self.view.tile

    def quantized(self) -> _Found:
        """All columns rounded."""
        length, scale, zero_point = self.w.shape[1], None, None
        if self.fixed is None:
            q = jax.eval_shape(self.tile_scales, self.w[:, : self.tile], self.diagonal[:, : self.tile])
            count = -(-length // self.tile)
            scale, zero_point = jax.tree.map(
                lambda leaf: jnp.zeros((len(self.w), count, leaf.size // len(self.w)), leaf.dtype), (q.scale, q.zero_point)
            )
        found = _Found(jnp.zeros_like(self.w), jnp.zeros(self.w.shape, jnp.uint8), scale, zero_point)
        return _in_parts(length, max(_SPAN // self.tile, 1) * self.tile, self._span, found)

    def tile_scales(self, w: jax.Array, weights: jax.Array) -> QArray:
        """One tile quantized to the nearest, for its scales; as rows `[G N, t]`."""
        scheme, error_weights = self.view.scheme, None
        rows = w.swapaxes(1, 2).reshape(-1, w.shape[1])
        if scheme.calibration.uses_error_weights:
            error_weights = jnp.repeat(weights, w.shape[2], axis=0)
        return quantize(rows, scheme, error_weights=error_weights)

    def _span(self, found: _Found, start: jax.Array, width: int) -> _Found:
        """Rounds several tiles, after one GEMM with the errors of all columns before them."""
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=width, axis=1)
        upper = lax.dynamic_slice_in_dim(self.upper, start, width, axis=2)  # [G, K, S]
        w, inner = part(self.w) + _corrections(upper, found.errors), part(upper)

        def tile(found: _Found, first: jax.Array, size: int) -> _Found:
            upper = lax.dynamic_slice_in_dim(inner, first, size, axis=2)  # [G, S, t]
            block = lax.dynamic_slice_in_dim(w, first, size, axis=1)
            errors = part(found.errors)  # zero from this tile on
            upper_inner = lax.dynamic_slice_in_dim(upper, first, size, axis=1)
            return self._tile(found, start + first, block + _corrections(upper, errors), upper_inner)

        return _in_parts(width, self.tile, tile, found)

    def _tile(self, found: _Found, start: jax.Array, w: jax.Array, upper: jax.Array) -> _Found:
        """Rounds the columns of one tile. `w` has the corrections of all columns before it."""
        G, size, N = w.shape
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1)
        original, fmt = part(self.w), self.view.scheme.format
        if self.fixed is not None:
            scale, offset = jax.tree.map(part, self.fixed)
        else:
            correction = lax.linalg.triangular_solve(
                upper, w - original, left_side=True, transpose_a=True, unit_diagonal=True
            )
            q = self.tile_scales(original + correction, part(self.diagonal))
            scale, offset = (
                None if leaf is None else jnp.broadcast_to(leaf, (G * N, 1)).reshape(G, 1, N).repeat(size, axis=1)
                for leaf in (expanded_scale(q), expanded_offset(q))
            )
            stored = jax.tree.map(
                lambda every, leaf: lax.dynamic_update_slice_in_dim(
                    every, leaf.reshape(G, 1, every.shape[2]), start // self.tile, axis=1
                ),
                (found.scale, found.zero_point),
                (q.scale, q.zero_point),
            )
            found = dataclasses.replace(found, scale=stored[0], zero_point=stored[1])

        def column(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            codes, errors = state

            def at(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, i, 1, axis=1)

            corrected = at(w) + _corrections(lax.dynamic_slice_in_dim(upper, i, 1, axis=2), errors)
            code, value = rounded(fmt, corrected, *jax.tree.map(at, (scale, offset)))
            codes = lax.dynamic_update_slice_in_dim(codes, code, i, axis=1)
            return codes, lax.dynamic_update_slice_in_dim(errors, at(original) - value, i, axis=1)

        codes, errors = lax.fori_loop(0, size, column, (jnp.zeros(w.shape, jnp.uint8), jnp.zeros_like(w)))
        return dataclasses.replace(
            found,
            codes=lax.dynamic_update_slice_in_dim(found.codes, codes, start, axis=1),
            errors=lax.dynamic_update_slice_in_dim(found.errors, errors, start, axis=1),
        )


def _corrections(upper: Float[Array, "G J C"], errors: Float[Array, "G J N"]) -> Float[Array, "G C N"]:
    """What the errors of columns J add to columns C."""
    return jnp.einsum("gjc,gjn->gcn", upper, errors, precision=lax.Precision.HIGHEST)


def rounded(fmt: AbstractFormat, w: jax.Array, scale: jax.Array, offset: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The nearest codes and their values, as `quantize` computes them.

    A stored scale of 0 divides by 1, and decodes to 0.
    """
    codes = fmt.encode(in_units(w, jnp.where(scale == 0, 1.0, scale), offset))
    values = settled(fmt.decode(codes) * scale)
    if offset is not None:
        values = values + offset
    return codes, values


def _in_parts(length: int, width: int, step: Callable[[S, jax.Array, int], S], state: S) -> S:
    """`step(state, start, width)` for parts of a length, in order. The last may be shorter."""
    if length >= width:
        state = lax.fori_loop(0, length // width, lambda i, state: step(state, i * width, width), state)
    if length % width:
        state = step(state, jnp.int32(length - length % width), length % width)
    return state


def _taken(x: jax.Array, order: Int[Array, "G n"], axis: int) -> jax.Array:
    """The elements of an axis in another order, one for each of the first axis."""
    shape = [len(order), *(1 for _ in range(1, axis)), order.shape[1], *(1 for _ in range(axis + 1, x.ndim))]
    return jnp.take_along_axis(x, order.reshape(shape), axis=axis)

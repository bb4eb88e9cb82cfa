"""Hessian-weighted quantization: minimizes the output error `r^T H r`.

An error `r` in a block of a weight's row costs `|X r|**2 = r^T H r` in the output, with `H = X^T X` of the activations.
Errors of different elements can cancel, so the bounds of the squared error (`array/scales/search/candidates.py`) do not apply.
Instead:

1. **Scales.** Every positive number of the scale format is tried (126 for NVFP4, 254 for MX). Float scales: one candidate
   for each breakpoint of the rounding, with the scale that fits its codes best, `x^T H q / q^T H q`.
2. **Codes.** Coordinate descent: each element in turn takes the number nearest to `q_i + (H r)_i / (s H_ii)`, which is
   optimal with all others fixed; then the scale is fitted again. Each tile keeps a round only if its error falls.

The start is the result of `quantize`. Tiles and `H` are normalized by powers of two.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._tiles import Tile
from ..errors import QuantError, UnsupportedError
from ..formats.format import AbstractFormat, looked_up, power_of_two
from .packing import pack, unpack
from .qarray import QArray
from .quantize import quantize, scale_values
from .scales.calibration import is_lower
from .scales.search.candidates import midpoints, stored_scales
from .scales.search.stored import SMALLEST
from .scales.store import ScaleStore
from .scheme import Scheme
from .scheme import scheme as as_scheme

_MOST_BREAKPOINTS = 2**16


def hessian_blocks(x: Float[Array, "*T K"], tile: int | None) -> Float[Array, "blocks tile tile"]:
    """The Hessian `X^T X` of each block of columns, float32.

    Add the results of several batches to combine them.

    Args:
        x: activations, contraction axis last.
        tile: the weight scheme's tile on the contraction axis; None for one block.

    Returns:
        One symmetric matrix per block, the last zero-padded if `tile` does not divide K.

    >>> hessian_blocks(jnp.array([[1.0, 2.0, 3.0]]), 2).tolist()
    [[[1.0, 2.0], [2.0, 4.0]], [[9.0, 0.0], [0.0, 0.0]]]
    """
    count, width = math.prod(x.shape[:-1]), x.shape[-1]
    if tile is None:
        tile = max(1, width)
    blocks = -(-width // tile)
    rows = jnp.pad(x.reshape(count, width).astype(jnp.float32), ((0, 0), (0, blocks * tile - width)))
    columns = rows.reshape(count, blocks, tile)  # [T, blocks, tile]
    return jnp.einsum("tni,tnj->nij", columns, columns, precision="highest")


def quantize_with_hessian(
    x: ArrayLike, scheme: str | Scheme, hessian: Float[ArrayLike, "blocks tile tile"], *, axis: int = -1, rounds: int = 8
) -> QArray:
    """Quantizes a weight for the least error of its product with given activations.

    Minimizes `r^T H r` for each tile, where `r = x - dequantized`; no tile's error is above that of `quantize`. A tensor
    scale is that of `quantize`. Scaling `hessian` by a power of two changes nothing. Jit-compatible.

    Args:
        x: the weight, as for `quantize`.
        scheme: a symmetric scheme with tiles on `axis` alone, without double quantization.
        hessian: one positive semidefinite matrix for each block of `axis`, from `hessian_blocks`.
        axis: the contraction axis.
        rounds: how many times codes and scale are refined alternately; 0 rounds every element to the nearest.

    Returns:
        The QArray, of the shape and dtype of `x`; for an empty array that of `quantize`.

    Raises:
        QuantError: for a Hessian of another shape, or a negative number of rounds.
        UnsupportedError: for a scheme with a zero point, quantized scales or tiles on other axes; for float scales of
            tiles with more than 65536 breakpoints.

    >>> w = jnp.array([[0.9, 0.35, -0.2, 0.6]])
    >>> activations = jnp.array([[1.0, 1.0, 1.0, 1.0]])  # positive and negative errors cancel
    >>> q = quantize_with_hessian(w, "int2", hessian_blocks(activations, None))
    >>> float(jnp.abs(activations @ (fb.dequantize(q) - w).T).max()) < 1e-6
    True
    """
    x, hessian = jnp.asarray(x), jnp.asarray(hessian)
    bound = as_scheme(scheme).along(axis, x.ndim)
    axis = range(x.ndim)[axis]
    tile = _tile_on(bound, x.ndim, axis, rounds) or x.shape[axis]
    if not x.size:
        return quantize(x, scheme, axis=axis)
    expected = (-(-x.shape[axis] // tile), tile, tile)
    if hessian.shape != expected:
        raise QuantError(f"hessian has shape {hessian.shape}, expected {expected}")
    return _quantized(x, hessian, as_scheme(scheme), axis, rounds)


def _tile_on(scheme: Scheme, ndim: int, axis: int, rounds: int) -> Tile:
    """The tile on the contraction axis, after checks of scheme and rounds."""
    if rounds < 0:
        raise QuantError(f"rounds is {rounds}, must be 0 or more")
    if scheme.zero_point is not None or isinstance(scheme.scale, Scheme):
        raise UnsupportedError(f"quantize_with_hessian: scheme {scheme.name} has a zero point or quantized scales")
    tiles = scheme.tiles(ndim)
    if any(tile != 1 for other, tile in enumerate(tiles) if other != axis):
        raise UnsupportedError(f"quantize_with_hessian: the tiles {tiles} of {scheme.name} are not on axis {axis} alone")
    return tiles[axis]


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _quantized(x: jax.Array, hessian: jax.Array, scheme: Scheme, axis: int, rounds: int) -> QArray:
    """The body of `quantize_with_hessian`, jitted."""
    start = quantize(x, scheme, axis=axis)
    problem = _Problem.of(x.astype(jnp.float32), hessian, start, axis)
    found = problem.best_scale(problem.start(start, axis))
    found = jax.lax.fori_loop(0, rounds, lambda _, found: problem.improved(found), found)
    scale, codes = problem.result(found, start.shape, axis)
    fmt, along = start.scheme.format, start.scheme.pack_axis
    return dataclasses.replace(start, codes=pack(codes, fmt.bits, start.scheme.packing, axis=along), scale=scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Found:
    """A candidate solution for each tile. The scale is in units of the tile."""

    scale: jax.Array  # [blocks, rows, 1]
    q: jax.Array  # [blocks, rows, tile]
    error: jax.Array  # [blocks, rows, 1]


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The tiles, blocks first, and their Hessians, both normalized by powers of two."""

    x: jax.Array  # [blocks, rows, tile]
    unit: jax.Array  # [blocks, rows, 1]
    hessian: jax.Array  # [blocks, tile, tile]
    format: AbstractFormat
    store: ScaleStore

    @classmethod
    def of(cls, x: jax.Array, hessian: jax.Array, start: QArray, axis: int) -> "_Problem":
        # `hessian_blocks` pads a tile that is longer than the axis.
        tile, width = hessian.shape[-1], x.shape[axis]
        blocks = _blocks_first(x, tile, axis)
        is_real = (jnp.arange(len(blocks) * tile) < width).reshape(-1, 1, tile)
        hessian = jnp.where(is_real & is_real.mT, hessian.astype(jnp.float32), 0.0)
        hessian = hessian * _unit_of(jnp.abs(hessian).max((1, 2), keepdims=True))[1]
        unit, inverse = _unit_of(jnp.abs(blocks).max(-1, keepdims=True))
        tensor = jax.tree.map(lambda leaf: leaf.reshape(1, 1, 1), start.tensor_scale)
        return cls(blocks * inverse, unit, hessian, start.scheme.format, ScaleStore(start.scheme.scale, tensor))  # type: ignore[arg-type]

    def start(self, q: QArray, axis: int) -> _Found:
        """The result of `quantize`."""
        scheme, tile = q.scheme, self.x.shape[-1]
        codes = unpack(q.codes, scheme.format.bits, q.shape[scheme.pack_axis], scheme.packing, axis=scheme.pack_axis)
        scale = _blocks_first(scale_values(q), 1, axis) / self.unit
        return self.measured(scale, _blocks_first(scheme.format.decode(codes), tile, axis))

    def product(self, r: jax.Array) -> jax.Array:
        """`H r` of each tile."""
        return jax.lax.dot_general(r, self.hessian, (((2,), (1,)), ((0,), (0,))), precision=jax.lax.Precision.HIGHEST)

    def measured(self, scale: jax.Array, q: jax.Array) -> _Found:
        """A scale and decoded codes with their error."""
        r = self.x - scale * q
        return _Found(scale, q, (r * self.product(r)).sum(-1, keepdims=True))

    def kept(self, found: _Found, best: _Found) -> _Found:
        """The candidate of lower error, per tile; a tie keeps `best`."""
        wins = is_lower(found.error, best.error)
        return jax.tree.map(lambda f, b: jnp.where(wins, f, b), found, best)

    def rounded(self, scale: jax.Array) -> jax.Array:
        """The nearest numbers under a scale."""
        return self.format.nearest(self.x * (1 / jnp.maximum(scale, jnp.float32(SMALLEST))))

    def fitted(self, found: _Found) -> _Found:
        """The same codes with the least-squares scale, rounded as it is stored."""
        weighted = self.product(found.q)
        products = (self.x * weighted).sum(-1, keepdims=True)
        squares = (found.q * weighted).sum(-1, keepdims=True)
        fits = (products > 0) & (squares > 0)
        scale = jnp.where(fits, products / jnp.where(fits, squares, 1), found.scale)
        return self.measured(self.store.snapped(scale * self.unit) / self.unit, found.q)

    def best_scale(self, best: _Found) -> _Found:
        """The best of all storable scales, every element rounded to the nearest."""
        if isinstance(self.store.holder, AbstractFormat):
            return self._best_stored(best, self.store.holder)
        return self._best_fit(best)

    def _best_stored(self, best: _Found, holder: AbstractFormat) -> _Found:
        grid = stored_scales(holder)
        grid = jnp.asarray(grid[grid >= np.finfo(np.float32).tiny], jnp.float32)
        tensor = self.store.unit
        if tensor is None:
            tensor = jnp.ones((1, 1, 1), jnp.float32)

        def step(i: jax.Array, best: _Found) -> _Found:
            scale = jnp.maximum(grid[i] * tensor / self.unit, jnp.float32(SMALLEST))
            return self.kept(self.measured(scale, self.rounded(scale)), best)

        return jax.lax.fori_loop(0, len(grid), step, best)

    def _best_fit(self, best: _Found) -> _Found:
        table = midpoints(self.format)
        count = self.x.shape[-1] * table.shape[1]
        if count > _MOST_BREAKPOINTS:
            raise UnsupportedError(
                f"quantize_with_hessian: a tile of {self.x.shape[-1]} elements has {count} breakpoints in "
                f"{self.format.name}, more than {_MOST_BREAKPOINTS}; use a shorter tile"
            )

        def step(i: jax.Array, best: _Found) -> _Found:
            x = jax.lax.dynamic_slice_in_dim(self.x, i // table.shape[1], 1, axis=2)
            middle = looked_up(table.ravel(), (x < 0).astype(jnp.int32) * table.shape[1] + i % table.shape[1])
            scale = jnp.where(x == 0, best.scale, jnp.abs(x) / middle * np.float32(1 - 2.0**-21))
            scale = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, best.scale)
            return self.kept(self.fitted(_Found(scale, self.rounded(scale), best.error)), best)

        return jax.lax.fori_loop(0, count, step, self.kept(self.fitted(best), best))

    def improved(self, found: _Found) -> _Found:
        """One round of coordinate descent on the codes, then a new scale."""
        scale = jnp.maximum(found.scale, jnp.float32(SMALLEST))[..., 0]  # [blocks, rows]

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, gradient = state
            row = jax.lax.dynamic_slice_in_dim(self.hessian, i, 1, axis=1)  # [blocks, 1, tile]
            own = jax.lax.dynamic_index_in_dim(row, i, axis=2, keepdims=False)  # [blocks, 1]
            old = jax.lax.dynamic_index_in_dim(q, i, axis=2, keepdims=False)  # [blocks, rows]
            slope = jax.lax.dynamic_index_in_dim(gradient, i, axis=2, keepdims=False)
            counts = own > 0
            new = self.format.nearest(old + slope / (scale * jnp.where(counts, own, jnp.ones_like(own))))
            new = jnp.where(counts, new, old)
            gradient = gradient - (scale * (new - old))[..., None] * row
            return jax.lax.dynamic_update_index_in_dim(q, new, i, axis=2), gradient

        gradient = self.product(self.x - found.scale * found.q)
        q, _ = jax.lax.fori_loop(0, self.x.shape[-1], step, (found.q, gradient))
        moved = self.kept(self.measured(found.scale, q), found)
        return self.kept(self.fitted(moved), moved)

    def result(self, found: _Found, shape: tuple[int, ...], axis: int) -> tuple[jax.Array, jax.Array]:
        """The stored scales and the unpacked codes, in the layout of the array."""
        scale = self.store.stored(found.scale * self.unit)
        lengths = [*shape[:axis], *shape[axis + 1 :]]

        def laid_out(blocks: jax.Array, width: int) -> jax.Array:
            rows = blocks.swapaxes(0, 1).reshape(*lengths, -1)[..., :width]
            return jnp.moveaxis(rows, -1, axis)

        return laid_out(scale, len(self.x)), laid_out(self.format.encode(found.q), shape[axis])


def _blocks_first(x: jax.Array, tile: int, axis: int) -> jax.Array:
    """The array as `[blocks, rows, tile]`, zero-padded to whole blocks."""
    x = jnp.moveaxis(x, axis, -1)
    rows = x.reshape(math.prod(x.shape[:-1]), -1)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % tile)))  # [rows, blocks * tile]
    return rows.reshape(len(rows), -1, tile).swapaxes(0, 1)


def _unit_of(magnitude: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A power of two near each magnitude, and its reciprocal."""
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(magnitude) & (magnitude > 0), magnitude, jnp.ones_like(magnitude)))
    exponent = jnp.clip(exponent, -126, 126)
    return power_of_two(exponent), power_of_two(-exponent)

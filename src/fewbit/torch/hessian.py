"""The scale of least error of a product: every scale that can be stored is tried, against the activations' second moments.

For a tile `x` and its reconstruction `y` the product with activations `X` is off by `X (y - x)`, whose square is
`r^T H r` with `r = y - x` and `H = X^T X` over the tile's columns. Errors of different elements may cancel under `H`, so no scale
can be left out for what it does to single elements, as the searches for least squared error do: this is a full sweep.
"""

import math

import numpy as np
import torch

from ..array import Scheme
from ..errors import QuantError, UnsupportedError
from ..formats import AbstractFormat
from .rounding import Rounding, flushed
from .scales import TIE, Holder, Tiles, ideal_scale

_FRACTIONS = np.linspace(1.0, 0.3, 64).astype(np.float32)


def product_scale(tiles: Tiles, counts: tuple[int, ...], X: torch.Tensor, naive: Scheme, holder: Holder) -> torch.Tensor:
    """The scale of each tile of least `r^T H r`; a tie (errors equal to 16 bits) goes to the naive scale.

    Scales held in a Format are tried one and all; float scales, of which there are too many, at 64 fractions of the naive one,
    from 1 down to 0.3. Errors are summed in float64, and `H` is in units of its largest entry, so that the scale of `X`
    does not matter.

    Args:
        tiles: the tiles of the whole tensor.
        counts: how many tiles each axis of the tensor has.
        X: activations `[samples, n]`, where the `n` columns are cut as the tensor's axis is.
        naive: the scheme, with the calibration that the search starts from.
        holder: how the scales are held.

    Returns:
        Float32 scales, one a tile; 0 for an all-zero tile.
    """
    axis = naive.pack_axis
    if any(tile != 1 for a, tile in enumerate(naive.tiles(len(counts)), -len(counts)) if a != axis):
        raise UnsupportedError(f"method 'hessian' needs tiles on one axis only, not {naive.tile}")
    order = torch.arange(math.prod(counts), device=X.device).reshape(counts).movedim(axis, 0).reshape(counts[axis], -1)
    start = ideal_scale(tiles, naive, holder)
    start = torch.where(start == 0, start, holder.loaded(holder.stored(start)))
    search = _Sweep(tiles.x[order], second_moments(X, counts[axis], tiles.x.shape[1]), naive.format, start[order])
    for candidate in _candidates(start[order], holder, naive.format):
        search.consider(candidate)
    best = torch.empty_like(start)
    best[order.reshape(-1)] = search.scale.reshape(-1)
    return torch.where(start == 0, 0.0, best)


def second_moments(X: torch.Tensor, blocks: int, length: int) -> torch.Tensor:
    """`X^T X` of each block of columns, in units of the power of two of the largest entry: float64 `[blocks, length, length]`."""
    if not torch.isfinite(X).all():
        raise QuantError("X has numbers that are not finite")
    columns = torch.nn.functional.pad(X.double(), (0, blocks * length - X.shape[1])).reshape(len(X), blocks, length)
    columns = columns.permute(1, 2, 0)
    H = columns @ columns.mT
    largest = H.amax((1, 2), keepdim=True)
    return torch.ldexp(H, -torch.frexp(torch.where(largest > 0, largest, 1.0)).exponent)


def _candidates(start: torch.Tensor, holder: Holder, fmt: AbstractFormat) -> list[torch.Tensor]:
    """The scales to try, each a number or one for every tile."""
    held = holder.store.holder
    if not isinstance(held, AbstractFormat):
        return [holder.loaded(holder.stored(start * float(fraction))) for fraction in _FRACTIONS]
    values = held.values()
    grid = np.unique(values[np.isfinite(values) & (values >= holder.store.smallest)]).astype(np.float32)
    scales = torch.tensor(grid, device=start.device)
    scales = scales if holder.unit is None else flushed(scales * holder.unit)
    # From the smallest scale under which everything rounds to zero on, all are alike; the naive one is never above it.
    top = torch.nan_to_num(start, posinf=0.0).amax() * (8 * fmt.bound / fmt.smallest)
    return list(scales[scales <= top])


class _Sweep:
    """The best scale of each tile so far, tiles by blocks of columns: `[blocks, tiles]`."""

    def __init__(self, x: torch.Tensor, H: torch.Tensor, fmt: AbstractFormat, scale: torch.Tensor):
        self.x, self.H, self.rounding = x, H, Rounding.of(fmt, x.device)
        self.scale, self.error = scale, self._error(scale)

    def consider(self, scale: torch.Tensor) -> None:
        """Tries a scale."""
        error = self._error(scale.expand(self.scale.shape))
        is_lower = error < self.error * TIE
        self.scale = torch.where(is_lower, scale, self.scale)
        self.error = torch.where(is_lower, error, self.error)

    def _error(self, scale: torch.Tensor) -> torch.Tensor:
        """`r^T H r` of each tile."""
        scale = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
        numbers = self.rounding.nearest((self.x / scale).contiguous())
        off = numbers.double() * scale.double() - self.x.double()
        return ((off @ self.H) * off).sum(-1)

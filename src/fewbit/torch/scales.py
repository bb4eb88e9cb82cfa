"""The scale of each tile in torch, by the calibrations that need no more than the tile: absmax, the MX rules, least error."""

import dataclasses

import numpy as np
import torch

from ..array import Scheme
from ..array.scales import MSE, MX, SNR, AbsMax, ScaleStore
from ..array.scales.candidates import last_useful_scale, needed_doublings, needed_halvings, stored_scales
from ..array.scales.mx import above_threshold
from ..array.scales.search import proven_window
from ..errors import UnsupportedError
from ..formats import E8M0, AbstractFormat, Minifloat
from .rounding import Rounding, flushed, over

TIE = 1 - 2.0**-16
"""An error counts as lower when it is below this part of the other: sums are rounded."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles as the rows of a matrix.

    Attributes:
        x: float32 `[tiles, elements]`, without subnormals.
        valid: which elements are real; None when all are.
    """

    x: torch.Tensor
    valid: torch.Tensor | None

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether each tile is free of NaN and infinity."""
        return torch.isfinite(self.x).all(1)

    @property
    def amax(self) -> torch.Tensor:
        """The largest magnitude of each tile; infinite where the tile is not finite."""
        return torch.where(self.is_finite, self.x.abs().amax(1), torch.inf)


@dataclasses.dataclass(frozen=True)
class Holder:
    """How scales are held: `fewbit.array.scales.ScaleStore` in torch.

    Attributes:
        store: the holder's limits; its unit is unused.
        unit: what the number 1 of the holder stands for (the tensor scale), float32; None for 1.
        rounding: the holder's numbers where it is a Format, else None.
    """

    store: ScaleStore
    unit: torch.Tensor | None
    rounding: Rounding | None

    @classmethod
    def of(cls, scheme: Scheme, unit: torch.Tensor | None, device: torch.device) -> "Holder":
        """The holder of a scheme's scales."""
        if isinstance(scheme.scale, AbstractFormat):
            return cls(ScaleStore(scheme.scale), unit, Rounding.of(scheme.scale, device))
        return cls(ScaleStore(np.dtype(scheme.scale)), unit, None)  # type: ignore[arg-type]

    def stored(self, scale: torch.Tensor) -> torch.Tensor:
        """The holder's form of each scale: the nearest number it has, never zero for a scale that is not."""
        scale = scale if self.unit is None else flushed(scale / self.unit)
        magnitude = scale.abs().clamp(self.store.smallest, self.store.largest)
        held = torch.where(scale == 0, 0.0, torch.copysign(magnitude, scale))
        if self.rounding is not None:
            return self.rounding.encode(held)
        return held.to(getattr(torch, self.store.holder.name))

    def loaded(self, stored: torch.Tensor) -> torch.Tensor:
        """The float32 scales of their stored form."""
        scale = stored.float() if self.rounding is None else self.rounding.decode(stored)
        return scale if self.unit is None else flushed(scale * self.unit)


def ideal_scale(tiles: Tiles, scheme: Scheme, holder: Holder) -> torch.Tensor:
    """The scale that the scheme's calibration chooses for each tile, float32; 0 for an all-zero tile."""
    calibration, fmt = scheme.calibration, scheme.format
    if isinstance(calibration, AbsMax):
        return over(tiles.amax * float(np.float32(calibration.factor)), fmt.bound)
    if isinstance(calibration, MX) and calibration.rule != "optimal":
        return _power(_ruled_exponent(calibration.rule, tiles.amax, fmt), tiles.amax)
    if isinstance(calibration, MX) or (isinstance(calibration, MSE) and isinstance(scheme.scale, E8M0)):
        return _best_power_of_two(tiles, fmt)
    if isinstance(calibration, MSE) and holder.rounding is not None:
        return _best_stored(tiles, fmt, holder)
    if isinstance(calibration, MSE):
        return _best_fraction(tiles, fmt, holder, np.linspace(1.0, calibration.low, int(calibration.steps)))
    assert isinstance(calibration, SNR)
    fractions = np.arange(1.0, calibration.low - calibration.step / 2, -calibration.step)
    return _best_fraction(tiles, fmt, holder, fractions)


def check_supported(scheme: Scheme) -> None:
    """Raises UnsupportedError, with every reason, for a scheme that this face does not quantize to."""
    reasons = {}
    if scheme.zero_point is not None:
        reasons["zero_point"] = "schemes with a zero point are quantized by fewbit.quantize only"
    if isinstance(scheme.scale, Scheme):
        reasons["scale"] = "scales that are quantized themselves are quantized by fewbit.quantize only"
    if scheme.packing.to_json():
        reasons["packing"] = f"codes are packed in order, not as {scheme.packing}"
    if not isinstance(scheme.calibration, AbsMax | MX | MSE | SNR):
        reasons["calibration"] = f"absmax, mx, mse and snr are here, not {scheme.calibration}"
    if reasons:
        raise UnsupportedError(f"fewbit.torch cannot quantize to {scheme.name}", reasons)


def _ruled_exponent(rule: str, amax: torch.Tensor, fmt: AbstractFormat) -> torch.Tensor:
    """The exponent of a power of two by one of the rules that do not search."""
    if rule == "floor":
        return _exponent_of(amax) - _top_exponent(fmt)
    if rule in ("even", "threshold"):
        mantissa = fmt.mantissa if isinstance(fmt, Minifloat) else fmt.bits - 2
        added = 1 << (22 - mantissa) if rule == "even" else above_threshold(fmt)
        rounded = (amax.view(torch.int32) + added).view(torch.float32)
        return _exponent_of(rounded) - _top_exponent(fmt)
    return _unsaturated_exponent(amax, fmt)


def _best_power_of_two(tiles: Tiles, fmt: AbstractFormat) -> torch.Tensor:
    """The power of two of least error."""
    search, amax = Search.of(tiles, fmt), tiles.amax
    ceiling = _unsaturated_exponent(amax, fmt)
    search.start(_power(ceiling, amax))
    halvings = needed_halvings(fmt, tiles.x.shape[1])
    for step in (*range(1, needed_doublings(fmt) + 1), *range(-halvings, 0)):
        search.consider(_power(ceiling + step, amax))
    return search.scale


def _best_stored(tiles: Tiles, fmt: AbstractFormat, holder: Holder) -> torch.Tensor:
    """The best scale among the numbers of the format that holds the scales."""
    held, amax = holder.store.holder, tiles.amax
    assert isinstance(held, AbstractFormat)
    grid = torch.tensor(stored_scales(held), dtype=torch.float32, device=amax.device)
    needed = flushed(over(amax, fmt.bound))
    needed = needed if holder.unit is None else flushed(needed / holder.unit)
    ceiling = torch.bucketize(needed, grid).clamp(max=len(grid) - 1)

    def scale_at(place: torch.Tensor) -> torch.Tensor:
        scale = grid[place.clamp(0, len(grid) - 1)]
        return scale if holder.unit is None else flushed(scale * holder.unit)

    search = Search.of(tiles, fmt)
    search.start(scale_at(ceiling))
    proven = proven_window(fmt, held, tiles.x.shape[1])
    ends = proven or (np.arange(len(grid)), last_useful_scale(fmt, held))
    first, last = (torch.tensor(end, device=amax.device)[ceiling] for end in ends)
    for step in range(int((last - first).max()) + 1):
        search.consider(scale_at(first + step))
    for step in range(1, 1 if proven else int(ceiling.max()) + 1):
        if not search.can_gain(scale_at(ceiling - step)):
            break
        search.consider(scale_at(ceiling - step))
    return torch.where(amax > 0, search.scale, 0.0)


def _best_fraction(tiles: Tiles, fmt: AbstractFormat, holder: Holder, fractions: np.ndarray) -> torch.Tensor:
    """The best of the given fractions of the full range."""
    search, amax = Search.of(tiles, fmt), tiles.amax
    for fraction in fractions.astype(np.float32):
        scale = holder.loaded(holder.stored(flushed(over(amax * float(fraction), fmt.bound))))
        search.consider(scale)
    return search.scale


@dataclasses.dataclass
class Search:
    """The best scale of each tile so far; a tie, errors equal to 16 bits, keeps the one that was tried first.

    Tiles are held in units of powers of two near their largest magnitudes, so that no square overflows.
    """

    x: torch.Tensor
    valid: torch.Tensor | None
    inverse: torch.Tensor
    format: AbstractFormat
    rounding: Rounding
    scale: torch.Tensor
    error: torch.Tensor

    @classmethod
    def of(cls, tiles: Tiles, fmt: AbstractFormat) -> "Search":
        """A search that has tried nothing."""
        inverse = _power_of_two(-_exponent_of(tiles.amax).clamp(-126, 126))
        x = flushed(tiles.x * inverse[:, None])
        nothing = torch.full_like(inverse, torch.inf)
        return cls(x, tiles.valid, inverse, fmt, Rounding.of(fmt, x.device), torch.zeros_like(inverse), nothing)

    def start(self, scale: torch.Tensor) -> None:
        """Tries the first scale, which is kept whatever its error."""
        self.scale, self.error = scale, self._error(scale)

    def consider(self, scale: torch.Tensor) -> None:
        """Tries a scale."""
        error = self._error(scale)
        is_lower = error < self.error * TIE
        self.scale = torch.where(is_lower, scale, self.scale)
        self.error = torch.where(is_lower, error, self.error)

    def can_gain(self, scale: torch.Tensor) -> bool:
        """Whether for some tile this scale, or a smaller one, may be better: elements beyond the largest number cost that much."""
        scale, fmt = (scale * self.inverse)[:, None], self.format
        excess = torch.maximum(self.x - fmt.max * scale, fmt.min * scale - self.x).clamp(min=0)
        return bool((excess.square().sum(1) < self.error).any())

    def _error(self, scale: torch.Tensor) -> torch.Tensor:
        """The squared error of each tile under a scale, in units of the tile."""
        scale = (scale * self.inverse).clamp(min=2.0**-120)[:, None]
        off = self.rounding.nearest(self.x * (1 / scale)) * scale - self.x
        off = off if self.valid is None else torch.where(self.valid, off, 0.0)
        return off.square().sum(1)


def _power(exponent: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """`2**exponent` within float32's normal range; 0 for an all-zero tile."""
    return torch.where(amax > 0, _power_of_two(exponent.clamp(-126, 127)), 0.0)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """`2.0 ** exponent` for exponents in -126..127, from the bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _exponent_of(x: torch.Tensor) -> torch.Tensor:
    """`floor(log2(|x|))` from the bits; -127 for zero."""
    return ((x.view(torch.int32) >> 23) & 0xFF) - 127


def _top_exponent(fmt: AbstractFormat) -> int:
    """The exponent of the format's largest number."""
    return int(np.frexp(fmt.max)[1]) - 1


def _unsaturated_exponent(amax: torch.Tensor, fmt: AbstractFormat) -> torch.Tensor:
    """The smallest `e` with `amax <= fmt.max * 2**e`, from the bits of both."""
    top = int(np.float32(fmt.max).view(np.int32)) & 0x7FFFFF
    return _exponent_of(amax) - _top_exponent(fmt) + ((amax.view(torch.int32) & 0x7FFFFF) > top).int()

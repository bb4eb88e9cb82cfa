"""Fast NVFP4 calibrations: a few E4M3 scales instead of `mse`'s search."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import QuantError, UnsupportedError
from ...formats.format import AbstractFormat, looked_up, quotient
from ...formats.minifloat import Minifloat
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles
from .search.candidates import stored_scales
from .search.stored import Best, Trials, first_unsaturated

_RULES = ("cheap6", "four_over_six")
_OFFSETS = (0, -1, -2, 3, 4, 5)
_LARGEST_FOUR_OVER_SIX = 256.0


@dataclasses.dataclass(frozen=True)
class NVFP4(AbstractCalibration):
    """The best of a few E4M3 scales, with or without a tensor scale.

    - "cheap6": the best of six scales: the smallest that saturates nothing, the two codes below it, and the 3rd, 4th and
      5th above it (which map the largest element to 4). Half the work of the exact search; on weights within half a percent
      of its squared error.
    - "four_over_six": maps the largest element to 6 or to 4, whichever has the lower squared error: the scales `amax / 6`
      and `1.5 amax / 6`, each rounded to the nearest E4M3. The tensor scale maps the tensor's largest element to 256 times
      6, since 1.5 times 448 is not an E4M3 number. E2M1 only.

    Ties go to the candidate named first.

    Attributes:
        rule: one of the above.

    Reference: Four Over Six (arXiv 2512.02010).
    """

    name: ClassVar[str] = "nvfp4"
    uses_error_weights: ClassVar[bool] = True
    rule: str = "cheap6"

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise QuantError(f"nvfp4: rule is {self.rule!r}, must be one of {', '.join(_RULES)}; the exact search is mse")

    def largest_stored(self, holder: AbstractFormat | np.dtype) -> float | None:
        return {"four_over_six": _LARGEST_FOUR_OVER_SIX}.get(self.rule)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        fmt, holder = target.format, target.store.holder
        if target.asymmetric or not isinstance(holder, Minifloat) or holder.mantissa != 3:
            raise UnsupportedError(f"nvfp4,{self.rule} needs a symmetric scheme whose scales are stored in E4M3")
        if self.rule == "four_over_six" and fmt.name != "e2m1":
            raise UnsupportedError(f"nvfp4,four_over_six is a rule for e2m1, not {fmt.name}")
        trials = Trials.of(tiles, fmt)
        amax = jax.lax.stop_gradient(tiles.amax)
        if self.rule == "cheap6":
            scales = _six(amax, target)
        else:
            six = quotient(amax, jnp.float32(fmt.bound))
            scales = [target.store.snapped(scale) for scale in (six, six * 1.5)]
        best: Best = scales[0], trials.error(scales[0])
        for scale in scales[1:]:
            best = trials.better(scale, best)
        return jnp.where(amax > 0, best[0], jnp.zeros_like(best[0])), None


CALIBRATIONS.add("nvfp4", NVFP4)


def _six(amax: jax.Array, target: Target) -> list[jax.Array]:
    """The six scales around the smallest that saturates nothing."""
    holder, unit = target.store.holder, target.store.unit
    assert isinstance(holder, AbstractFormat)
    grid = stored_scales(holder).astype(np.float32)
    ceiling = first_unsaturated(amax, target, grid)
    scales = [looked_up(grid, jnp.clip(ceiling + offset, 0, len(grid) - 1)) for offset in _OFFSETS]
    if unit is None:
        return scales
    return [scale * unit for scale in scales]

"""Power-of-two scales of the OCP Microscaling formats.

Every rule starts from the largest magnitude `a = m * 2**E` of the tile (`1 <= m < 2`) and the largest number of the format,
`f = g * 2**F` (`1 <= g < 2`). All work on the bits of the floats, so they are exact at powers of two.

Why two candidates suffice for the optimum: doubling the scale of a float format with subnormals (or of an integer) gives, up
to the largest number, a subset of the old grid. So no scale above the smallest that saturates nothing (rceil) can be better.
Below it, the largest element saturates and costs more with every halving, while each of the others gains at most a sixteenth
of a squared scale: for E2M1 and tiles of at most 145 elements half of rceil can win, a quarter never.
`candidates.needed_halvings` has the bound for other formats and longer tiles.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import QuantError, UnsupportedError
from ...formats.format import AbstractFormat, exponent_of, power_of_two
from ...formats.minifloat import Minifloat
from .calibration import CALIBRATIONS, AbstractCalibration, Scale, Target, Tiles
from .search.stored import best_power_of_two

_RULES = ("floor", "rceil", "even", "threshold", "optimal")


@dataclasses.dataclass(frozen=True)
class MX(AbstractCalibration):
    """A power-of-two scale for each tile, by one of five rules.

    - "floor": `2**(E - F)`, the OCP specification's rule; saturates up to a quarter of the largest element.
    - "rceil": the smallest power of two that saturates nothing, `2**ceil(log2(a / f))` (NVIDIA).
    - "even": the floor rule after `a` is rounded to the format's mantissa: up when `m` reaches the midpoint above `g`
      (torchao's EVEN, compressed-tensors; 1.75 for E2M1).
    - "threshold": the floor rule, doubled when `m >= 1.8125`; E2M1 only. On weights in tiles of 32 its squared error is
      within half a percent of the least, without a search.
    - "optimal": least (weighted) squared error among all powers of two, see `fewbit.array.scales.search.candidates`. E2M1 in tiles
      up to 145 elements needs two candidates, rceil and rceil / 2; with weights the search continues while any tile can
      gain. Ties go to the larger scale, see `is_lower`.

    Attributes:
        rule: one of the above.

    References: OCP Microscaling Formats 1.0, section 6.3; NVIDIA PTX ISA, cvt.rp.satfinite.ue8m0x2.
    """

    name: ClassVar[str] = "mx"
    rule: str = "floor"

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise QuantError(f"mx: rule is {self.rule!r}, must be one of {', '.join(_RULES)}")

    @property
    def uses_error_weights(self) -> bool:
        return self.rule == "optimal"

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        if target.asymmetric:
            raise UnsupportedError("mx scales are symmetric; use another calibration with a zero point")
        if self.rule == "optimal":
            return best_mx(tiles, target.format), None
        amax = tiles.amax
        return _power(_ruled_exponent(self.rule, amax, target.format), amax), None


CALIBRATIONS.add("mx", MX)


def bits_added(rule: str, fmt: AbstractFormat) -> int:
    """The number that a rule adds to the bits of `amax`. It is below `2**23`, and is added before the exponent is taken.

    That exponent minus the exponent of `fmt.max` is the scale's. The rule "optimal" has its start, that of "rceil".

    >>> [bits_added(rule, fb.FORMATS["e2m1"]) / 2**23 for rule in ("floor", "even", "threshold", "rceil")]
    [0.0, 0.25, 0.1875, 0.49999988079071045]
    """
    if rule == "floor":
        return 0
    if rule == "even":
        return 1 << (22 - _mantissa_bits(fmt))
    if rule == "threshold":
        if fmt.name != "e2m1":
            raise UnsupportedError(f"mx,threshold is known for e2m1 only, not {fmt.name}; use mx,even")
        return int((2 - 1.8125) * 2**23)
    # Every mantissa above that of the format's largest number carries into the exponent.
    return (1 << 23) - 1 - (int(np.float32(fmt.max).view(np.int32)) & 0x7FFFFF)


def best_mx(tiles: Tiles, fmt: AbstractFormat) -> jax.Array:
    """The power of two of least (weighted) squared error. 0 for an all-zero tile."""
    amax = jax.lax.stop_gradient(tiles.amax)
    ceiling = _ruled_exponent("rceil", amax, fmt)
    return best_power_of_two(tiles, fmt, ceiling, lambda exponent: _power(exponent, amax))


def _ruled_exponent(rule: str, amax: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The exponent of the scale by a rule without search, int32."""
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32) + bits_added(rule, fmt)
    return exponent_of(jax.lax.bitcast_convert_type(bits, jnp.float32)) - _exponent(fmt)


def _power(exponent: jax.Array, amax: jax.Array) -> jax.Array:
    """`2**exponent` within float32's normal range. 0 for an all-zero tile, NaN for one that is not finite."""
    # 2**-127 is subnormal, and dividing by it is not safe on all devices.
    power = power_of_two(jnp.clip(exponent, -126, 127))
    return jnp.where(amax > 0, jnp.where(jnp.isfinite(amax), power, jnp.nan), jnp.zeros_like(amax))


def _exponent(fmt: AbstractFormat) -> int:
    """The exponent of the format's largest number."""
    return int(np.frexp(fmt.max)[1]) - 1


def _mantissa_bits(fmt: AbstractFormat) -> int:
    """The bits after the leading one of the largest numbers."""
    if isinstance(fmt, Minifloat):
        return fmt.mantissa
    return fmt.bits - 2

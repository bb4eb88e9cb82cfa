"""Range estimators: amax, min-max, mean, moving average, percentile."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._explicit_mesh import with_auto_axes
from ..errors import QuantError
from .ranges import AbstractRange, RangeState, with_unit_axes


@dataclasses.dataclass(frozen=True)
class AbsMaxRange(AbstractRange):
    """`-a .. a` for the amax `a` of all batches.

    Attributes:
        axes: the axes whose elements keep a range each.
    """

    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        return _magnitude(x, within)

    def joined(self, earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
        return _outermost(earlier, later)


@dataclasses.dataclass(frozen=True)
class MinMaxRange(AbstractRange):
    """The minimum and maximum of all batches, extended to include 0; for zero points.

    Attributes:
        axes: the axes whose elements keep a range each.
    """

    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        x, is_nan = jnp.where(jnp.isnan(x), 0.0, x), jnp.isnan(x).any(within, keepdims=True)
        low, high = jnp.min(x, within, keepdims=True, initial=0.0), jnp.max(x, within, keepdims=True, initial=0.0)
        return jnp.where(is_nan, -jnp.inf, low), jnp.where(is_nan, jnp.inf, high)

    def joined(self, earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
        return _outermost(earlier, later)


@dataclasses.dataclass(frozen=True)
class MeanRange(AbstractRange):
    """`-a .. a` for the mean `a` of the batches' amax.

    It is Qwix's SimpleMovingAverage of them. Qwix averages the amax of a batch's rows first (`act_batch_axes`), so its ranges are
    smaller for batches of several rows.

    Attributes:
        axes: the axes whose elements keep a range each.
    """

    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        return _magnitude(x, within)

    def joined(self, earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
        return _averaged(earlier, later, 1.0)


@dataclasses.dataclass(frozen=True)
class EMARange(AbstractRange):
    """`-a .. a` for the exponential moving average `a` of the batches' amax.

    The weights of the last batch, the one before it, .. are `1, decay, decay**2, ..` over their sum, without bias to 0.

    Attributes:
        decay: above 0 and below 1; larger forgets more slowly.
        axes: the axes whose elements keep a range each.
    """

    decay: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay < 1:
            raise QuantError(f"decay is {self.decay}, must be between 0 and 1 (MeanRange weighs all batches equally)")

    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        return _magnitude(x, within)

    def joined(self, earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
        return _averaged(earlier, later, self.decay)


@dataclasses.dataclass(frozen=True)
class PercentileRange(AbstractRange):
    """`-a .. a` for the mean `a` of each batch's `percent`-th percentile of magnitudes.

    Attributes:
        percent: above 0, up to 100; interpolated linearly, as `numpy.percentile` does.
        axes: the axes whose elements keep a range each.
    """

    percent: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.percent <= 100:
            raise QuantError(f"percent is {self.percent}, must be above 0 and at most 100")

    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        is_finite = jnp.isfinite(x).all(within, keepdims=True)
        high = jnp.abs(x)
        if within:
            quantile = functools.partial(jnp.quantile, q=self.percent / 100, axis=within, keepdims=True)
            high = with_auto_axes(quantile, high, reduced=within)
        high = jnp.where(is_finite, high, jnp.inf)
        return -high, high

    def joined(self, earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
        return _averaged(earlier, later, 1.0)


def _magnitude(x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
    """`-amax, amax`; infinite where there is a NaN, which XLA's maximum may drop."""
    high = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), axis=within, keepdims=True)
    return -high, high


def _outermost(earlier: RangeState, later: RangeState) -> tuple[Array, Array]:
    return jnp.minimum(earlier.low, later.low), jnp.maximum(earlier.high, later.high)


def _averaged(earlier: RangeState, later: RangeState, decay: float) -> tuple[Array, Array]:
    """The weighted average of both; `later` decays the weights of `earlier`."""
    old = _weight(earlier.count, decay) * jnp.float32(decay) ** later.count.astype(jnp.float32)
    new = _weight(later.count, decay)
    share = with_unit_axes(new / jnp.maximum(old + new, jnp.finfo(jnp.float32).tiny), earlier.low)

    def mean(a: Array, b: Array) -> Array:
        return jnp.where(share == 0, a, jnp.where(share == 1, b, a + share * (b - a)))

    return mean(earlier.low, later.low), mean(earlier.high, later.high)


def _weight(count: Array, decay: float) -> Array:
    """`1 + decay + decay**2 + ..`, a term for each batch."""
    n = count.astype(jnp.float32)
    if decay == 1:
        return n
    return -jnp.expm1(n * np.float32(np.log(decay))) / np.float32(1 - decay)

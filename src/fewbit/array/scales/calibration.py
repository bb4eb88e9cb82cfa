"""What a calibration is: the rule that chooses the scale of each tile, and the offset where the scheme has one."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._registry import Registry
from ...errors import QuantError
from ...formats import AbstractFormat
from ...formats.format import exponent_of, power_of_two, quotient, settled
from .limits import LARGEST, OFFSET_END, largest_step
from .store import ScaleStore

_TINY = np.float32(np.finfo(np.float32).tiny)

Scale: TypeAlias = tuple[jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """An array cut into tiles, as calibrations see it.

    Attributes:
        x: float32, one axis (or two: tiles, elements) for each axis of the array, see `fewbit._tiles.blocked`.
        within: the axes of `x` over which one tile extends. Every per-tile result keeps them, with length 1.
        valid: which elements are real, where the last tile is short; None when all are.
        weights: how much the squared error of each element counts, shaped like `x`; None when all count alike.
    """

    x: jax.Array
    within: tuple[int, ...]
    valid: jax.Array | None = None
    weights: jax.Array | None = None

    def over(self, reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        """`reduce` (such as `jnp.max`) over each tile; what fills a short tile counts as 0."""
        return reduce(self._filled(values), axis=self.within, keepdims=True)

    def _filled(self, values: jax.Array) -> jax.Array:
        """The values with zeros in what fills a short tile."""
        return values if self.valid is None else jnp.where(self.valid, values, 0)

    @property
    def count(self) -> jax.Array:
        """How many real elements each tile has, float32."""
        return self.over(jnp.sum, jnp.ones_like(self.x))

    @property
    def amax(self) -> jax.Array:
        """The largest magnitude of each tile; infinite where the tile has a NaN, which XLA's maximum may lose.

        The maximum and the minimum of the bare array, because XLA on CPU reduces a fused expression such as `|x|` up to
        ten times slower.
        """
        largest = jnp.maximum(self.over(jnp.max, self.x), -self.over(jnp.min, self.x))
        return jnp.where(self.is_finite, largest, jnp.full_like(largest, jnp.inf))

    @property
    def is_finite(self) -> jax.Array:
        """Whether each tile is free of NaN and infinity.

        Told from the tile's sum in units of 2**64, which finite numbers cannot overflow.
        """
        return jnp.isfinite(self.total(self.x, 2.0**-64))

    def total(self, values: jax.Array, unit: float = 1.0) -> jax.Array:
        """The sum of the values of each tile, times `unit`.

        As a product with a vector, since that is a matrix product and takes no longer than reading the array.
        """
        units = jnp.full([self.x.shape[axis] for axis in self.within], unit, jnp.float32)
        numbers = ((self.within, tuple(range(len(self.within)))), ((), ()))
        total = jax.lax.dot_general(self._filled(values), units, numbers, precision=jax.lax.Precision.HIGHEST)
        return jnp.expand_dims(total, self.within)

    @property
    def exponent(self) -> jax.Array:
        """The exponent of the largest magnitude, int32: squares and sums in units of this power of two never overflow."""
        return jnp.clip(exponent_of(self.amax), -126, 126)

    def mean(self, values: jax.Array, exponent: jax.Array) -> jax.Array:
        """The mean of each tile, summed in units of `2**exponent`, which loses nothing."""
        total = self.over(jnp.sum, values * power_of_two(-exponent))
        return quotient(total, self.count) * power_of_two(exponent)

    def error(self, approximation: jax.Array) -> jax.Array:
        """The (weighted) sum of squared errors of each tile, in units of `4**exponent`."""
        return self.weighted_total(jnp.square((approximation - self.x) * power_of_two(-self.exponent)))

    def weighted_total(self, values: jax.Array) -> jax.Array:
        """The sum of the values of each tile, each times its weight where there are weights."""
        return self.total(values if self.weights is None else values * self.weights)


@dataclasses.dataclass(frozen=True)
class Target:
    """What the scales are for.

    Attributes:
        format: the format of the codes.
        store: how the scales are held, so that a search can try the very scales that can be stored.
        zero: how zero points are held: a format for whole zero points, a dtype for float offsets, None for neither.
    """

    format: AbstractFormat
    store: ScaleStore
    zero: AbstractFormat | np.dtype | None = None

    @property
    def asymmetric(self) -> bool:
        """Whether the range need not be centred at zero."""
        return self.zero is not None

    def stored_zero(self, offset: jax.Array, scale: jax.Array) -> jax.Array:
        """The stored form of an offset: the code of `round(-offset / scale)`, or the offset itself as a float.

        A whole zero point stays where no code stands for more than float32 holds, on either side of it; that changes nothing for
        scales below `LARGEST / (max - min)`.
        """
        if isinstance(self.zero, AbstractFormat):
            return self.zero.encode(self._within_float32(quotient(-offset, scale), scale))
        largest = float(jnp.finfo(self.zero).max)
        return jnp.clip(offset, -largest, largest).astype(self.zero)

    def stored_zero_up(self, offset: jax.Array, scale: jax.Array) -> jax.Array:
        """The stored form of an offset, rounded so that no element below the range is cut: see `unsaturated`."""
        if isinstance(self.zero, AbstractFormat):
            return self.zero.encode(self._within_float32(jnp.ceil(quotient(-offset, scale)), scale))
        stored = self.stored_zero(offset, scale)
        lowest = jnp.full_like(stored, -jnp.inf)
        return jnp.where(stored.astype(jnp.float32) > offset, jnp.nextafter(stored, lowest), stored)

    def _within_float32(self, zero: jax.Array, scale: jax.Array) -> jax.Array:
        """A whole zero point, kept where the codes on both sides of it are finite under the scale."""
        most = jnp.floor(jnp.minimum(quotient(jnp.full_like(scale, LARGEST), scale), jnp.float32(2.0**20)))
        side = jnp.where(most * scale > LARGEST, most - 1, most)
        return jnp.minimum(jnp.maximum(zero, self.format.max - side), self.format.min + side)

    def loaded_offset(self, stored: jax.Array, scale: jax.Array) -> jax.Array:
        """The float32 offset, the number that code value 0 stands for, of its stored form."""
        if isinstance(self.zero, AbstractFormat):
            return settled(-self.zero.decode(stored) * scale)
        return stored.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class AbstractCalibration(abc.ABC):
    """A rule that chooses scales; a frozen dataclass whose fields are numbers or words.

    Its text form is the name and the fields that follow, as in `"absmax,0.9"`; `parse_calibration` reads it back.
    """

    name: ClassVar[str]

    @property
    def uses_error_weights(self) -> bool:
        """Whether the choice depends on error weights; passing them to a rule that ignores them is an error."""
        return False

    @property
    def clips(self) -> bool:
        """Whether elements may be left outside the range on purpose.

        A straight-through gradient stops there, and stochastic rounding does not widen the range for them.
        """
        return False

    @property
    def searches_tensor_scale(self) -> bool:
        """Whether the tensor scale of a two-level scheme is chosen by the error that it leaves, see `best_tensor_scale`."""
        return False

    def largest_stored(self, holder: AbstractFormat | np.dtype) -> float | None:
        """What a tensor scale takes the largest scale to, in numbers of `holder`; None for the largest that it has."""
        return None

    @abc.abstractmethod
    def scale(self, tiles: Tiles, target: Target) -> Scale:
        """The scale of each tile, and its offset.

        Returns:
            The scale, and for an asymmetric target the number that code 0 of an unsigned format stands for (the lower end
            of the range), else None. Both float32 with the axes of `tiles.x`, those of `tiles.within` of length 1.
        """

    @classmethod
    def parse(cls, words: tuple[str, ...]) -> Self:
        """The calibration whose fields are `words`, in order; the numbers among them are read as numbers."""
        fields = dataclasses.fields(cls)
        if len(words) > len(fields):
            names = ", ".join(f.name for f in fields) or "none"
            raise QuantError(f"calibration {cls.name!r} takes at most {len(fields)} values ({names}), got {len(words)}")
        missing = [f.name for f in fields[len(words) :] if f.default is dataclasses.MISSING]
        if missing:
            raise QuantError(f"calibration {cls.name!r} needs a value for {', '.join(missing)}, as in '{cls.name},7'")
        return cls(*(_number_or_word(word) for word in words))

    def __str__(self) -> str:
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        defaults = [f.default for f in dataclasses.fields(self)]
        while values and values[-1] == defaults[len(values) - 1]:
            values.pop()
        return ",".join([self.name, *map(_text, values)])


CALIBRATIONS: Registry[type[AbstractCalibration]] = Registry("calibration")
"""Every calibration by the first word of its text form."""


def parse_calibration(text: str) -> AbstractCalibration:
    """The calibration of a text such as `"absmax"`, `"absmax,0.9"` or `"fixed,-0.6,0.6"`.

    Args:
        text: the name, and after commas the values of its fields in order; trailing ones may be left out.

    Returns:
        The calibration.

    Raises:
        QuantError: for an unknown name, too many values, or values that the calibration refuses.

    >>> parse_calibration("fixed,-0.6,0.6")
    Fixed(low=-0.6, high=0.6)
    """
    name, *words = (word.strip() for word in text.split(","))
    return CALIBRATIONS[name].parse(tuple(words))


def is_lower(found: jax.Array, best: jax.Array) -> jax.Array:
    """Whether an error is lower than the best so far by more than `2**-16` of that.

    Both are float32 sums, each off by at most `n * 2**-24` of itself for n elements. So the error of the scale that a search
    ends with is above the least by at most about `2**-16 + n * 2**-23` of it: 1.9e-5 for 32 elements, 4.6e-5 for 256.

    Two scales often give the very same error (the grid of one contains the other's). A plain comparison would choose
    between them by the order in which XLA adds, so by whether the program is jitted or the tile is on another axis.
    """
    return found < best * jnp.float32(1 - 2.0**-16)


def symmetric_or_range(low: jax.Array, high: jax.Array, target: Target) -> Scale:
    """The scale (and offset) that spreads the range from `low` to `high` over the codes of the target.

    Symmetric: `max(-low, high) / bound`. Asymmetric: `(high - low) / (max - min)`, and the offset is `low - min * scale`,
    the number that the code of value 0 stands for. A range that exceeds float32 is divided by halves; `limits` says how its
    scale and a float offset are kept where all codes are finite. A float offset of zero is +0.
    """
    fmt = target.format
    has_offset = target.asymmetric and not isinstance(target.zero, AbstractFormat)
    end = jnp.float32(OFFSET_END if has_offset else LARGEST)
    low, high = jnp.maximum(low, -end), jnp.minimum(high, end)
    if not target.asymmetric:
        return quotient(jnp.maximum(-low, high), jnp.float32(fmt.bound)), None
    codes, step = jnp.float32(fmt.max - fmt.min), jnp.float32(largest_step(fmt))
    is_whole = high - low <= LARGEST
    half = quotient(high * jnp.float32(0.5) - low * jnp.float32(0.5), codes * jnp.float32(0.5))
    scale = jnp.where(is_whole, quotient(jnp.where(is_whole, high - low, jnp.zeros_like(low)), codes), half)
    fitting = jnp.minimum(scale, step)
    if not has_offset:
        scale = jnp.where(is_whole, fitting, scale)
        return scale, low - jnp.float32(fmt.min) * scale
    low = jnp.where(scale > fitting, low * quotient(fitting, scale), low)
    offset = low - jnp.float32(fmt.min) * fitting
    return fitting, jnp.where(jnp.abs(offset) < _TINY, jnp.zeros_like(offset), offset)


def check_positive(name: str, field: str, value: object) -> None:
    """Refuses a field that is not a positive finite number."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise QuantError(f"{name}: {field} is {value!r}, must be a positive number")


def _text(value: object) -> str:
    """The shortest text that reads back as the same number."""
    return str(value).removesuffix(".0")


def _number_or_word(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word

"""The interface of calibrations, which choose scales."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._registry import Registry
from ...errors import QuantError
from ...formats.format import AbstractFormat, exponent_of, power_of_two, quotient, settled
from .limits import LARGEST, OFFSET_END, largest_step
from .store import ScaleStore

_TINY = np.float32(np.finfo(np.float32).tiny)

Scale: TypeAlias = tuple[jax.Array, jax.Array | None]


def largest_magnitude(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """The largest magnitude along axes, which are kept with length 1. May lose a NaN, as XLA's maximum does.

    XLA's CPU backend reduces a fused expression such as `|x|` up to ten times slower.
    """
    return jnp.maximum(jnp.max(x, axis=axis, keepdims=True), -jnp.min(x, axis=axis, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A blocked array, the input of calibrations.

    Attributes:
        x: float32, one axis (or two: tiles, elements) for each axis of the array, see `fewbit._tiles.blocked`.
        within: the axes of `x` over which one tile extends. Per-tile results keep them, with length 1.
        valid: False for the padding of short tiles; None if there is none.
        weights: weights of the squared errors, shaped like `x`; None: all equal.
    """

    x: jax.Array
    within: tuple[int, ...]
    valid: jax.Array | None = None
    weights: jax.Array | None = None

    def over(self, reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
        """`reduce` (such as `jnp.max`) over each tile; padding counts as 0."""
        return reduce(self.padded(values, 0), axis=self.within, keepdims=True)

    def padded(self, values: jax.Array, fill: int | float) -> jax.Array:
        """The values with `fill` in the padding of short tiles."""
        if self.valid is None:
            return values
        return jnp.where(self.valid, values, fill)

    @property
    def count(self) -> jax.Array:
        """The number of elements of each tile without padding, float32."""
        return self.over(jnp.sum, jnp.ones_like(self.x))

    @property
    def amax(self) -> jax.Array:
        """The largest magnitude of each tile; infinite if the tile has a NaN."""
        largest = largest_magnitude(self.padded(self.x, 0), self.within)
        return jnp.where(self.is_finite, largest, jnp.full_like(largest, jnp.inf))

    @property
    def is_finite(self) -> jax.Array:
        """Whether each tile is free of NaN and infinity."""
        return jnp.isfinite(self.total(self.x, 2.0**-64))  # in units of 2**64 a sum of finite numbers cannot overflow

    def total(self, values: jax.Array, unit: float = 1.0) -> jax.Array:
        """The sum of the values of each tile, times `unit`. A matrix-vector product, at memory speed."""
        units = jnp.full([self.x.shape[axis] for axis in self.within], unit, jnp.float32)
        numbers = ((self.within, tuple(range(len(self.within)))), ((), ()))
        total = jax.lax.dot_general(self.padded(values, 0), units, numbers, precision=jax.lax.Precision.HIGHEST)
        return jnp.expand_dims(total, self.within)

    @property
    def exponent(self) -> jax.Array:
        """The exponent of `amax`, int32. Squares and sums in units of `2**exponent` never overflow."""
        return jnp.clip(exponent_of(self.amax), -126, 126)

    def mean(self, values: jax.Array, exponent: jax.Array) -> jax.Array:
        """The mean of each tile, summed in units of `2**exponent` (exact)."""
        total = self.over(jnp.sum, values * power_of_two(-exponent))
        return quotient(total, self.count) * power_of_two(exponent)

    def error(self, approximation: jax.Array) -> jax.Array:
        """The weighted sum of squared errors of each tile, in units of `4**exponent`."""
        return self.weighted_total(jnp.square((approximation - self.x) * power_of_two(-self.exponent)))

    def weighted_total(self, values: jax.Array) -> jax.Array:
        """The weighted sum of the values of each tile."""
        if self.weights is not None:
            values = values * self.weights
        return self.total(values)


@dataclasses.dataclass(frozen=True)
class Target:
    """The formats of codes, scales and zero points that a calibration chooses scales for.

    Attributes:
        format: the format of the codes.
        store: the storage of scales, so that searches try exactly the storable ones.
        zero: the storage of zero points: a format for integers, a dtype for float offsets, None for neither.
    """

    format: AbstractFormat
    store: ScaleStore
    zero: AbstractFormat | np.dtype | None = None

    @property
    def asymmetric(self) -> bool:
        """Whether there are zero points or offsets."""
        return self.zero is not None

    def stored_zero(self, offset: jax.Array, scale: jax.Array) -> jax.Array:
        """The stored form of an offset. It is the code of `round(-offset / scale)`, or a float offset.

        An integer zero point is clipped so that all codes decode to finite numbers; no change for scales below
        `LARGEST / (max - min)`.
        """
        if isinstance(self.zero, AbstractFormat):
            return self.zero.encode(self._within_float32(quotient(-offset, scale), scale))
        largest = float(jnp.finfo(self.zero).max)
        return jnp.clip(offset, -largest, largest).astype(self.zero)

    def stored_zero_up(self, offset: jax.Array, scale: jax.Array) -> jax.Array:
        """The stored form of an offset, for scales without saturation.

        It is rounded so that the range's lower end does not saturate. See `unsaturated`.
        """
        if isinstance(self.zero, AbstractFormat):
            return self.zero.encode(self._within_float32(jnp.ceil(quotient(-offset, scale)), scale))
        stored = self.stored_zero(offset, scale)
        lowest = jnp.full_like(stored, -jnp.inf)
        return jnp.where(stored.astype(jnp.float32) > offset, jnp.nextafter(stored, lowest), stored)

    def _within_float32(self, zero: jax.Array, scale: jax.Array) -> jax.Array:
        """An integer zero point, clipped so that codes decode to finite numbers.

        That holds for codes on both sides of it.
        """
        most = jnp.floor(jnp.minimum(quotient(jnp.full_like(scale, LARGEST), scale), jnp.float32(2.0**20)))
        side = jnp.where(most * scale > LARGEST, most - 1, most)
        return jnp.minimum(jnp.maximum(zero, self.format.max - side), self.format.min + side)

    def loaded_offset(self, stored: jax.Array, scale: jax.Array) -> jax.Array:
        """The float32 offset (the value of code 0) of its stored form."""
        if isinstance(self.zero, AbstractFormat):
            return settled(-self.zero.decode(stored) * scale)
        return stored.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class AbstractCalibration(abc.ABC):
    """A rule that chooses scales; a frozen dataclass of numbers and words.

    Its text form is the name and the fields, as in `"absmax,0.9"`; `parse_calibration` reads it.
    """

    name: ClassVar[str]

    @property
    def uses_error_weights(self) -> bool:
        """Whether the choice depends on error weights. If not, passing them is an error."""
        return False

    @property
    def clips(self) -> bool:
        """Whether elements are clipped on purpose: without straight-through gradient, saturated by stochastic rounding."""
        return False

    @property
    def exceeds_amax(self) -> bool:
        """Whether ranges may exceed the largest magnitude of the array.

        Then a tensor scale is chosen for the largest of the calibration's own scales.
        """
        return False

    @property
    def searches_tensor_scale(self) -> bool:
        """Whether a tensor scale is searched, see `best_tensor_scale`."""
        return False

    def largest_stored(self, holder: AbstractFormat | np.dtype) -> float | None:
        """The number of `holder` that a tensor scale maps the largest scale to. None: its largest."""
        return None

    @abc.abstractmethod
    def scale(self, tiles: Tiles, target: Target) -> Scale:
        """The scale of each tile, and its offset for an asymmetric target, else None.

        The offset is the value of code 0. Both are float32 with the axes of `tiles.x`, those of `tiles.within` of length 1.
        """

    @classmethod
    def parse(cls, words: tuple[str, ...]) -> Self:
        """The calibration with these fields, in order; numbers are parsed."""
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
"""Every calibration by name."""


def parse_calibration(text: str) -> AbstractCalibration:
    """Parses a calibration such as `"absmax"`, `"absmax,0.9"` or `"fixed,-0.6,0.6"`.

    Args:
        text: the name and, after commas, the values of its fields in order; trailing ones are optional.

    Returns:
        The calibration.

    Raises:
        QuantError: for an unknown name, too many values, or invalid values.

    >>> parse_calibration("fixed,-0.6,0.6")
    Fixed(low=-0.6, high=0.6)
    """
    name, *words = (word.strip() for word in text.split(","))
    return CALIBRATIONS[name].parse(tuple(words))


def is_lower(found: jax.Array, best: jax.Array) -> jax.Array:
    """Whether an error is lower than the best so far, by a relative `2**-16` or more.

    Two scales often give the same error (the grid of one contains the other's). Without the margin XLA's order of addition,
    so jit or the tile's axis, would decide. Both are float32 sums with relative error of at most `n * 2**-24` for n
    elements, so a search ends at most about `2**-16 + n * 2**-23` above the least error: 1.9e-5 for 32 elements, 4.6e-5 for
    256.
    """
    return found < best * jnp.float32(1 - 2.0**-16)


def better(found: tuple[jax.Array, ...], best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The candidate of lower error (the last element), per tile. A tie keeps `best`."""
    wins = is_lower(found[-1], best[-1])
    return tuple(jnp.where(wins, f, b) for f, b in zip(found, best, strict=True))


def symmetric_or_range(low: jax.Array, high: jax.Array, target: Target) -> Scale:
    """The scale (and offset) that maps the range `low .. high` to the codes of the target.

    Symmetric: `max(-low, high) / bound`. Asymmetric: `(high - low) / (max - min)`, with the offset `low - min * scale`, the
    value of code 0. Where only powers of two are stored (E8M0), the scale is rounded up to one, so that nothing in the range
    saturates. A range wider than float32 is computed in halves, and limited as `limits` describes. A float offset of zero is
    +0.
    """
    fmt = target.format
    has_offset = target.asymmetric and not isinstance(target.zero, AbstractFormat)
    end = jnp.float32(OFFSET_END if has_offset else LARGEST)
    low, high = jnp.maximum(low, -end), jnp.minimum(high, end)
    if not target.asymmetric:
        return target.store.covering(quotient(jnp.maximum(-low, high), jnp.float32(fmt.bound))), None
    codes, step = jnp.float32(fmt.max - fmt.min), jnp.float32(largest_step(fmt))
    is_whole = high - low <= LARGEST
    half = quotient(high * jnp.float32(0.5) - low * jnp.float32(0.5), codes * jnp.float32(0.5))
    scale = jnp.where(is_whole, quotient(jnp.where(is_whole, high - low, jnp.zeros_like(low)), codes), half)
    scale = target.store.covering(scale)
    fitting = jnp.minimum(scale, step)
    if not has_offset:
        scale = jnp.where(is_whole, fitting, scale)
        return scale, low - jnp.float32(fmt.min) * scale
    low = jnp.where(scale > fitting, low * quotient(fitting, scale), low)
    offset = low - jnp.float32(fmt.min) * fitting
    return fitting, jnp.where(jnp.abs(offset) < _TINY, jnp.zeros_like(offset), offset)


def check_positive(name: str, field: str, value: object) -> None:
    """Raises QuantError for a field that is not a positive finite number."""
    if not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise QuantError(f"{name}: {field} is {value!r}, must be a positive number")


def _text(value: object) -> str:
    """The shortest text that parses to the same number."""
    return str(value).removesuffix(".0")


def _number_or_word(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word

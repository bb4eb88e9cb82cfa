"""How scales are held: as an array of a float dtype, as the codes of a format, or quantized themselves."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ...formats import E8M0, AbstractFormat
from ...formats.format import looked_up, quotient


@dataclasses.dataclass(frozen=True)
class ScaleStore:
    """The numbers that a stored scale can be: those of a format or of a float dtype, times a unit.

    Attributes:
        holder: a format whose codes are stored, or a float dtype.
        unit: what the number 1 of the holder stands for: the tensor scale where there is one, else 1. Float32.
        limit: no number above it is stored; see `fewbit.array.scales.limits`.
    """

    holder: AbstractFormat | np.dtype
    unit: jax.Array | None = None
    limit: float = math.inf

    @property
    def smallest(self) -> float:
        """The smallest positive number that the holder has (for a dtype of float32's exponent, the smallest normal one)."""
        if isinstance(self.holder, AbstractFormat):
            return max(self.holder.smallest, float(jnp.finfo(jnp.float32).tiny))
        return max(float(jnp.finfo(self.holder).smallest_subnormal), float(jnp.finfo(jnp.float32).tiny))

    @property
    def largest(self) -> float:
        """The largest finite number that the holder has up to the limit."""
        if isinstance(self.holder, AbstractFormat):
            return self.holder.max if self.holder.max <= self.limit else _largest_value(self.holder, self.limit)
        largest = float(jnp.finfo(self.holder).max)
        if largest <= self.limit:
            return largest
        near = np.float32(self.limit).astype(self.holder)
        return float(near if float(near) <= self.limit else np.nextafter(near, np.zeros_like(near)))

    def stored(self, scale: jax.Array) -> jax.Array:
        """The holder's form of each scale: the nearest number it has, never zero for a scale that is not.

        NaN stays NaN where the holder has it.
        """
        scale = scale if self.unit is None else quotient(scale, self.unit)
        magnitude = jnp.clip(jnp.abs(scale), self.smallest, self.largest)
        held = jnp.where(scale == 0, 0.0, jnp.copysign(magnitude, scale))
        return self.holder.encode(held) if isinstance(self.holder, AbstractFormat) else held.astype(self.holder)

    def stored_up(self, scale: jax.Array) -> jax.Array:
        """The holder's form of each scale, rounded up in magnitude: the smallest number it has that is not below the scale.

        Above the largest number it is the largest. NaN stays NaN where the holder has it.
        """
        stored = self.stored(scale)
        is_below = jnp.abs(self.loaded(stored)) < jnp.abs(scale)
        if isinstance(self.holder, AbstractFormat):
            is_below = is_below & (self.holder.decode(stored) < self.largest)
            return jnp.where(is_below, looked_up(_next_codes(self.holder), stored.astype(jnp.int32)), stored)
        largest = jnp.asarray(self.largest, stored.dtype)
        return jnp.where(is_below, jnp.nextafter(stored, jnp.copysign(largest, stored)), stored)

    def loaded(self, stored: jax.Array) -> jax.Array:
        """The float32 scales of their stored form."""
        holder = self.holder
        scale = holder.decode(stored) if isinstance(holder, AbstractFormat) else stored.astype(jnp.float32)
        return scale if self.unit is None else scale * self.unit

    def snapped(self, scale: jax.Array) -> jax.Array:
        """Each scale as it will be read back."""
        return self.loaded(self.stored(scale))

    @property
    def is_power_of_two(self) -> bool:
        """Whether the holder has powers of two only."""
        return isinstance(self.holder, E8M0)


@functools.cache
def _next_codes(holder: AbstractFormat) -> np.ndarray:
    """For each code of a positive number the code of the next larger one; of the largest, and of all other codes, itself."""
    values = np.nan_to_num(holder.values(), nan=0, posinf=0)
    order = np.argsort(values, kind="stable")
    order = order[values[order] > 0]
    codes = np.arange(len(values), dtype=np.uint8)
    codes[order[:-1]] = order[1:]
    return codes


def _largest_value(holder: AbstractFormat, limit: float) -> float:
    """The largest number of a format up to a limit."""
    values = holder.values()
    return float(values[values <= limit].max())

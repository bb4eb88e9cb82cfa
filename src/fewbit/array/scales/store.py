"""Storage of scales: floats or format codes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ...formats.format import AbstractFormat, looked_up, quotient


@dataclasses.dataclass(frozen=True)
class ScaleStore:
    """The storable scales: the numbers of a format or float dtype, times a unit.

    Attributes:
        holder: a format whose codes are stored, or a float dtype.
        unit: the tensor scale, float32; None: 1.
        limit: the largest number to store; see `fewbit.array.scales.limits`.
    """

    holder: AbstractFormat | np.dtype
    unit: jax.Array | None = None
    limit: float = math.inf

    @property
    def smallest(self) -> float:
        """The smallest positive number of the holder that is a normal float32."""
        if isinstance(self.holder, AbstractFormat):
            smallest = self.holder.smallest
        else:
            smallest = float(jnp.finfo(self.holder).smallest_subnormal)
        return max(smallest, float(jnp.finfo(jnp.float32).tiny))

    @property
    def largest(self) -> float:
        """The largest finite number of the holder up to the limit."""
        if isinstance(self.holder, AbstractFormat):
            if self.holder.max <= self.limit:
                return self.holder.max
            values = self.holder.values()
            return float(values[values <= self.limit].max())
        largest = float(jnp.finfo(self.holder).max)
        if largest <= self.limit:
            return largest
        near = np.float32(self.limit).astype(self.holder)
        if float(near) > self.limit:
            near = np.nextafter(near, np.zeros_like(near))
        return float(near)

    def stored(self, scale: jax.Array) -> jax.Array:
        """The stored form of each scale: the nearest number, nonzero for a nonzero scale. NaN if the holder has it."""
        if self.unit is not None:
            scale = quotient(scale, self.unit)
        magnitude = jnp.clip(jnp.abs(scale), self.smallest, self.largest)
        number = jnp.where(scale == 0, 0.0, jnp.copysign(magnitude, scale))
        if isinstance(self.holder, AbstractFormat):
            return self.holder.encode(number)
        return number.astype(self.holder)

    def stored_up(self, scale: jax.Array) -> jax.Array:
        """The stored form of each scale, rounded up in magnitude but not beyond `largest`. NaN if the holder has it."""
        stored = self.stored(scale)
        is_below = jnp.abs(self.loaded(stored)) < jnp.abs(scale)
        if isinstance(self.holder, AbstractFormat):
            is_below = is_below & (self.holder.decode(stored) < self.largest)
            return jnp.where(is_below, looked_up(_next_codes(self.holder), stored.astype(jnp.int32)), stored)
        largest = jnp.asarray(self.largest, stored.dtype)
        return jnp.where(is_below, jnp.nextafter(stored, jnp.copysign(largest, stored)), stored)

    def loaded(self, stored: jax.Array) -> jax.Array:
        """The float32 scales of their stored form."""
        if isinstance(self.holder, AbstractFormat):
            scale = self.holder.decode(stored)
        else:
            scale = stored.astype(jnp.float32)
        if self.unit is None:
            return scale
        return scale * self.unit

    def snapped(self, scale: jax.Array) -> jax.Array:
        """Each scale rounded to a storable one."""
        return self.loaded(self.stored(scale))

    def covering(self, scale: jax.Array) -> jax.Array:
        """Each positive scale, rounded up to the next power of two if only these can be stored.

        Rounded to nearest, as other scales are, it could be a third too small for the range that it is to cover.
        """
        if not self.is_power_of_two:
            return scale
        return jnp.where(jnp.isfinite(scale) & (scale > 0), self.loaded(self.stored_up(scale)), scale)

    @property
    def is_power_of_two(self) -> bool:
        """Whether all storable scales are powers of two."""
        return isinstance(self.holder, AbstractFormat) and self.holder.is_power_of_two


@functools.cache
def _next_codes(holder: AbstractFormat) -> np.ndarray:
    """The code of the next larger number for codes of positive numbers. The largest and all others map to themselves."""
    values = np.nan_to_num(holder.values(), nan=0, posinf=0)
    order = np.argsort(values, kind="stable")
    order = order[values[order] > 0]
    codes = np.arange(len(values), dtype=np.uint8)
    codes[order[:-1]] = order[1:]
    return codes

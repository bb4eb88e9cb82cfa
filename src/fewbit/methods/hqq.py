"""HQQ: scales and zero points by half-quadratic splitting, without data.

Half-quadratic splitting (Badri and Shaji, https://mobiusml.github.io/hqq_blog): the sum of `|e|**p`, p < 1, over the errors
`e = w - decoded` of a tile is lowered in turns. Shrinkage gives the part of the errors that is explained as outliers,
`o = sign(e) max(|e| - |e|**(p - 1) / beta, 0)`; then the codes' parameters are fitted to `w - o` by least squares. A float offset is
fitted as published, `mean(w - o - scale q)`. Where there is none, the scale is fitted: `sum((q - z) (w - o)) / sum((q - z)**2)`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..array.qarray import QArray
from ..array.quantize import in_units
from ..array.scales.calibration import AbstractCalibration, Scale, Target, Tiles, better
from ..array.scheme import Scheme
from ..errors import QuantError
from ..formats.format import AbstractFormat, power_of_two
from ..kernels.quantize.dispatch import quantize
from ..recipe.method import AbstractMethod


@dataclasses.dataclass(frozen=True)
class HQQ(AbstractMethod):
    """Rounds to nearest, with zero points and scales of least `|error|**power`, found without data.

    Each tile keeps the best of all rounds, and of its scheme's own scales, as stored. A weight of 1 is the unit of `beta`, as
    published: below about 0.1 all errors count as explained, and the fit is one of least squares.

    Attributes:
        power: p, above 0 and at most 1.
        beta: the inverse of the shrinkage at the start.
        growth: by how much `beta` grows each round.
        rounds: the number of rounds.

    Reference: Badri and Shaji, Half-Quadratic Quantization of Large Machine Learning Models, 2023.
    """

    name = "hqq"

    power: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    rounds: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.power <= 1:
            raise QuantError(f"power is {self.power}, must be above 0 and at most 1")
        if not (0 < self.beta < math.inf and 1 <= self.growth < math.inf and self.rounds >= 1):
            raise QuantError(
                f"beta is {self.beta}, growth {self.growth}, rounds {self.rounds}; they must be above 0, at least 1, at least 1"
            )

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        q = quantize(x, dataclasses.replace(scheme, calibration=HalfQuadratic(scheme.calibration, self)), axis=axis)
        return dataclasses.replace(q, scheme=dataclasses.replace(q.scheme, calibration=scheme.calibration))


@dataclasses.dataclass(frozen=True)
class HalfQuadratic(AbstractCalibration):
    """The scales of a calibration, improved by half-quadratic splitting.

    Attributes:
        own: the calibration.
        settings: those of the method.
    """

    name: ClassVar[str] = "half_quadratic"

    own: AbstractCalibration
    settings: HQQ

    @property
    def exceeds_amax(self) -> bool:
        return self.own.exceeds_amax

    @property
    def searches_tensor_scale(self) -> bool:
        return self.own.searches_tensor_scale

    def largest_stored(self, holder: AbstractFormat | np.dtype) -> float | None:
        return self.own.largest_stored(holder)

    def scale(self, tiles: Tiles, target: Target) -> Scale:
        scale, offset = jax.lax.stop_gradient(self.own.scale(tiles, target))
        shape = tiles.amax.shape
        start = jax.tree.map(lambda end: jnp.broadcast_to(end, shape), (scale, offset))
        splitting = _Splitting(tiles, target, self.settings)
        infinite = jnp.full_like(tiles.amax, jnp.inf, jnp.float32)
        state = (start, (start, infinite), jnp.float32(self.settings.beta))
        state = jax.lax.fori_loop(0, self.settings.rounds, lambda _, state: splitting.step(*state), state)
        best, _ = splitting.step(*state)[1]
        return best


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """The tiles, and how their scales are stored."""

    tiles: Tiles
    target: Target
    settings: HQQ

    def step(
        self, now: Scale, best: tuple[Scale, jax.Array], beta: jax.Array
    ) -> tuple[Scale, tuple[Scale, jax.Array], jax.Array]:
        """One iteration: the next fit, the best so far, the next beta. The fit is to the errors of one scale and offset."""
        tiles, target, power = self.tiles, self.target, self.settings.power
        stored = target.store.snapped(now[0])
        scale = jnp.where(stored == 0, 1.0, stored)
        zero = jnp.zeros_like(scale)  # the number that decodes to 0
        if now[1] is not None:
            zero = -target.loaded_offset(target.stored_zero(now[1], scale), scale) / scale
        q = target.format.nearest(in_units(tiles.x, scale, None if now[1] is None else -zero * scale))
        values = jnp.where(stored == 0, -zero * scale, (q - zero) * scale)  # a scale of 0 decodes every code to the offset
        errors = tiles.x - values
        size = jnp.abs(errors)
        total = tiles.total((size * power_of_two(-tiles.exponent)) ** power)
        flat = better((*jax.tree.leaves(now), total), (*jax.tree.leaves(best[0]), best[1]))
        best = jax.tree.unflatten(jax.tree.structure(best), flat)
        outliers = jnp.where(size > 0, jnp.sign(errors) * jnp.maximum(size - size ** (power - 1) / beta, 0), 0)
        return self.fitted(tiles.x - outliers, q, scale, zero, now), best, beta * self.settings.growth

    def fitted(self, x: jax.Array, q: jax.Array, scale: jax.Array, zero: jax.Array, now: Scale) -> Scale:
        """The offset of least squares for these codes; the scale, where offsets are no floats."""
        tiles = self.tiles
        if now[1] is not None:
            zero = tiles.total(q - x / scale) / tiles.count
            if not isinstance(self.target.zero, AbstractFormat):
                return scale, -zero * scale
            zero = self.target.zero.decode(self.target.zero.encode(zero))
        products, squares = tiles.total((q - zero) * x), tiles.total(jnp.square(q - zero))
        slope = products / jnp.where(squares > 0, squares, 1.0)
        scale = jnp.where((squares > 0) & (slope * scale > 0), slope, scale)
        return scale, None if now[1] is None else -zero * scale

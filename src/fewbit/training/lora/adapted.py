"""A weight with an adapter beside it, as the evaluator of unchanged code meets it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...array import is_qarray
from ...errors import UnsupportedError
from ...kernels.quantize import dequantize
from ...ops.rules.control import stacked
from ...ops.standin import StandIn
from .factors import updated
from .rules import ADAPTED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Adapted(StandIn):
    """`base + scale * sum over r of a[..., r] * b[..., r]`, never computed as a whole where a product asks for it.

    Attributes:
        base: the frozen weight, an array or a QArray.
        a: the factor of the contracted axes: the weight's axes, 1 long where the factor has none of it, and the rank's.
        b: the factor of the other axes, likewise.
        keys: random keys for dropout, with the weight's axes, 1 long but for the stacked ones, and one of length 1; None
            without dropout.
        scale: the factor of the update.
        dropout: the fraction of the operand's elements that the factors do not see.
    """

    rules = ADAPTED

    base: Any
    a: Any
    b: Any
    keys: Any
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.base.dtype

    @property
    def factors(self) -> tuple[Any, ...]:
        """What has the weight's axes and one more."""
        return (self.a, self.b) if self.keys is None else (self.a, self.b, self.keys)

    def __repr__(self) -> str:
        kind = repr(self.base) if is_qarray(self.base) else f"{self.dtype.name}{list(self.shape)}"
        return f"{kind} with an adapter of rank {self.a.shape[-1]}"

    def moved(self, base: Any, move: Callable[[Any], Any]) -> "Adapted":
        """The weight with its axes moved: `base` is moved already, `move` does it to a factor."""
        factors = [move(factor) for factor in self.factors]
        return dataclasses.replace(self, base=base, a=factors[0], b=factors[1], keys=factors[2] if factors[2:] else None)

    def stacked(self) -> "Adapted":
        length = self.shape[0]
        base = stacked(self.base) if is_qarray(self.base) else self.base
        return self.moved(base, lambda factor: jnp.broadcast_to(factor, (length, *factor.shape[1:])))

    def array(self) -> Array:
        if self.keys is not None:
            raise UnsupportedError(
                f"{self!r} would be added up, and there is no dropout without a product; leave out dropout"
            )
        return updated(dequantize(self.base) if is_qarray(self.base) else self.base, self.a, self.b, self.scale)

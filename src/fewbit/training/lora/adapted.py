"""Adapted: the proxy of a weight with LoRA."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ...array.qarray import is_qarray
from ...errors import UnsupportedError
from ...ops.interpret.proxy import ArrayProxy
from ...ops.interpret.rules.control_flow import stacked
from .factors import updated
from .rules import ADAPTED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Adapted(ArrayProxy):
    """The weight `base + scale * sum over r of a[..., r] * b[..., r]`.

    Products never compute this sum.

    Attributes:
        base: the frozen weight, an array or a QArray.
        a: the factor of the contracted axes: it has the weight's axes, of length 1 where it does not depend on one, and the
            rank's.
        b: the factor of the other axes, in the same layout.
        keys: random keys for dropout: the weight's axes, of length 1 except the stacked ones, and one of length 1; None
            without dropout.
        scale: the factor of the update.
        dropout: the fraction of the operand's elements that are dropped for the factors.
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
        """The arrays with the weight's axes and one more."""
        if self.keys is None:
            return self.a, self.b
        return self.a, self.b, self.keys

    def __repr__(self) -> str:
        kind = repr(self.base) if is_qarray(self.base) else f"{self.dtype.name}{list(self.shape)}"
        return f"{kind} with an adapter of rank {self.a.shape[-1]}"

    def moved(self, base: object, factors: Sequence[Array]) -> "Adapted":
        """The weight after a layout op, which gave `base` and `factors`."""
        return dataclasses.replace(self, base=base, **dict(zip(("a", "b", "keys"), factors, strict=False)))

    def stacked(self) -> "Adapted":
        base = stacked(self.base) if is_qarray(self.base) else self.base
        return self.moved(base, [jnp.broadcast_to(f, (self.shape[0], *f.shape[1:])) for f in self.factors])

    def array(self) -> Array:
        if self.keys is not None:
            raise UnsupportedError(
                f"{self!r} is read outside a product, and there is no dropout without a product; pass dropout=0"
            )
        return updated(self.base, self.a, self.b, self.scale)

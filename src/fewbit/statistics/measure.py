"""What is measured of the operand that a parameter meets: its range, its channels, its second moments."""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from ..ops.observed import AbstractMeasure, Met
from .ranges import AbstractRange, RangeState

Statistic = Literal["range", "absmax", "hessian"]
STATISTICS = ("range", "absmax", "hessian")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """What the products of one parameter met. What was not asked for is None; of a stack of layers all have a leading axis.

    With the vectors `x` that the product contracts, `K` elements each:

    Attributes:
        range: the range of all elements.
        absmax: `[K]`, the largest magnitude of each element.
        hessian: `[*B, K, K]`, the sum of `x x^T`, float32, with an axis for each that runs beside the parameter's.
        count: how many vectors there were for each such axis, float32; None without `hessian`.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    range: Any
    absmax: Any
    hessian: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProductObservation:
    """The ranges of the operands of one product without a parameter.

    Attributes:
        left: of the left operand, which the policy's `activation` quantizes.
        right: of the right operand, which its `weight` quantizes.
    """

    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Measure(AbstractMeasure):
    """What `observe` measures.

    Attributes:
        rule: how ranges are estimated.
        collect: the statistics.
    """

    rule: AbstractRange
    collect: tuple[Statistic, ...]

    def __post_init__(self) -> None:
        for word in self.collect:
            if word not in STATISTICS:
                raise QuantError(f"collect has {word!r}; {near_names(str(word), STATISTICS)}")
        if not self.collect:
            raise QuantError(f"collect is empty; take some of {', '.join(STATISTICS)}")

    def of(self, met: Met) -> Observation:
        x = jax.lax.stop_gradient(met.x).astype(jnp.float32)
        seen = self.rule.init(x.shape).update(x) if "range" in self.collect else None
        absmax = self._vectors(met, x, "absmax")
        hessian = self._vectors(met, x, "hessian")
        return Observation(
            seen,
            None if absmax is None else jnp.max(jnp.abs(absmax), axis=tuple(range(absmax.ndim - 1))),
            None if hessian is None else jnp.einsum("...tk,...tl->...kl", hessian, hessian, precision="highest"),
            None if hessian is None else jnp.float32(hessian.shape[-2]),
        )

    def of_both(self, left: jax.Array, right: jax.Array) -> ProductObservation:
        return ProductObservation(*(self.rule.init(x.shape).update(x) for x in (left, right)))

    def joined(self, earlier: Any, later: Any) -> Any:
        if isinstance(earlier, ProductObservation):
            return ProductObservation(earlier.left.merge(later.left), earlier.right.merge(later.right))

        def of_both(join: Any, a: Any, b: Any) -> Any:
            return None if a is None else join(a, b)

        return Observation(
            of_both(RangeState.merge, earlier.range, later.range),
            of_both(jnp.maximum, earlier.absmax, later.absmax),
            of_both(jnp.add, earlier.hessian, later.hessian),
            of_both(jnp.add, earlier.count, later.count),
        )

    def _vectors(self, met: Met, x: jax.Array, statistic: Statistic) -> jax.Array | None:
        """The operand as `[*B, T, K]`; None where the statistic is not asked for."""
        if statistic not in self.collect:
            return None
        if met.contracted is None or (met.batch is None and statistic == "hessian"):
            reason = "a convolution or a ragged product" if statistic == "hessian" else "a convolution"
            raise UnsupportedError(
                f"{statistic} is not collected of {reason}; leave it out of collect, or the parameter out"
            )
        batch = met.batch or ()
        others = [axis for axis in range(x.ndim) if axis not in (*batch, *met.contracted)]
        lengths = [x.shape[axis] for axis in batch]
        size = math.prod(x.shape[axis] for axis in met.contracted)
        return x.transpose(*batch, *others, *met.contracted).reshape(*lengths, -1, size)

"""Static activation ranges over batches, and their scales."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from ..array import scheme as as_scheme
from ..array.scales.calibration import Target, symmetric_or_range
from ..array.scales.store import ScaleStore
from ..array.scheme import Scheme
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class AbstractRange(abc.ABC):
    """A range estimator: the range of one batch, and the merge of two.

    Attributes:
        axes: the axes, counted from the end, whose elements have a range each; `(-1,)` is per-channel. Empty: per-tensor, so
            that arrays of any shape can be observed.
    """

    axes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if any(not isinstance(a, int) or a >= 0 for a in self.axes) or len(set(self.axes)) < len(self.axes):
            raise QuantError(f"axes is {self.axes}, must be different negative axes (-1 is the last)")

    @property
    def depth(self) -> int:
        """The number of axes of the ends. These are the axes from the first of `axes` to the last axis."""
        return -min(self.axes, default=0)

    @abc.abstractmethod
    def ends(self, x: Float[Array, "*s"], within: tuple[int, ...]) -> tuple[Array, Array]:
        """The lower and upper end of one batch over the axes `within`, kept with length 1."""

    @abc.abstractmethod
    def joined(self, earlier: "RangeState", later: "RangeState") -> tuple[Array, Array]:
        """The ends over the batches of both states, those of `earlier` first."""

    def init(self, shape: Sequence[int] = ()) -> "RangeState":
        """The state before the first batch.

        Args:
            shape: the shape of the arrays to observe; only the lengths of `axes` are read, so it is optional without them.
        """
        depth = self.depth
        if len(shape) < depth:
            raise QuantError(
                f"ranges are kept on the axes {self.axes}; init needs the shape of the arrays, got {tuple(shape)}"
            )
        lengths = tuple(shape[axis] if axis in self.axes else 1 for axis in range(-depth, 0))
        end = jnp.zeros(lengths, jnp.float32)
        return RangeState(end, end, jnp.zeros((), jnp.int32), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RangeState:
    """The range so far: a pytree to carry through jit, scan and vmap.

    Attributes:
        low: the lower end, float32: scalar, or one for each element of the rule's axes.
        high: the upper end, likewise.
        count: the number of batches, int32.
        rule: how the range is estimated; static.

    >>> state = fb.calibration.AbsMaxRange().init().update(jnp.array([1.0, -3.0])).update(jnp.array([2.0]))
    >>> float(state.low), float(state.high), int(state.count)
    (-3.0, 3.0, 2)
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    low: Any
    high: Any
    count: Any
    rule: AbstractRange = dataclasses.field(metadata={"static": True})

    def update(self, x: ArrayLike) -> Self:
        """The state after one more batch. NaN or infinity makes the range non-finite for good.

        Args:
            x: a floating array of any shape that has the rule's axes. It is not differentiated.
        """
        x = jax.lax.stop_gradient(jnp.asarray(x)).astype(jnp.float32)
        depth = self.rule.depth
        if self.low.ndim != depth or self.count.ndim:
            raise QuantError(f"the state is stacked (its count has shape {self.count.shape}); update it under jax.vmap")
        if x.ndim < depth or x.size == 0:
            raise QuantError(f"x has shape {x.shape}; the range needs elements on the axes {self.rule.axes}")
        within = tuple(a for a in range(x.ndim) if a - x.ndim not in self.rule.axes)
        low, high = (end.reshape(end.shape[x.ndim - depth :]) for end in self.rule.ends(x, within))
        if low.shape != self.low.shape:
            raise QuantError(
                f"x has ranges of shape {low.shape} on the axes {self.rule.axes}, the state has {self.low.shape}"
            )
        return self.merge(dataclasses.replace(self, low=low, high=high, count=jnp.ones_like(self.count)))

    def merge(self, later: "RangeState") -> Self:
        """The state after the batches of both, those of `later` last.

        Amax and min-max merge by maximum, means by their numbers of batches, moving averages by their decayed weights. It is
        associative, so accumulated, scanned and parallel parts may be merged in any grouping.

        Args:
            later: a state of the same rule; both may be stacked.
        """
        if later.rule != self.rule:
            raise QuantError(f"states of two rules cannot be merged: {self.rule} and {later.rule}")
        low, high = self.rule.joined(self, later)
        return dataclasses.replace(self, low=low, high=high, count=self.count + later.count)

    def scale(self, scheme: str | Scheme | Mapping[str, Any]) -> tuple[Float[Array, "*c"], Float[Array, "*c"] | None]:
        """The scale that maps the range onto the codes of a scheme, and the offset.

        Both go to `fb.quantize` and `fb.fake_quant` as `scale=` and `offset=`. Power-of-two scales are rounded up, so that
        nothing in the range saturates. A range of zero gives scale 0, in place of which `fb.quantize` takes 1.

        Args:
            scheme: a Scheme, or anything that `fb.scheme` takes; ranges on axes need tiles of 1 there.

        Returns:
            The scale and the offset (None for symmetric schemes), float32. Under jit, where the count is not known, the
            scale is NaN if no batch was seen.

        Raises:
            QuantError: outside jit, when no batch was seen or the range is not finite.
        """
        self._check_seen()
        bound = as_scheme(scheme)
        holder = bound.scale
        if isinstance(holder, Scheme):
            holder = np.dtype(np.float32)
        target = Target(bound.format, ScaleStore(holder), bound.zero_holder)  # type: ignore[arg-type]
        scale, offset = symmetric_or_range(jnp.minimum(self.low, 0.0), jnp.maximum(self.high, 0.0), target)
        return jnp.where(with_unit_axes(self.count, scale) > 0, scale, jnp.nan), offset

    def _check_seen(self) -> None:
        """Refuses an empty or non-finite range where the values are known."""
        if any(isinstance(leaf, Tracer) for leaf in (self.low, self.high, self.count)):
            return
        if not np.all(np.asarray(self.count) > 0):
            raise QuantError("the range has no batch; call update before scale")
        if not np.isfinite([self.low, self.high]).all():
            raise QuantError("the range is not finite: a batch had a NaN or an infinity; find it, and start again from init")


def with_unit_axes(count: Array, ends: Array) -> Array:
    """The count of each state with as many axes as its ends, which have more."""
    return count.reshape(count.shape + (1,) * (ends.ndim - count.ndim))

"""Statistics of activations: range, magnitudes and squares of channels, second moments."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._explicit_mesh import with_auto_axes
from .._registry import near_names
from ..errors import QuantError, UnsupportedError
from ..ops.interpret.observe import AbstractMeasure, ProductOperand
from .ranges import AbstractRange, RangeState

Statistic = Literal["range", "absmax", "sum", "abssum", "squares", "hessian", "cross"]
STATISTICS = ("range", "absmax", "sum", "abssum", "squares", "hessian", "cross")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observation:
    """The statistics of the other operand in the products of one parameter.

    Statistics that were not collected are None; stacked layers add a leading axis. With the vectors `x` that the product
    contracts, `K` elements (channels) each, in the order of the weight's axes, and an axis `B` for each batch axis of the product,
    for the groups (experts) of a ragged product, and for the groups of channels of a convolution, if there are several. The vectors of
    a convolution are the patches that its kernel multiplies.

    Attributes:
        range: the range of all elements.
        absmax: `[*B, K]`, the amax of each channel.
        sum: `[*B, K]`, the sum of `x`, float32.
        abssum: `[*B, K]`, the sum of `|x|`, float32.
        squares: `[*B, K]`, the sum of `x**2`, float32: the diagonal of the Hessian.
        hessian: `[*B, K, K]`, the sum of `x x^T`, float32.
        cross: `[*B, K, K]`, the sum of `f x^T` with the same inputs `f` of the float model, where `x` are those of a quantized
            one: what `workflows.calibrated_weights` collects for QEP. None for ragged products.
        count: the number of vectors for each element of these axes, float32: one number, or `[G]` for groups; None with a
            range alone.
        batch: the parameter's axes, negative, that are `*B`, in this order; static. Empty where `*B` are no whole axes of it. None
            with a range alone and for a convolution; statistics from elsewhere may have None for the first axes.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    range: Any = None
    absmax: Any = None
    sum: Any = None
    abssum: Any = None
    squares: Any = None
    hessian: Any = None
    cross: Any = None
    count: Any = None
    batch: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})


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
    """The statistics that `observe` collects.

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

    def of(self, operand: ProductOperand) -> Observation:
        x = jax.lax.stop_gradient(operand.x).astype(jnp.float32)
        found: dict[str, Any] = {}
        if "range" in self.collect:
            found["range"] = self.rule.init(x.shape).update(x)
        for name, statistic in _OF_VECTORS.items():
            if name in self.collect:
                vectors, sizes = _vectors(operand, x, name), operand.group_sizes
                found[name], found["count"] = statistic(vectors, sizes), _count(vectors, sizes)
                if operand.weight_batch is not None:
                    found["batch"] = operand.weight.parameter_axes(operand.weight_batch)
        return Observation(**found)

    def of_both(self, left: jax.Array, right: jax.Array) -> ProductObservation:
        return ProductObservation(*(self.rule.init(x.shape).update(x) for x in (left, right)))

    def joined(
        self, earlier: Observation | ProductObservation, later: Observation | ProductObservation
    ) -> Observation | ProductObservation:
        joins: dict[str, Callable[..., object]] = dict.fromkeys(("range", "left", "right"), RangeState.merge)
        joins |= {"absmax": jnp.maximum, **dict.fromkeys(("sum", "abssum", "squares", "hessian", "cross", "count"), jnp.add)}
        states = vars(earlier).items()
        return dataclasses.replace(
            earlier,
            **{name: joins[name](x, getattr(later, name)) for name, x in states if x is not None and name != "batch"},
        )


@dataclasses.dataclass(frozen=True)
class Inputs(AbstractMeasure):
    """The vectors that each product contracts, `[*B, T, K]`. None for a ragged product."""

    grows = True

    def of(self, operand: ProductOperand) -> jax.Array | None:
        if operand.group_sizes is not None:
            return None
        return _vectors(operand, jax.lax.stop_gradient(operand.x).astype(jnp.float32), "hessian")

    def of_both(self, left: jax.Array, right: jax.Array) -> None:
        return None

    def joined(self, earlier: jax.Array, later: jax.Array) -> jax.Array:
        return jnp.concatenate([earlier, later], axis=-2)

    def folded(self, stack: jax.Array | None) -> jax.Array | None:
        if stack is None:
            return None
        *batch, T, K = stack.shape[1:]
        return jnp.moveaxis(stack, 0, -3).reshape(*batch, len(stack) * T, K)


def with_cross(found: Mapping[str, Any], inputs: Mapping[str, Any], quantized: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics with the cross moments of two models.

    Args:
        found: the statistics of the quantized model, by parameter.
        inputs: what `Inputs` measured in the float model.
        quantized: what it measured in the quantized one.
    """
    return {
        path: dataclasses.replace(one, cross=cross_moments(inputs[path], quantized[path]))
        if isinstance(one, Observation)
        else one
        for path, one in found.items()
    }


def cross_moments(inputs: jax.Array | None, quantized: jax.Array | None) -> jax.Array | None:
    """The sum of `f x^T` over the inputs of two models.

    `f` are the inputs of the float model, `x` those of a quantized one. None unless both are given.

    Args:
        inputs: `[*B, T, K]`, or None.
        quantized: likewise.
    """
    if inputs is None or quantized is None:
        return None
    return jnp.einsum("...tk,...tl->...kl", inputs, quantized, precision="highest")


def _amax(vectors: jax.Array, group_sizes: jax.Array | None) -> jax.Array:
    """The largest magnitude of each channel; 0 without vectors."""
    if group_sizes is None:
        return jnp.max(jnp.abs(vectors), axis=-2, initial=0.0)
    largest = jax.ops.segment_max(jnp.abs(vectors), _group_of_each(vectors, group_sizes), len(group_sizes))
    return jnp.maximum(largest, 0)


def _sum(x: jax.Array, group_sizes: jax.Array | None) -> jax.Array:
    """The sum over the vectors of each group."""
    if group_sizes is None:
        return jnp.sum(x, axis=-2)
    return jax.ops.segment_sum(x, _group_of_each(x, group_sizes), len(group_sizes))


def _second_moments(vectors: jax.Array, group_sizes: jax.Array | None) -> jax.Array:
    """The sum of `x x^T` over the vectors of each group."""
    if group_sizes is None:
        moments = functools.partial(jnp.einsum, "...tk,...tl->...kl", precision="highest")
        return with_auto_axes(lambda x: moments(x, x), vectors, reduced=(vectors.ndim - 2, vectors.ndim - 1))
    return jax.lax.ragged_dot_general(vectors, vectors, group_sizes, _BY_GROUP, precision=jax.lax.Precision.HIGHEST)


def _count(vectors: jax.Array, group_sizes: jax.Array | None) -> jax.Array:
    """The number of vectors of each group."""
    if group_sizes is None:
        return jnp.float32(vectors.shape[-2])
    return group_sizes.astype(jnp.float32)


def _group_of_each(vectors: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """The group of each vector. It is the number of groups for those after the last one."""
    return jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(vectors)), side="right")


_OF_VECTORS: dict[Statistic, Callable[[jax.Array, jax.Array | None], jax.Array]] = {
    "absmax": _amax,
    "sum": _sum,
    "abssum": lambda vectors, sizes: _sum(jnp.abs(vectors), sizes),
    "squares": lambda vectors, sizes: _sum(jnp.square(vectors), sizes),
    "hessian": _second_moments,
}
"""The statistics of the vectors that a product contracts."""


_BY_GROUP = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=())
"""The contraction of the rows of each group: `[T, K]` and `[T, K]` to `[G, K, K]`."""


def _vectors(operand: ProductOperand, x: jax.Array, statistic: Statistic) -> jax.Array:
    """The vectors that the product contracts, their elements in the order of the parameter's axes."""
    vectors, order = _unordered_vectors(operand, x, statistic), operand.weight.order(operand.weight_contracted)
    return vectors if order is None else vectors[..., order]


def _unordered_vectors(operand: ProductOperand, x: jax.Array, statistic: Statistic) -> jax.Array:
    """The vectors that the product contracts, their elements in the order of the product."""
    if operand.contracted is None:
        if operand.window is None or operand.window.batch_groups > 1:
            raise UnsupportedError(
                f"{statistic} is not collected for the images of a convolution, nor for the kernel of one with groups of samples; "
                "remove it from collect, or exclude the parameter"
            )
        return operand.window.patches(x, operand.kernel)
    batch, sizes = operand.batch, operand.group_sizes
    if sizes is not None and (batch or x.ndim != 2 or sizes.ndim != 1):
        raise UnsupportedError(f"{statistic} is not collected for a ragged product with batch axes; remove it from collect")
    others = [axis for axis in range(x.ndim) if axis not in (*batch, *operand.contracted)]
    lengths = [x.shape[axis] for axis in batch]
    size = math.prod(x.shape[axis] for axis in operand.contracted)
    return x.transpose(*batch, *others, *operand.contracted).reshape(*lengths, -1, size)  # [*B, T, K]

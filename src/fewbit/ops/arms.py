"""Products as a Policy has them: operands quantized on the way in, and each product of the backward pass by its own arm.

A product of two operands is linear in each, so it comes with two more: the gradient of the left operand contracts the
incoming gradient with the right one, and the other way round. `AbstractBilinear` says what the three contract; everything
else here is the same for matrix products, convolutions and ragged products.
"""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from ..array import QArray, Scheme, is_qarray
from ..array.quantize import expanded_scale
from ..array.sharding import held_sharding
from ..array.straight_through import is_covered
from ..errors import QuantError
from ..formats import FORMATS, Integer
from ..formats.format import settled
from ..kernels.qmatmul.codes import Meeting, code_product, is_whole, refuse_accumulator, side
from ..kernels.quantize import dequantize, quantize
from .policy import Arm, Policy
from .rotation import rotated
from .served import Served
from .stepped import StepScales, largest_magnitude, seen_with

Axes = tuple[int, ...]

_CODES = Scheme(FORMATS["int8"])
"""What codes without scales are: int8 numbers as they stand."""


@dataclasses.dataclass(frozen=True)
class AbstractBilinear(abc.ABC):
    """A product that is linear in its left and in its right operand; `extra` is what it takes besides, such as group sizes."""

    @abc.abstractmethod
    def values(self, lhs: Any, rhs: Any, extra: Any) -> jax.Array:
        """JAX's own product of the arrays that the operands stand for."""

    @abc.abstractmethod
    def forward(self, lhs: Any, rhs: Any, extra: Any, accumulator: str | None = None) -> jax.Array:
        """The product of operands of which any may be quantized; codes are summed in `accumulator`, if one is given."""

    @property
    @abc.abstractmethod
    def contracted(self) -> tuple[Axes, Axes]:
        """The axes of the left and of the right operand that the product sums over, the one that tiles run along last."""

    @abc.abstractmethod
    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        """The axes of the incoming gradient and of the other operand that an operand's gradient sums over, likewise."""

    @abc.abstractmethod
    def beside_gradient(self, is_left: bool, scale: jax.Array, extra: Any) -> jax.Array | None:
        """The other operand's scale for each element, shaped to meet the incoming gradient.

        None where it varies along an axis that the gradient does not have, so that it cannot be folded in.
        """

    @property
    def is_grouped(self) -> bool:
        """Whether parts of an operand meet only parts of the other, so that no axis of it may have one element instead."""
        return False

    @abc.abstractmethod
    def backward(
        self,
        is_left: bool,
        gradient: Any,
        other: Any,
        like: jax.ShapeDtypeStruct,
        extra: Any,
        accumulator: str | None = None,
    ) -> jax.Array:
        """The gradient of one operand from the incoming gradient and the other operand, either of which may be quantized.

        An axis along which the other operand has one element where it has more has one in the gradient, too.
        """

    def transposed(self, is_left: bool, gradient: Any, other: Any, like: jax.ShapeDtypeStruct, extra: Any) -> jax.Array:
        """JAX's own transpose of the product with respect to one operand."""

        def of_one(x: jax.Array) -> jax.Array:
            return self.values(x, other, extra) if is_left else self.values(other, x, extra)

        gradient = gradient.astype(jax.eval_shape(of_one, like).dtype)
        return jax.linear_transpose(of_one, like)(gradient)[0]


@dataclasses.dataclass(frozen=True)
class Rules:
    """A Policy as it applies to a product: what is left and right in it.

    Attributes:
        policy: the policy.
        weight_is_left: whether the left operand takes the part of the weight.
        scales: what earlier steps decided, for a policy with delayed scaling; None for every other.
        served: the tiles that the weight has where it is served; None: those that its scheme has along what is contracted.
        held: the weight as it is served, where tiles do not say it; else None.
    """

    policy: Policy
    weight_is_left: bool = False
    scales: StepScales | None = None
    served: Served | None = None
    held: Any = None

    def scheme(self, is_left: bool) -> Scheme | None:
        """The scheme of an operand."""
        return self.policy.weight if is_left == self.weight_is_left else self.policy.activation

    def arm(self, is_left: bool) -> Arm:
        """How the gradient of an operand is computed."""
        return self.policy.drhs if is_left == self.weight_is_left else self.policy.dlhs

    def scale(self, scales: StepScales | None, is_left: bool) -> Any:
        """The scale of an operand that earlier steps decided; None where the operand at hand does."""
        if scales is None:
            return None
        return scales.weight if is_left == self.weight_is_left else scales.activation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """What the backward pass keeps of one operand.

    Attributes:
        forward: what entered the product; None where no arm asks for it.
        original: the operand as it came; None likewise.
        passes: where its gradient passes; None for everywhere.
        like: its shape and dtype.
    """

    forward: Any
    original: Any
    passes: Any
    like: Any = dataclasses.field(metadata={"static": True})


def quantized_product(
    bilinear: AbstractBilinear, rules: Rules, lhs: Any, rhs: Any, extra: Any = None, key: Any = None
) -> jax.Array:
    """The product under a policy, with the policy's gradients.

    Args:
        bilinear: the product.
        rules: the policy, and which operand is the weight.
        lhs: the left operand; a QArray stays as it is.
        rhs: the right operand, likewise.
        extra: what the product takes besides.
        key: a JAX random key for arms that draw random numbers. What an arm draws depends on its gradient, too, so one key
            may serve many products and every turn of a loop.

    Returns:
        The product.
    """

    def entering(lhs: Any, rhs: Any, scales: Any, held: Any) -> tuple[Any, Any]:
        left, right = (rules.scale(scales, is_left) for is_left in (True, False))
        entered = _entering(bilinear, rules, lhs, True, left), _entering(bilinear, rules, rhs, False, right)
        if held is None:
            return entered
        return (held, entered[1]) if rules.weight_is_left else (entered[0], held)

    @jax.custom_vjp
    def product(lhs: Any, rhs: Any, key: Any, extra: Any, scales: Any, held: Any) -> jax.Array:
        return bilinear.forward(*entering(lhs, rhs, scales, held), extra, rules.policy.accumulator)

    def forward(lhs: Any, rhs: Any, key: Any, extra: Any, scales: Any, held: Any) -> tuple[jax.Array, Any]:
        left, right = entering(lhs, rhs, scales, held)
        kept = _residual(rules, lhs, left, True), _residual(rules, rhs, right, False)
        forms = tuple(x if is_qarray(x) else None for x in (lhs, rhs))  # a float operand is not kept for its form alone
        seen = _seen(rules, scales, lhs, rhs)
        return bilinear.forward(left, right, extra, rules.policy.accumulator), (kept, forms, key, extra, scales, seen)

    def backward(saved: Any, gradient: jax.Array) -> Any:
        (left, right), (lhs, rhs), key, extra, scales, seen = saved
        scale = None if scales is None else scales.gradient
        to_left = _operand_gradient(bilinear, rules.arm(True), gradient, True, left, right, extra, key, scale)
        to_right = _operand_gradient(bilinear, rules.arm(False), gradient, False, right, left, extra, key, scale)
        if scale is not None:
            seen = dataclasses.replace(seen, gradient=seen_with(largest_magnitude(gradient), scale))
        return _cotangent(lhs, to_left), _cotangent(rhs, to_right), None, None, seen, None

    product.defvjp(forward, backward)
    return product(lhs, rhs, key, extra, rules.scales, rules.held)


def _entering(bilinear: AbstractBilinear, rules: Rules, x: Any, is_left: bool, scale: Any) -> Any:
    """An operand as it enters the product."""
    scheme = rules.scheme(is_left)
    if scheme is None or is_qarray(x):
        return x
    axes = _some(bilinear.contracted[0 if is_left else 1])
    if rules.served is not None and is_left == rules.weight_is_left:
        return rules.served.quantized(x, scheme, axes)
    return quantize(x, scheme, axis=axes, scale=scale)


def _seen(rules: Rules, scales: StepScales | None, lhs: Any, rhs: Any) -> StepScales | None:
    """The largest magnitudes of both operands, where earlier steps decided their scales; a QArray shows none."""
    if scales is None:
        return None
    weight, activation = (lhs, rhs) if rules.weight_is_left else (rhs, lhs)

    def seen(x: Any, scale: Any) -> Any:
        return None if scale is None else seen_with(jnp.zeros(()) if is_qarray(x) else largest_magnitude(x), scale)

    return StepScales(seen(weight, scales.weight), seen(activation, scales.activation), scales.gradient)


def _residual(rules: Rules, x: Any, entered: Any, is_left: bool) -> Residual:
    """What the gradient of the other operand needs of this one, and where this one's own passes."""
    arm, scheme = rules.arm(not is_left), rules.scheme(is_left)
    passes = None
    if rules.policy.clips_gradient and scheme is not None and scheme.calibration.clips and not is_qarray(x):
        passes = is_covered(x, entered)
    keeps_forward = arm.operand == "forward"
    return Residual(entered if keeps_forward else None, None if keeps_forward else x, passes, _form(x))


def _form(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an operand, and how it is sharded on an explicit mesh."""
    sharding = x.sharding if is_qarray(x) else held_sharding(x)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _operand_gradient(
    bilinear: AbstractBilinear,
    arm: Arm,
    g: jax.Array,
    is_left: bool,
    own: Residual,
    other: Residual,
    extra: Any,
    key: Any,
    scale: Any,
) -> jax.Array:
    """The gradient of one operand by its arm, in the operand's dtype, and zero where it does not pass.

    `scale` is that of the incoming gradient where earlier steps decided it.
    """
    if arm.gradient is None:
        met = other.forward if arm.operand == "forward" else other.original
        result = bilinear.transposed(is_left, g, met, own.like, extra)
    else:
        if arm.needs_key:
            if key is None:
                raise QuantError(
                    f"the gradient is rounded or rotated at random (as {arm.gradient.name}); pass key=, one a step"
                )
            key = _own_key(key, is_left, g)
        result = _quantized_gradient(bilinear, arm, g, is_left, own.like, other, extra, key, scale)
    result = result.astype(own.like.dtype)
    return result if own.passes is None else jnp.where(own.passes, result, jnp.zeros_like(result))


def _quantized_gradient(
    bilinear: AbstractBilinear,
    arm: Arm,
    g: jax.Array,
    is_left: bool,
    like: Any,
    other: Residual,
    extra: Any,
    key: Any,
    scale: Any,
) -> jax.Array:
    """The gradient of one operand from the quantized incoming gradient."""
    axes, other_axes = bilinear.contracted_backward(is_left)
    if arm.tiled_axis == "first":
        axes, other_axes = axes[::-1], other_axes[::-1]
    met, zeros = other.original if other.forward is None else other.forward, None
    assert arm.gradient is not None
    if arm.operand == "forward" and is_qarray(met) and scale is None:
        g, met, zeros = _folded(bilinear, arm.gradient, g, is_left, met, extra)
    elif isinstance(arm.operand, Scheme):
        met = floating(met)
        if arm.hadamard is not None:
            g, met = rotated(g, met, axes[-1], other_axes[-1], arm.hadamard, jax.random.fold_in(key, 1))
        met = quantize(met, arm.operand, axis=_some(other_axes))
    noise = jax.random.fold_in(key, 2) if arm.rounding == "stochastic" else None
    shared = {"element": (), "row": axes, "tensor": tuple(range(g.ndim))}[arm.noise]
    codes = quantize(g, arm.gradient, axis=_some(axes), key=noise, scale=scale, shared_noise=shared)
    result = bilinear.backward(is_left, codes, met, like, extra, arm.accumulator)
    if zeros is None:
        return result
    return settled(result) - settled(bilinear.backward(is_left, codes, zeros, like, extra, arm.accumulator))


def _folded(
    bilinear: AbstractBilinear, scheme: Scheme, g: jax.Array, is_left: bool, q: QArray, extra: Any
) -> tuple[jax.Array, Any, QArray | None]:
    """The gradient times the scale of the other operand, that operand's codes alone, and its zero points if it has any.

    Codes and zero points are apart because the zero points vary along what the gradient's product sums, and the other axes of
    theirs are thin. Where the scale cannot be folded in, or integers would not meet integers, all stays as it is.
    """
    scale = bilinear.beside_gradient(is_left, expanded_scale(q), extra)
    if scale is None or (q.zero_point is not None and not (is_whole(q.scheme) and isinstance(scheme.format, Integer))):
        return g, q, None
    g = g.astype(jnp.float32) * scale
    ones = jnp.ones((1,) * q.ndim, jnp.float32)
    if q.zero_point is None:
        tiles = q.scheme.with_tiles((None,) * q.ndim, q.scheme.pack_axis)
        whole = dataclasses.replace(tiles, scale=np.dtype(np.float32), tensor_scale=False)
        return g, QArray(q.codes, ones, None, None, whole, np.dtype(np.float32), q.slack), None
    both = side(q, jnp.int8)
    summed = bilinear.contracted_backward(is_left)[1]
    forward = () if bilinear.is_grouped else bilinear.contracted[1 if is_left else 0]
    shape = [1 if a in forward and a not in summed else n for a, n in enumerate(q.shape)]
    zeros = jnp.broadcast_to(both.zero, shape).astype(jnp.int8)
    codes, zeros = (
        QArray(jax.lax.bitcast_convert_type(x, jnp.uint8), ones, None, None, _CODES, np.dtype(np.float32))
        for x in (both.values, zeros)
    )
    return g, codes, zeros


def met_product(meeting: Meeting, lhs: Any, rhs: Any, accumulator: str | None) -> jax.Array:
    """The product of two operands: of their codes where they meet as such, else of the decoded arrays, in float32."""
    result = code_product(meeting, lhs, rhs, accumulator) if is_qarray(lhs) and is_qarray(rhs) else None
    if result is None:
        refuse_accumulator(accumulator)
        left, right = (floating(x).astype(jnp.float32) for x in (lhs, rhs))
        result = meeting.product(left, right, jnp.float32)
    return result


@functools.partial(jax.jit, static_argnums=0, inline=True)
def weight_only(bilinear: AbstractBilinear, lhs: Any, rhs: Any, extra: Any) -> jax.Array:
    """JAX's own product of the decoded operands; what is decoded is not kept for the gradient, but decoded again there."""
    return jax.checkpoint(bilinear.values)(lhs, rhs, extra)


def _own_key(key: Any, is_left: bool, g: jax.Array) -> Any:
    """A key for one arm of one product, told apart from all others by the sum of the gradient it meets."""
    bits = jax.lax.bitcast_convert_type(jnp.sum(g.astype(jnp.float32)), jnp.uint32)
    return jax.random.fold_in(jax.random.fold_in(key, int(is_left)), bits)


def _cotangent(x: Any, gradient: jax.Array) -> Any:
    """The gradient in the form of its operand: that of a QArray is the gradient of its scales."""
    return jax.vjp(dequantize, x)[1](gradient)[0] if is_qarray(x) else gradient


def floating(x: Any) -> jax.Array:
    """The array that an operand stands for."""
    return dequantize(x) if is_qarray(x) else x


def _some(axes: Axes) -> Axes:
    """The contracted axes, or the last one of an operand of which none is."""
    return axes or (-1,)

"""Bilinear products under a Policy: quantized operands, and the custom VJP.

A bilinear product has two more in its backward pass: the gradient of each operand contracts the incoming gradient with the
other operand. `AbstractBilinear` says what the three contract; the rest is the same for matrix products, convolutions and
ragged products.
"""

import abc
import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from .._explicit_mesh import explicit_sharding
from ..array.covered import is_covered
from ..array.qarray import QArray, is_qarray
from ..array.quantize import expanded_scale
from ..array.scheme import Scheme
from ..errors import QuantError, UnsupportedError
from ..formats.format import FORMATS, settled
from ..formats.integer import Integer
from ..kernels.qmatmul.code_product import CodeProduct, code_product, refuse_accumulator, side
from ..kernels.qmatmul.integer_codes import is_whole
from ..kernels.quantize.dispatch import dequantize, quantize
from .hadamard import rotated
from .policy import Arm
from .qat.delayed_scales import StepScales, amax_cotangent, largest_magnitude
from .qat.serving_quantize import quantized_as_served
from .resolve_policy import ProductConfig

Axes = tuple[int, ...]
ArrayOrQArray: TypeAlias = jax.Array | QArray
Extra: TypeAlias = PyTree
"""The operands in which a product is not linear, such as group sizes; mostly None."""

_CODES = Scheme(FORMATS["int8"])
"""The scheme of bare int8 codes, whose scale is 1."""


@dataclasses.dataclass(frozen=True)
class AbstractBilinear(abc.ABC):
    """A product that is linear in its left and in its right operand."""

    @abc.abstractmethod
    def values(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra) -> jax.Array:
        """JAX's own product of the decoded operands."""

    @abc.abstractmethod
    def forward(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None, accumulator: str | None = None
    ) -> jax.Array:
        """The product of operands that may be quantized. Codes are summed in `accumulator`, if given."""

    @property
    @abc.abstractmethod
    def contracted(self) -> tuple[Axes, Axes]:
        """The contraction axes of the left and of the right operand. Tiles run along the last."""

    @abc.abstractmethod
    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        """The contraction axes of an operand's gradient.

        They are those of the incoming gradient, and those of the other operand.
        """

    @abc.abstractmethod
    def scale_for_gradient(self, is_left: bool, scale: jax.Array, extra: Extra) -> jax.Array | None:
        """The other operand's scale per element, broadcastable to the incoming gradient.

        None where it varies along an axis that the gradient does not have, so that it cannot be folded in.
        """

    @property
    def is_grouped(self) -> bool:
        """Whether groups of one operand multiply groups of the other. If so, no axis may be shortened to one element."""
        return False

    @abc.abstractmethod
    def backward(
        self,
        is_left: bool,
        gradient: ArrayOrQArray,
        other: ArrayOrQArray,
        like: jax.ShapeDtypeStruct,
        extra: Extra,
        accumulator: str | None = None,
    ) -> jax.Array:
        """The gradient of one operand from the incoming gradient and the other operand, either possibly quantized.

        An axis along which the other operand was shortened to one element has one in the gradient, too.
        """

    def transposed(
        self, is_left: bool, gradient: jax.Array, other: ArrayOrQArray, like: jax.ShapeDtypeStruct, extra: Extra
    ) -> jax.Array:
        """JAX's own transpose of the product with respect to one operand."""

        def of_one(x: jax.Array) -> jax.Array:
            if is_left:
                return self.values(x, other, extra)
            return self.values(other, x, extra)

        gradient = gradient.astype(jax.eval_shape(of_one, like).dtype)
        return jax.linear_transpose(of_one, like)(gradient)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Residual:
    """What the forward pass saves of one operand for the backward pass.

    Attributes:
        forward: the operand as it entered the product; None where no gradient uses it.
        original: the operand before quantization; None likewise.
        passes: the mask of elements that get a gradient; None for all.
        like: its shape and dtype.
    """

    forward: Any
    original: Any
    passes: Any
    like: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Random:
    """The random numbers of one operand's gradient.

    Attributes:
        key: for stochastic rounding.
        signs: words whose bits are the signs of the Hadamard rotation.
    """

    key: jax.Array
    signs: jax.Array


def quantized_product(
    bilinear: AbstractBilinear,
    config: ProductConfig,
    lhs: ArrayOrQArray,
    rhs: ArrayOrQArray,
    extra: Extra = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """The product under a policy, with the policy's gradients as its custom VJP.

    Args:
        bilinear: the product.
        config: the policy, and which operand is the weight.
        lhs: the left operand; a QArray is used as it is.
        rhs: the right operand, likewise.
        extra: the operands in which the product is not linear.
        key: a JAX random key for gradients that draw random numbers. The numbers depend on the gradient, too, so one key
            may serve many products and every iteration of a loop.

    Returns:
        The product.

    Raises:
        UnsupportedError: for its second derivative.
    """

    def entering(
        lhs: ArrayOrQArray, rhs: ArrayOrQArray, scales: StepScales | None, prequantized: tuple[QArray | None, QArray | None]
    ) -> tuple[ArrayOrQArray, ArrayOrQArray]:
        left, right = prequantized
        if left is None:
            left = _entering(bilinear, config, lhs, True, scales)
        if right is None:
            right = _entering(bilinear, config, rhs, False, scales)
        return left, right

    @jax.custom_vjp
    def product(
        lhs: ArrayOrQArray, rhs: ArrayOrQArray, key: PyTree, extra: Extra, scales: PyTree, prequantized: PyTree
    ) -> jax.Array:
        return bilinear.forward(*entering(lhs, rhs, scales, prequantized), extra, config.policy.accumulator)

    def forward(
        lhs: ArrayOrQArray, rhs: ArrayOrQArray, key: PyTree, extra: Extra, scales: PyTree, prequantized: PyTree
    ) -> PyTree:
        lhs, rhs = _differentiated_once((lhs, rhs))
        left, right = entering(lhs, rhs, scales, prequantized)
        kept = _residual(config, lhs, left, True), _residual(config, rhs, right, False)
        forms = tuple(x if is_qarray(x) else None for x in (lhs, rhs))  # a float operand is not kept for its form alone
        seen = _seen(config, scales, lhs, rhs)
        return bilinear.forward(left, right, extra, config.policy.accumulator), (kept, forms, key, extra, scales, seen)

    def backward(saved: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        (left, right), (lhs, rhs), key, extra, scales, seen = saved
        scale = getattr(scales, "gradient", None)
        random_left, random_right = _own_random(config, key, gradient)
        to_left = _operand_gradient(bilinear, config, gradient, True, left, right, extra, random_left, scale)
        to_right = _operand_gradient(bilinear, config, gradient, False, right, left, extra, random_right, scale)
        if scale is not None:
            seen = dataclasses.replace(seen, gradient=amax_cotangent(largest_magnitude(gradient), scale))
        return _cotangent(lhs, to_left), _cotangent(rhs, to_right), None, None, seen, None

    product.defvjp(forward, backward)
    return product(lhs, rhs, key, extra, config.scales, config.prequantized)


def _differentiated_once(operands: PyTree) -> PyTree:
    """The operands of a product or of its gradient, which have no further derivative: that of rounding would be zero."""
    return jax.tree.map(lambda x: _once(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands)


@jax.custom_jvp
def _once(x: jax.Array) -> jax.Array:
    return x


@_once.defjvp
def _twice(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    raise UnsupportedError(
        "the gradients of a product under a policy have no derivative, for they take rounding for the identity; take second "
        "derivatives of the function of float parameters"
    )


def _entering(
    bilinear: AbstractBilinear, config: ProductConfig, x: ArrayOrQArray, is_left: bool, scales: StepScales | None
) -> ArrayOrQArray:
    """An operand as it enters the product. A scalar has no axis for a scale and stays a float."""
    scheme = config.scheme(is_left)
    if scheme is None or isinstance(x, QArray) or not x.ndim:
        return x
    axes = _some(bilinear.contracted[int(not is_left)])
    if config.served is not None and is_left == config.weight_is_left:
        return quantized_as_served(x, config.served, scheme, axes)
    return quantize(x, scheme, axis=axes, scale=config.scale(scales, is_left))


def _seen(config: ProductConfig, scales: StepScales | None, lhs: ArrayOrQArray, rhs: ArrayOrQArray) -> StepScales | None:
    """The amax of both operands, under delayed scaling; 0 for a QArray."""
    if scales is None:
        return None
    weight, activation = rhs, lhs
    if config.weight_is_left:
        weight, activation = lhs, rhs

    def seen(x: ArrayOrQArray, scale: jax.Array | None) -> jax.Array | None:
        if scale is None:
            return None
        amax = jnp.zeros(()) if isinstance(x, QArray) else largest_magnitude(x)
        return amax_cotangent(amax, scale)

    return StepScales(seen(weight, scales.weight), seen(activation, scales.activation), scales.gradient)


def _residual(config: ProductConfig, x: ArrayOrQArray, entered: ArrayOrQArray, is_left: bool) -> Residual:
    """What the backward pass needs of one operand.

    That is for the gradient of the other operand, and the mask of this one's own gradient.
    """
    passes = None
    if (
        isinstance(entered, QArray)
        and not isinstance(x, QArray)  # quantized here
        and config.policy.clips_gradient
        and entered.scheme.calibration.clips
    ):
        passes = is_covered(x, entered)
    if config.arm(not is_left).operand == "forward":
        return Residual(entered, None, passes, _form(x))
    return Residual(None, x, passes, _form(x))


def _form(x: ArrayOrQArray) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an operand, and its sharding over Explicit axes of a mesh."""
    leaf = x.codes if isinstance(x, QArray) else x  # codes have the axes of the array
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=explicit_sharding(leaf))


def _operand_gradient(
    bilinear: AbstractBilinear,
    config: ProductConfig,
    g: jax.Array,
    is_left: bool,
    own: Residual,
    other: Residual,
    extra: Extra,
    random: Random | None,
    scale: jax.Array | None,
) -> jax.Array:
    """The gradient of one operand in its dtype, zero where the mask stops it.

    `scale` is the delayed scale of the incoming gradient, or None. Where the incoming gradient (of a full contraction) or the
    other operand is a scalar, it has no axis for a scale and nothing is summed: their product is one of floats.
    """
    arm, where = config.arm(is_left), ""
    if config.label.path:
        where = f"{config.label}: "
    if arm.gradient is None or not g.ndim or not other.like.shape:
        operand = other.original
        if arm.operand == "forward":
            operand = other.forward
        result = bilinear.transposed(is_left, g, operand, own.like, extra)
    else:
        if arm.needs_key and random is None:
            raise QuantError(
                f"{where}the gradient is rounded or rotated at random (as {arm.gradient.name}); pass key=, one a step"
            )
        result = _quantized_gradient(bilinear, arm, g, is_left, own.like, other, extra, random, scale, where)
    result = result.astype(own.like.dtype)
    if own.passes is None:
        return result
    return jnp.where(own.passes, result, jnp.zeros_like(result))


def _quantized_gradient(
    bilinear: AbstractBilinear,
    arm: Arm,
    g: jax.Array,
    is_left: bool,
    like: jax.ShapeDtypeStruct,
    other: Residual,
    extra: Extra,
    random: Random | None,
    scale: jax.Array | None,
    where: str,
) -> jax.Array:
    """The gradient of one operand from the quantized incoming gradient. `where` begins the messages of errors."""
    g = _differentiated_once(g)
    axes, other_axes = bilinear.contracted_backward(is_left)
    if arm.tiled_axis == "first":
        axes, other_axes = axes[::-1], other_axes[::-1]
    operand, zeros, noise = other.forward, None, None
    if operand is None:
        operand = other.original
    assert arm.gradient is not None
    if arm.operand == "forward" and is_qarray(operand) and scale is None:
        g, operand, zeros = _folded(bilinear, arm.gradient, g, is_left, operand, extra)
    elif isinstance(arm.operand, Scheme):
        operand = floating(operand)
        if arm.hadamard is not None:
            assert random is not None
            operands = f"the product of the incoming gradient {g.shape} and the other operand {operand.shape}"
            if not axes:
                raise QuantError(
                    f"{where}hadamard={arm.hadamard} rotates along the contraction axis of the gradient, and {operands} has none; "
                    "set hadamard to null"
                )
            if g.shape[axes[-1]] % arm.hadamard:
                raise QuantError(
                    f"{where}hadamard={arm.hadamard} must divide the contraction axis of the gradient, and "
                    f"{g.shape[axes[-1]]} elements are summed, in {operands}; pad the batch, or set hadamard to null"
                )
            g, operand = rotated(g, operand, axes[-1], other_axes[-1], arm.hadamard, random.signs)
        operand = quantize(operand, arm.operand, axis=_some(other_axes))
    if arm.rounding == "stochastic":
        assert random is not None
        noise = random.key
    shared = {"element": (), "row": axes, "tensor": tuple(range(g.ndim))}[arm.noise]
    codes = quantize(g, arm.gradient, axis=_some(axes), key=noise, scale=scale, shared_noise=shared)
    result = bilinear.backward(is_left, codes, operand, like, extra, arm.accumulator)
    if zeros is None:
        return result
    return settled(result) - settled(bilinear.backward(is_left, codes, zeros, like, extra, arm.accumulator))


def _folded(
    bilinear: AbstractBilinear, scheme: Scheme, g: jax.Array, is_left: bool, q: QArray, extra: Extra
) -> tuple[jax.Array, QArray, QArray | None]:
    """The gradient times the scale of `q`, and `q` without it.

    That is the codes of `q` with scale 1, and its zero points or None. Codes and zero points are two operands because zero
    points vary along the contraction of the gradient's product only, and have one element along the other axes. Where the
    scale cannot be folded in, or only one side has integer codes, gradient and `q` come back as they are.
    """
    scale = bilinear.scale_for_gradient(is_left, expanded_scale(q), extra)
    if scale is None or (q.zero_point is not None and not (is_whole(q.scheme) and isinstance(scheme.format, Integer))):
        return g, q, None
    g = g.astype(jnp.float32) * scale
    ones = jnp.ones((1,) * q.ndim, jnp.float32)
    if q.zero_point is None:
        tiles = q.scheme.with_tiles((None,) * q.ndim, q.scheme.pack_axis)
        whole = dataclasses.replace(tiles, scale=np.dtype(np.float32), tensor_scale=False)
        return g, QArray(q.codes, ones, None, None, whole, np.dtype(np.float32), q.slack), None
    both = side(q, jnp.int8)
    shape = list(q.shape)
    if not bilinear.is_grouped:
        summed = bilinear.contracted_backward(is_left)[1]
        for axis in set(bilinear.contracted[int(is_left)]).difference(summed):
            shape[axis] = 1
    zeros = jnp.broadcast_to(both.zero, shape).astype(jnp.int8)
    codes, zeros = (
        QArray(jax.lax.bitcast_convert_type(x, jnp.uint8), ones, None, None, _CODES, np.dtype(np.float32))
        for x in (both.values, zeros)
    )
    return g, codes, zeros


def coded_product(pairing: CodeProduct, lhs: ArrayOrQArray, rhs: ArrayOrQArray, accumulator: str | None) -> jax.Array:
    """The product of two operands in float32. It is that of their codes where possible, else of the decoded arrays."""
    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        result = code_product(pairing, lhs, rhs, accumulator)
        if result is not None:
            return result
    refuse_accumulator(accumulator)
    left, right = (floating(x).astype(jnp.float32) for x in (lhs, rhs))
    return pairing.product(left, right, jnp.float32)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def weight_only(bilinear: AbstractBilinear, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra) -> jax.Array:
    """JAX's own product of the decoded operands. The backward pass decodes them again instead of saving them."""
    return jax.checkpoint(bilinear.values)(lhs, rhs, extra)


def _own_random(config: ProductConfig, key: jax.Array | None, g: jax.Array) -> tuple[Random | None, Random | None]:
    """The random numbers of the gradients of both operands. None without a key, or where none are drawn.

    Keys that differ in a bit give unrelated numbers, so the gradient's sum and the side are xored into the words of the key:
    each product draws numbers of its own. `jax.random.fold_in` would do, but XLA compiles its 20 rounds anew for each product.
    """
    arms = config.arm(True), config.arm(False)
    if key is None or not any(arm.needs_key for arm in arms):
        return None, None
    total = jax.lax.bitcast_convert_type(jnp.sum(g.astype(jnp.float32)), jnp.uint32)
    words, impl, found = jax.random.key_data(key), jax.random.key_impl(key), []
    ends = np.eye(len(words), dtype=np.uint32)[[0, -1]]
    own = words ^ total * ends[0]
    for arm, constant in zip(arms, (0x9E3779B9, 0x85EBCA77), strict=True):
        of_side = own ^ np.uint32(constant) * ends[1]
        places = jnp.arange(-(-(arm.hadamard or 0) // 32), dtype=jnp.uint32)
        signs = _mixed(_mixed(of_side[0] ^ places) ^ of_side[-1])
        found.append(Random(jax.random.wrap_key_data(of_side, impl=impl), signs))
    return found[0], found[1]


def _mixed(words: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Words in which each bit depends on all bits (the last step of MurmurHash3)."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
    return words ^ (words >> 16)


def _cotangent(x: QArray | None, gradient: jax.Array) -> PyTree:
    """The cotangent of an operand: of a QArray, the gradient of its scales."""
    if x is None:
        return gradient
    return jax.vjp(dequantize, x)[1](gradient)[0]


def floating(x: ArrayOrQArray) -> jax.Array:
    """An operand as an array: a QArray is dequantized."""
    return dequantize(x) if isinstance(x, QArray) else x


def _some(axes: Axes) -> Axes:
    """The contraction axes, or the last axis where there are none."""
    return axes or (-1,)

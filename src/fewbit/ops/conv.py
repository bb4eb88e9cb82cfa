"""`conv_general_dilated` on quantized operands, or under a policy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key

from ..array.qarray import QArray, is_qarray
from ..kernels.qmatmul.code_product import CodeProduct, refuse_accumulator
from .bilinear import AbstractBilinear, ArrayOrQArray, Axes, Extra, coded_product, floating, quantized_product, weight_only
from .conv_vjp import Window
from .policy import Policy
from .qat.latent import Latent
from .resolve_policy import resolved


def conv_general_dilated(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: jax.lax.ConvGeneralDilatedDimensionNumbers = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` for QArrays, or under a policy; any layout, any groups.

    Weight-only: the result is that of `lax.conv_general_dilated` on the decoded operand. Under a policy, activations have one
    scale per sample and kernels one per output channel, unless their schemes have smaller tiles (blocks); those run along the
    input channels, or along the window where there is one input channel. Where scales are constant along the contraction
    axes, the codes are convolved, integers into int32.

    Args:
        lhs: the images.
        rhs: the kernel.
        window_strides: as in `lax.conv_general_dilated`, and so are the arguments up to `preferred_element_type`.
        padding: likewise.
        lhs_dilation: likewise.
        rhs_dilation: likewise.
        dimension_numbers: likewise.
        feature_group_count: likewise.
        batch_group_count: likewise.
        precision: likewise.
        preferred_element_type: likewise.
        policy: how to compute; None takes the policy that an operand carries.
        key: a JAX random key, for policies whose backward pass draws random numbers.

    Returns:
        The convolution.

    Raises:
        QuantError: when operands carry different policies and none is given; in the backward pass, when a policy needs a key.
        UnsupportedError: for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> kernel = quantize(jnp.ones((4, 3, 2, 2)), "int8", axis=(2, 3, 1))
    >>> conv_general_dilated(jnp.ones((1, 3, 5, 5)), kernel, (1, 1), "VALID").shape
    (1, 4, 4, 4)
    """
    left, right, config, key = resolved(lhs, rhs, policy, key)
    if not isinstance(padding, str):
        padding = tuple((int(a), int(b)) for a, b in padding)
    conv = Conv(
        tuple(window_strides),
        padding,
        _dilation(lhs_dilation),
        _dilation(rhs_dilation),
        jax.lax.conv_dimension_numbers(left.shape, right.shape, dimension_numbers),
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
    )
    if config is None:
        return conv.forward(left, right)
    return quantized_product(conv, config, left, right, key=key)


@dataclasses.dataclass(frozen=True)
class Conv(AbstractBilinear):
    """`conv_general_dilated` with its settings.

    Attributes:
        strides: as in `lax.conv_general_dilated`, like the rest.
        padding: "SAME", "VALID" or the elements before and after each spatial axis.
        lhs_dilation: of each spatial axis; None: 1.
        rhs_dilation: of each spatial axis; None: 1.
        numbers: the dimension numbers, resolved.
        feature_groups: the number of groups of input channels.
        batch_groups: the number of groups of samples.
        precision: of floating-point products.
        preferred: the dtype of the result, or None.
    """

    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    numbers: ConvDimensionNumbers
    feature_groups: int
    batch_groups: int
    precision: Any
    preferred: Any

    def values(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None) -> jax.Array:
        return self._convolved(floating(lhs), floating(rhs), self.preferred)

    def forward(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None, accumulator: str | None = None
    ) -> jax.Array:
        if not (is_qarray(lhs) or is_qarray(rhs)):
            refuse_accumulator(accumulator)
            return self.values(lhs, rhs)
        if not (is_qarray(lhs) and is_qarray(rhs)):
            refuse_accumulator(accumulator)
            return weight_only(self, lhs, rhs, extra)
        dtype = self.preferred or jnp.promote_types(lhs.dtype, rhs.dtype)
        return coded_product(self._code_product(), lhs, rhs, accumulator).astype(dtype)

    def _code_product(self) -> CodeProduct:
        """The convolution, described for products of codes."""
        left, kernel, out = self._specs

        def placed(x: jax.Array, is_left: bool) -> jax.Array | None:
            if not is_left:
                return _along(x, kernel[0], out[1])
            # With groups of samples the result has fewer samples than the images.
            return _along_if(self.batch_groups == 1, x, left[0], out[0])

        thin = ((), ()) if self.is_grouped else ((left[0],), (kernel[0],))
        return CodeProduct(self._convolved, placed, self.contracted, thin, takes_two_types=False)

    def backward(
        self,
        is_left: bool,
        gradient: ArrayOrQArray,
        other: ArrayOrQArray,
        like: jax.ShapeDtypeStruct,
        extra: Extra,
        accumulator: str | None = None,
    ) -> jax.Array:
        return coded_product(self._code_product_backward(is_left, like), gradient, other, accumulator)

    def _code_product_backward(self, is_left: bool, like: jax.ShapeDtypeStruct) -> CodeProduct:
        """The product that gives the gradient of one operand.

        It multiplies the incoming gradient, on the left, and the other operand.
        """
        left, kernel, out = self._specs

        def product(g: jax.Array, other: jax.Array, dtype: DTypeLike) -> jax.Array:
            if is_left:
                return self._window(like.shape, other.shape).images_gradient(g, other, like.shape, dtype)
            return self._window(other.shape, like.shape).kernel_gradient(g, other, like.shape, dtype)

        def of_images(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if is_gradient:
                return _along_if(self.batch_groups == 1, x, out[0], left[0])
            scale = _along(x, kernel[1], left[1])
            if scale is None or scale.size == 1:
                return scale
            return jnp.concatenate([scale] * self.feature_groups, left[1])

        def of_kernel(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if is_gradient:
                return _along(x, out[1], kernel[0])
            # Each group of outputs has other input channels.
            return _along_if(self.feature_groups == 1, x, left[1], kernel[1])

        free, placed = ((out[0],), (kernel[1],)), of_images
        if not is_left:
            free, placed = ((out[1],), (left[1],)), of_kernel
        if self.is_grouped:
            free = ((), ())
        return CodeProduct(product, placed, self.contracted_backward(is_left), free, takes_two_types=False)

    @property
    def is_grouped(self) -> bool:
        return self.feature_groups != 1 or self.batch_groups != 1

    def _window(self, lhs: Axes, rhs: Axes) -> Window:
        """The settings with explicit padding and dilations, for images and a kernel of these shapes."""
        left, kernel, out = self._specs
        ones = (1,) * (len(lhs) - 2)
        dilations = self.lhs_dilation or ones, self.rhs_dilation or ones
        padding = self.padding
        if isinstance(padding, str):
            dilated = [(rhs[axis] - 1) * d + 1 for axis, d in zip(kernel[2:], dilations[1], strict=True)]
            pads = jax.lax.padtype_to_pads([lhs[axis] for axis in left[2:]], dilated, self.strides, padding)
            padding = tuple((int(a), int(b)) for a, b in pads)
        groups = self.feature_groups, self.batch_groups
        return Window(self.strides, padding, *dilations, left, kernel, out, *groups, self.precision)

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        left, kernel, _ = self._specs
        return (*left[2:], left[1]), (*kernel[2:], kernel[1])

    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        left, kernel, out = self._specs
        if is_left:
            return (*out[2:], out[1]), (*kernel[2:], kernel[0])
        return (*out[2:], out[0]), (*left[2:], left[0])

    def scale_for_gradient(self, is_left: bool, scale: jax.Array, extra: Extra) -> jax.Array | None:
        return self._code_product().placed(scale, not is_left)

    def _convolved(self, lhs: jax.Array, rhs: jax.Array, preferred: DTypeLike | None) -> jax.Array:
        return jax.lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.numbers,
            feature_group_count=self.feature_groups,
            batch_group_count=self.batch_groups,
            precision=self.precision,
            preferred_element_type=preferred,
        )

    @property
    def _specs(self) -> tuple[Axes, Axes, Axes]:
        """The axes of images, kernel and result.

        Of images and result: batch, feature and spatial axes. Of the kernel: output, input and spatial axes.
        """
        return tuple(self.numbers.lhs_spec), tuple(self.numbers.rhs_spec), tuple(self.numbers.out_spec)


def _dilation(given: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if given is None else tuple(given)


def _along(scale: jax.Array, axis: int, place: int) -> jax.Array | None:
    """A scale that varies along one axis only, moved to another axis. None for any other."""
    if any(n != 1 for a, n in enumerate(scale.shape) if a != axis):
        return None
    shape = [1] * scale.ndim
    shape[place] = -1
    return scale.reshape(shape)


def _along_if(is_ungrouped: bool, scale: jax.Array, axis: int, place: int) -> jax.Array | None:
    """`_along` where the axis is not cut into groups, or there is one scale; else None."""
    return _along(scale, axis, place) if is_ungrouped or scale.size == 1 else None

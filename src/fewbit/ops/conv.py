"""`conv_general_dilated` on operands that may be quantized, or that a policy quantizes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key

from ..array import QArray, is_qarray
from ..kernels.qmatmul.codes import Meeting, refuse_accumulator
from .arms import AbstractBilinear, Axes, floating, met_product, quantized_product, weight_only
from .conv_gradients import Window
from .latent import Latent
from .operands import resolved
from .policy import Policy


def conv_general_dilated(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` for operands that are QArrays, or that a policy quantizes; any layout, any groups.

    Weight-only: the result is that of `lax.conv_general_dilated` on the decoded operand. Under a policy, activations take one
    scale a sample and kernels one an output channel, unless their schemes have finer tiles, which run along the input
    channels, or along the window of a kernel that has one. Where no scale varies along what the convolution sums, the codes
    are convolved, integers into int32.

    Args:
        lhs: the images, or whatever the kernel slides over.
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
        policy: how to compute; None takes the policy of the operand that carries one.
        key: a JAX random key, for policies whose backward pass draws random numbers.

    Returns:
        The convolution.

    Raises:
        QuantError: when two operands carry different policies and none is given; in the backward pass, when a policy needs a
            key.
        UnsupportedError: for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> kernel = quantize(jnp.ones((4, 3, 2, 2)), "int8", axis=(2, 3, 1))
    >>> conv_general_dilated(jnp.ones((1, 3, 5, 5)), kernel, (1, 1), "VALID").shape
    (1, 4, 4, 4)
    """
    left, right, rules, key = resolved(lhs, rhs, policy, key)
    conv = Conv(
        tuple(window_strides),
        padding if isinstance(padding, str) else tuple((int(a), int(b)) for a, b in padding),
        None if lhs_dilation is None else tuple(lhs_dilation),
        None if rhs_dilation is None else tuple(rhs_dilation),
        jax.lax.conv_dimension_numbers(left.shape, right.shape, dimension_numbers),
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
    )
    return conv.forward(left, right, None) if rules is None else quantized_product(conv, rules, left, right, key=key)


@dataclasses.dataclass(frozen=True)
class Conv(AbstractBilinear):
    """`conv_general_dilated` with its settings.

    Attributes:
        strides: as in `lax.conv_general_dilated`, and so are the others.
        padding: a word, or the elements before and after each spatial axis.
        lhs_dilation: for each spatial axis, or None.
        rhs_dilation: for each spatial axis, or None.
        numbers: the dimension numbers, resolved.
        feature_groups: how many groups of input channels.
        batch_groups: how many groups of samples.
        precision: of products in floating point.
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

    def values(self, lhs: Any, rhs: Any, extra: Any) -> jax.Array:
        return self._convolved(floating(lhs), floating(rhs), self.preferred)

    def forward(self, lhs: Any, rhs: Any, extra: Any, accumulator: str | None = None) -> jax.Array:
        if not (is_qarray(lhs) and is_qarray(rhs)):
            refuse_accumulator(accumulator)
            return weight_only(self, lhs, rhs, extra) if is_qarray(lhs) or is_qarray(rhs) else self.values(lhs, rhs, extra)
        dtype = self.preferred or jnp.promote_types(lhs.dtype, rhs.dtype)
        return met_product(self._meeting(), lhs, rhs, accumulator).astype(dtype)

    def _meeting(self) -> Meeting:
        """The convolution as codes meet in it."""
        left, kernel, out = self._specs

        def placed(x: jax.Array, is_left: bool) -> jax.Array | None:
            if not is_left:
                return _along(x, kernel[0], out[1])
            # With groups of samples the result has fewer samples than the images.
            return _along(x, left[0], out[0]) if self.batch_groups == 1 or x.size == 1 else None

        thin = ((), ()) if self.is_grouped else ((left[0],), (kernel[0],))
        return Meeting(self._convolved, placed, self.contracted, thin, takes_two_types=False)

    def backward(
        self,
        is_left: bool,
        gradient: Any,
        other: Any,
        like: jax.ShapeDtypeStruct,
        extra: Any,
        accumulator: str | None = None,
    ) -> jax.Array:
        return met_product(self._meeting_backward(is_left, like, extra), gradient, other, accumulator)

    def _meeting_backward(self, is_left: bool, like: jax.ShapeDtypeStruct, extra: Any) -> Meeting:
        """The gradient of one operand as a product of the incoming gradient, on the left, and the other operand."""
        left, kernel, out = self._specs

        def product(g: jax.Array, other: jax.Array, dtype: Any) -> jax.Array:
            window = self._window(like.shape, other.shape) if is_left else self._window(other.shape, like.shape)
            gradient = window.images_gradient if is_left else window.kernel_gradient
            return gradient(g, other, like.shape, dtype)

        def of_images(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if is_gradient:
                return _along(x, out[0], left[0]) if self.batch_groups == 1 or x.size == 1 else None
            scale = _along(x, kernel[1], left[1])
            return scale if scale is None or scale.size == 1 else jnp.concatenate([scale] * self.feature_groups, left[1])

        def of_kernel(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if is_gradient:
                return _along(x, out[1], kernel[0])
            # Each group of outputs has other input channels.
            return _along(x, left[1], kernel[1]) if self.feature_groups == 1 or x.size == 1 else None

        free = (out[0], kernel[1]) if is_left else (out[1], left[1])
        thin = ((), ()) if self.is_grouped else ((free[0],), (free[1],))
        placed = of_images if is_left else of_kernel
        return Meeting(product, placed, self.contracted_backward(is_left), thin, takes_two_types=False)

    @property
    def is_grouped(self) -> bool:
        return self.feature_groups != 1 or self.batch_groups != 1

    def _window(self, lhs: Axes, rhs: Axes) -> Window:
        """The settings written out, for images and a kernel of these shapes."""
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

    def beside_gradient(self, is_left: bool, scale: jax.Array, extra: Any) -> jax.Array | None:
        left, kernel, out = self._specs
        if is_left:
            return _along(scale, kernel[0], out[1])
        # With groups of samples the result has fewer samples than the operand.
        return _along(scale, left[0], out[0]) if self.batch_groups == 1 or scale.size == 1 else None

    def _convolved(self, lhs: jax.Array, rhs: jax.Array, preferred: Any) -> jax.Array:
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
        """Batch, feature and spatial axes of the left; output, input and spatial axes of the kernel; and of the result."""
        return tuple(self.numbers.lhs_spec), tuple(self.numbers.rhs_spec), tuple(self.numbers.out_spec)


def _along(scale: jax.Array, axis: int, place: int) -> jax.Array | None:
    """A scale that varies along one axis only, moved to another place; None for any other."""
    if any(n != 1 for a, n in enumerate(scale.shape) if a != axis):
        return None
    return scale.reshape([-1 if a == place else 1 for a in range(scale.ndim)])

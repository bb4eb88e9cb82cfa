"""The gradients of a convolution as convolutions, of arrays in any dtype: so that codes are convolved backwards, too.

In the letters of one group and one axis, with stride `t`, dilations `l` of the images and `r` of the kernel, and padding from `a`,

    out[n, o, s] = sum over i, k    lhs[n, i, p] rhs[o, i, k]     where s t + k r = p l + a

The gradient of `lhs` slides the kernel, turned round, over `g` dilated by `t`; that of `rhs` slides `g`, dilated by `t`, over
the images, with samples in the place of channels. Groups of channels of the one are groups of samples of the other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """How a kernel slides over images.

    Attributes:
        strides: for each spatial axis, and so are the next three.
        padding: the elements before and after.
        lhs_dilation: the distance of the images' elements.
        rhs_dilation: the distance of the kernel's elements.
        left: the batch, feature and spatial axes of the images.
        kernel: the output, input and spatial axes of the kernel.
        out: the batch, feature and spatial axes of the result.
        feature_groups: how many groups of input channels.
        batch_groups: how many groups of samples.
        precision: of products in floating point.
    """

    strides: Axes
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: Axes
    rhs_dilation: Axes
    left: Axes
    kernel: Axes
    out: Axes
    feature_groups: int
    batch_groups: int
    precision: Any

    def images_gradient(self, g: jax.Array, rhs: jax.Array, shape: Axes, dtype: Any) -> jax.Array:
        """The gradient of images of `shape` from that of the result and the kernel, summed in a dtype.

        Axes of channels of which the kernel has one element have one in the gradient as well.
        """
        groups = self.feature_groups * self.batch_groups  # one of them is 1
        turned = regrouped(jax.lax.rev(rhs, self.kernel[2:]), self.kernel[0], self.kernel[1], groups)
        result = self._convolved(
            g,
            turned,
            strides=self.lhs_dilation,
            padding=self._padding_of_images(g, rhs, shape),
            dilations=(self.strides, self.rhs_dilation),
            specs=(self.out, (self.kernel[1], self.kernel[0], *self.kernel[2:]), self.left),
            groups=(groups, 1),
            dtype=dtype,
        )
        return regrouped(result, self.left[1], self.left[0], self.batch_groups)

    def kernel_gradient(self, g: jax.Array, lhs: jax.Array, shape: Axes, dtype: Any) -> jax.Array:
        """The gradient of a kernel of `shape` from that of the result and the images, summed in a dtype."""
        return self._convolved(
            lhs,
            g,
            strides=self.rhs_dilation,
            padding=self._padding_of_kernel(g, lhs, shape),
            dilations=(self.lhs_dilation, self.strides),
            specs=tuple((spec[1], spec[0], *spec[2:]) for spec in (self.left, self.out, self.kernel)),
            groups=(self.batch_groups, self.feature_groups),
            dtype=dtype,
        )

    def _padding_of_images(self, g: jax.Array, rhs: jax.Array, shape: Axes) -> list[tuple[int, int]]:
        """What is put around the result's gradient so that each element of the images gets its own."""
        found = []
        for i, (before, _) in enumerate(self.padding):
            images = _reach(shape[self.left[2 + i]], self.lhs_dilation[i])
            kernel = _reach(rhs.shape[self.kernel[2 + i]], self.rhs_dilation[i])
            low = kernel - 1 - before
            found.append((low, images + kernel - 1 - _reach(g.shape[self.out[2 + i]], self.strides[i]) - low))
        return found

    def _padding_of_kernel(self, g: jax.Array, lhs: jax.Array, shape: Axes) -> list[tuple[int, int]]:
        """What is put around the images so that each element of the kernel gets its own gradient."""
        found = []
        for i, (before, _) in enumerate(self.padding):
            images = _reach(lhs.shape[self.left[2 + i]], self.lhs_dilation[i])
            kernel = _reach(shape[self.kernel[2 + i]], self.rhs_dilation[i])
            found.append((before, kernel + _reach(g.shape[self.out[2 + i]], self.strides[i]) - 1 - images - before))
        return found

    def _convolved(
        self, a: jax.Array, b: jax.Array, *, strides: Axes, padding: Any, dilations: Any, specs: Any, groups: Any, dtype: Any
    ) -> jax.Array:
        return jax.lax.conv_general_dilated(
            a,
            b,
            strides,
            padding,
            *dilations,
            dimension_numbers=ConvDimensionNumbers(*specs),
            feature_group_count=groups[0],
            batch_group_count=groups[1],
            precision=self.precision,
            preferred_element_type=dtype,
        )


def regrouped(x: jax.Array, source: int, target: int, groups: int) -> jax.Array:
    """The array with the groups that an axis begins with made the beginning of another axis.

    >>> regrouped(jnp.arange(8).reshape(4, 2), 0, 1, 2).tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    if groups == 1:
        return x
    shape = x.shape
    split = x.reshape(*shape[:source], groups, shape[source] // groups, *shape[source + 1 :])
    moved = jnp.moveaxis(split, source, target)
    lengths = {source: shape[source] // groups, target: shape[target] * groups}
    return moved.reshape([lengths.get(axis, n) for axis, n in enumerate(shape)])


def _reach(length: int, dilation: int) -> int:
    """How many places the elements of an axis take when they stand apart."""
    return (length - 1) * dilation + 1

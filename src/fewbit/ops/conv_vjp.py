"""The gradients of a convolution as convolutions, and the patches of its images.

So codes are convolved in the backward pass, too. For one group and one spatial axis,
with stride `t`, dilations `l` of the images and `r` of the kernel, and padding from `a`,

    out[n, o, s] = sum over i, k    lhs[n, i, p] rhs[o, i, k]     where s t + k r = p l + a

The gradient of `lhs` slides the reversed kernel over `g` dilated by `t`; that of `rhs` slides `g`, dilated by `t`, over the
images, with samples and channels exchanged: groups of channels become groups of samples.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import ConvDimensionNumbers
from jax.typing import DTypeLike

Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """How a kernel slides over images.

    Attributes:
        strides: of each spatial axis.
        padding: the elements before and after each spatial axis.
        lhs_dilation: of the images, for each spatial axis.
        rhs_dilation: of the kernel, for each spatial axis.
        left: the batch, feature and spatial axes of the images.
        kernel: the output, input and spatial axes of the kernel.
        out: the batch, feature and spatial axes of the result.
        feature_groups: the number of groups of input channels.
        batch_groups: the number of groups of samples.
        precision: of floating-point products.
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

    def images_gradient(self, g: jax.Array, rhs: jax.Array, shape: Axes, dtype: DTypeLike) -> jax.Array:
        """The gradient of images of `shape` from the incoming gradient and the kernel, summed in `dtype`.

        A channel axis of length 1 in the kernel has length 1 in the gradient.
        """
        groups = self.feature_groups * self.batch_groups  # one of them is 1
        reversed_kernel = regrouped(jax.lax.rev(rhs, self.kernel[2:]), self.kernel[0], self.kernel[1], groups)
        result = self._convolved(
            g,
            reversed_kernel,
            strides=self.lhs_dilation,
            padding=self._padding_of_images(g, rhs, shape),
            dilations=(self.strides, self.rhs_dilation),
            specs=(self.out, (self.kernel[1], self.kernel[0], *self.kernel[2:]), self.left),
            groups=(groups, 1),
            dtype=dtype,
        )
        return regrouped(result, self.left[1], self.left[0], self.batch_groups)

    def kernel_gradient(self, g: jax.Array, lhs: jax.Array, shape: Axes, dtype: DTypeLike) -> jax.Array:
        """The gradient of a kernel of `shape`, summed in `dtype`.

        It is computed from the incoming gradient and the images.
        """
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

    def patches(self, lhs: jax.Array, shape: Axes) -> jax.Array:
        """The inputs that a kernel of `shape` multiplies: `[T, K]`, or `[G, T, K]` with groups of channels.

        `T` are the samples and the places of the window, `K` its elements and the channels of a group, in the order of the
        kernel's axes. Padding and the gaps of dilated images are zeros.
        """
        spatial, groups = self.kernel[2:], self.feature_groups
        images = lhs.transpose(self.left)  # [samples, channels, spatial]
        window = [shape[a] for a in spatial]
        found = jax.lax.conv_general_dilated_patches(
            images,
            window,
            self.strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            precision=jax.lax.Precision.HIGHEST,
        )
        places = found.shape[2:]
        found = found.reshape(len(images), groups, shape[self.kernel[1]], *window, *places)
        axes = {self.kernel[1]: 2, **{a: 3 + i for i, a in enumerate(spatial)}}
        first = 3 + len(spatial)
        order = (1, 0, *range(first, first + len(places)), *(axes[a] for a in sorted(axes)))
        vectors = found.transpose(order).reshape(groups, len(images) * math.prod(places), -1)
        return vectors if groups > 1 else vectors[0]

    def _padding_of_images(self, g: jax.Array, rhs: jax.Array, shape: Axes) -> list[tuple[int, int]]:
        """The padding of the incoming gradient for a result of the images' shape."""
        found = []
        for i, (before, _) in enumerate(self.padding):
            images = _reach(shape[self.left[2 + i]], self.lhs_dilation[i])
            kernel = _reach(rhs.shape[self.kernel[2 + i]], self.rhs_dilation[i])
            low = kernel - 1 - before
            found.append((low, images + kernel - 1 - _reach(g.shape[self.out[2 + i]], self.strides[i]) - low))
        return found

    def _padding_of_kernel(self, g: jax.Array, lhs: jax.Array, shape: Axes) -> list[tuple[int, int]]:
        """The padding of the images for a result of the kernel's shape."""
        found = []
        for i, (before, _) in enumerate(self.padding):
            images = _reach(lhs.shape[self.left[2 + i]], self.lhs_dilation[i])
            kernel = _reach(shape[self.kernel[2 + i]], self.rhs_dilation[i])
            found.append((before, kernel + _reach(g.shape[self.out[2 + i]], self.strides[i]) - 1 - images - before))
        return found

    def _convolved(
        self,
        a: jax.Array,
        b: jax.Array,
        *,
        strides: Axes,
        padding: list[tuple[int, int]],
        dilations: tuple[Axes, Axes],
        specs: tuple[Axes, ...],
        groups: tuple[int, int],
        dtype: DTypeLike,
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
    """Moves the leading groups of one axis to the front of another.

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
    """The length of a dilated axis."""
    return (length - 1) * dilation + 1

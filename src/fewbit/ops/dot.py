"""`dot_general` and `@` on quantized operands, or under a policy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key, PyTree

from .._tiles import contraction_order, from_front
from ..array.qarray import PRODUCTS, QArray
from ..array.sharding import spec_entries
from ..errors import QuantError
from ..kernels.backend import AbstractBackend
from ..kernels.lowering import are_split
from ..kernels.qmatmul.code_product import refuse_accumulator
from ..kernels.qmatmul.dispatch import picked_product, product, with_decoded_lhs
from ..kernels.qmatmul.kernel import element
from ..kernels.qmatmul.problem import DimensionNumbers, Operand, Problem
from ..kernels.quantize.dispatch import dequantize
from .all_gather import with_gathered_codes
from .bilinear import AbstractBilinear, ArrayOrQArray, Axes, Extra, floating, quantized_product
from .policy import Policy
from .qat.latent import Latent
from .resolve_policy import operand, resolved


def dot_general(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
    backend: str | AbstractBackend[Problem] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` for operands that are QArrays, or that a policy quantizes.

    Weight-only (a QArray, no policy): the result is that of `lax.dot_general` on the decoded operand, except for the order of
    sums, and compiled kernels do not round the decoded operand to its dtype. Under a policy, floating operands are quantized
    first, with tiles (blocks) along the contraction axis, or the last contraction axis of the right operand; where scales are
    constant along the contraction, the codes are multiplied, integers into int32 and other formats into float32. Gradients
    are straight-through, and computed as the policy's `dlhs` and `drhs` say.

    Args:
        lhs: the left operand.
        rhs: the right operand.
        dimension_numbers: `((lhs contracting, rhs contracting), (lhs batch, rhs batch))`.
        precision: as in `lax.dot_general`, for products computed in floating point. The CPU kernels always compute in
            float32, which satisfies every `lax.Precision` and each algorithm that sums in float32 or less, and refuse the
            others; `fb.explain` shows what other backends accept.
        preferred_element_type: the dtype of the result; None takes the operands' common one.
        policy: how to compute; None takes the policy that an operand carries. The weight is the operand with the policy, or
            the quantized one; of two floating arrays, the right one.
        key: a JAX random key, for policies whose backward pass rounds stochastically or rotates.
        backend: the backend that must compute it, or its name; None chooses.
        out_sharding: of the result on an explicit mesh, as in `lax.dot_general`; required where a contraction axis is sharded.

    Returns:
        The product: batch axes, then the left's free axes, then the right's.

    Raises:
        QuantError: when the dimension numbers do not fit the shapes; when operands carry different policies and none is given,
            or a policy needs a key; for a QArray whose leaves do not fit its scheme.
        UnsupportedError: when the named backend cannot compute it, and for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> w = quantize(jnp.eye(4), "int8")
    >>> dot_general(jnp.ones((2, 4)), w, (((1,), (1,)), ((), ()))).shape
    (2, 4)
    >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
    >>> dot_general(x, w, (((1,), (1,)), ((), ())), policy=Policy("int8", "int8", dlhs="int8", drhs="int8")).shape
    (2, 4)
    """
    if isinstance(precision, list):
        precision = tuple(precision)
    left, right, config, key = resolved(lhs, rhs, policy, key)
    numbers = _normalized(dimension_numbers, left.shape, right.shape)
    dot = Dot(left.ndim, right.ndim, numbers, precision, preferred_element_type, backend, out_sharding)
    if config is not None:
        return quantized_product(dot, config, left, right, key=key)
    return dot.forward(left, right)


@dataclasses.dataclass(frozen=True)
class Dot(AbstractBilinear):
    """`dot_general` with its settings. `extra` is None, or a stack and the index of its element that is the right operand.

    Attributes:
        left_ndim: the number of axes of the left operand.
        right_ndim: the number of axes of the right operand.
        numbers: the dimension numbers, normalized.
        precision: as in `lax.dot_general`.
        preferred: the dtype of the result, or None.
        backend: the backend that must compute it, or None.
        out_sharding: of the result, or None.
    """

    left_ndim: int
    right_ndim: int
    numbers: DimensionNumbers
    precision: Any
    preferred: Any
    backend: str | AbstractBackend[Problem] | None
    out_sharding: NamedSharding | PartitionSpec | None = None

    def values(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None) -> jax.Array:
        left, right = map(floating, with_gathered_codes(lhs, rhs, self.numbers))
        return jax.lax.dot_general(left, right, self.numbers, self.precision, self.preferred, out_sharding=self.out_sharding)

    def forward(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None, accumulator: str | None = None
    ) -> jax.Array:
        if extra is not None and accumulator in (None, "int32"):
            stack, index = extra
            result = picked_product(lhs, stack, index, self.numbers, self.precision, self.preferred)
            if result is not None:
                return result
        return self._product(lhs, rhs, self.numbers, self.preferred, accumulator, self.out_sharding)

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        return self.numbers[0]

    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        _, left, right = self._result_axes
        return (right, self._free(False)) if is_left else (left, self._free(True))

    def scale_for_gradient(self, is_left: bool, scale: jax.Array, extra: Extra) -> jax.Array | None:
        batch, own, new = self._result_axes  # the result's axes: batch, the other operand's, this one's
        if is_left:
            own, new = new, own
        side = int(is_left)
        if any(scale.shape[axis] != 1 for axis in self.numbers[0][side]):
            return None
        places = dict(zip((*batch, *own), (*self.numbers[1][side], *self._free(not is_left)), strict=True))
        order = [places[axis] for axis in sorted(places)]
        kept = scale.transpose(*order, *self.numbers[0][side]).reshape([scale.shape[axis] for axis in order])
        return jnp.expand_dims(kept, new)

    def backward(
        self,
        is_left: bool,
        gradient: ArrayOrQArray,
        other: ArrayOrQArray,
        like: jax.ShapeDtypeStruct,
        extra: Extra,
        accumulator: str | None = None,
    ) -> jax.Array:
        if like.sharding is not None:
            refuse_accumulator(accumulator)
            return self.transposed(is_left, floating(gradient), other, like, extra)
        product = self._product(gradient, other, self._numbers_backward(is_left), jnp.float32, accumulator)
        return product.transpose(np.argsort(self._axes_backward(is_left)))

    def transposed(
        self, is_left: bool, gradient: jax.Array, other: ArrayOrQArray, like: jax.ShapeDtypeStruct, extra: Extra
    ) -> jax.Array:
        numbers, axes = self._numbers_backward(is_left), self._axes_backward(is_left)
        sharding = None
        if like.sharding is not None:
            # On an explicit mesh a sum over a sharded axis needs an out_sharding: that of its operand.
            entries = spec_entries(like.sharding.spec, len(like.shape))
            sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*(entries[axis] for axis in axes)))
        gradient, decoded = map(floating, with_gathered_codes(gradient, other, numbers))
        product = jax.lax.dot_general(gradient, decoded, numbers, self.precision, self.preferred, out_sharding=sharding)
        return product.transpose(np.argsort(axes))

    def _product(
        self,
        lhs: ArrayOrQArray,
        rhs: ArrayOrQArray,
        numbers: DimensionNumbers,
        preferred: DTypeLike | None,
        accumulator: str | None,
        out_sharding: NamedSharding | PartitionSpec | None = None,
    ) -> jax.Array:
        """The product of the operands as they are, by the backend that the problem selects."""
        if not (isinstance(lhs, QArray) or isinstance(rhs, QArray)):
            if self.backend is not None:
                raise QuantError(f"backend={self.backend!r} computes quantized products; neither operand is a QArray")
            return jax.lax.dot_general(
                lhs, rhs, numbers, precision=self.precision, preferred_element_type=preferred, out_sharding=out_sharding
            )
        lhs, rhs, numbers = untransposed(lhs, rhs, numbers)
        lhs, rhs = with_gathered_codes(lhs, rhs, numbers)
        problem = Problem(Operand.of(lhs), Operand.of(rhs), numbers, self.precision, preferred, accumulator, out_sharding)
        # Only XLA's own products have these; a backend that the caller names may refuse them.
        backend = self.backend
        if backend is None and (accumulator not in (None, "int32") or out_sharding is not None):
            backend = "reference"
        if backend is None and isinstance(lhs, QArray) and (decoded := with_decoded_lhs(problem)) is not None:
            return product(decoded, dequantize(lhs, jnp.float32), rhs)
        return product(problem, lhs, rhs, backend=backend)

    def _numbers_backward(self, is_left: bool) -> DimensionNumbers:
        """The dimension numbers of the incoming gradient and the other operand."""
        batch, _, _ = self._result_axes
        return self.contracted_backward(is_left), (batch, self.numbers[1][int(is_left)])

    def _axes_backward(self, is_left: bool) -> Axes:
        """The operand's axes, in the order of its gradient's product.

        They are batch, free, and contracted axes in the other operand's order.
        """
        side = int(not is_left)
        own, others = self.numbers[0][side], self.numbers[0][1 - side]
        return (*self.numbers[1][side], *self._free(is_left), *(own[i] for i in np.argsort(others)))

    def _free(self, is_left: bool) -> Axes:
        side = int(not is_left)
        taken = (*self.numbers[0][side], *self.numbers[1][side])
        return tuple(a for a in range((self.left_ndim, self.right_ndim)[side]) if a not in taken)

    @property
    def _result_axes(self) -> tuple[Axes, Axes, Axes]:
        """The axes of the result: batch, the left's free axes, the right's."""
        batch, left = len(self.numbers[1][0]), len(self._free(True))
        ndim = batch + left + len(self._free(False))
        return tuple(range(batch)), tuple(range(batch, batch + left)), tuple(range(batch + left, ndim))


def picked_dot(
    x: jax.Array, stack: QArray, index: jax.Array, numbers: DimensionNumbers, precision: Any, preferred: DTypeLike | None
) -> jax.Array:
    """`dot_general` of an array and one element of a stack. It follows the policy of the stack, if it has one.

    Kernels read the element in place; where there is none for the product, it is copied.

    Args:
        x: the left operand.
        stack: arrays stacked along the first axis of every leaf.
        index: the element that is the right operand.
        numbers: the dimension numbers of the product with one element.
        precision: as in `lax.dot_general`.
        preferred: as in `lax.dot_general`.
    """
    one = element(stack, index)
    left, right, config, key = resolved(x, one, None, None)
    numbers = _normalized(numbers, left.shape, right.shape)
    dot = Dot(left.ndim, right.ndim, numbers, precision, preferred, None)
    if config is None:
        return dot.forward(left, right, (stack, index))
    return quantized_product(dot, config, left, right, (stack, index), key)


def matmul(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray) -> jax.Array:
    """`lhs @ rhs` where either operand may be a QArray; shapes as in `jnp.matmul`.

    Args:
        lhs: the left operand, `[..., M, K]` or `[K]`.
        rhs: the right operand, `[..., K, N]` or `[K]`. Batch axes are equal, or one side has none.

    Returns:
        The product, in the operands' common dtype.

    Raises:
        QuantError: when the inner lengths differ, or batch axes would have to be broadcast.

    >>> from fewbit.kernels.quantize import quantize
    >>> matmul(jnp.ones((2, 4)), quantize(jnp.eye(4), "int8", axis=-2)).shape
    (2, 4)
    """
    if _is_transposed(lhs) or _is_transposed(rhs) or are_split(*jax.tree.leaves((lhs, rhs))):
        return _matmul(lhs, rhs)
    return _jitted_matmul(lhs, rhs)


def _is_transposed(x: object) -> bool:
    """Whether the product reads the array before its transpose. A jitted function does not know of the transpose."""
    return isinstance(x, QArray) and x.transposed_from is not None


def _matmul(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray) -> jax.Array:
    left, right = operand(lhs, "lhs"), operand(rhs, "rhs")
    numbers = matmul_numbers(left.shape, right.shape)
    dtype = jnp.promote_types(left.dtype, right.dtype)
    product = dot_general(left.astype(dtype), right.astype(dtype), numbers)
    if numbers[1][0] or right.ndim <= 2 or left.ndim == 1:
        return product
    # The product puts the left's free axis first; matmul wants it before the right's last one.
    return jnp.moveaxis(product, 0, -2)


_jitted_matmul = jax.jit(_matmul, inline=True)
"""One program for each pair of shapes, dtypes and schemes."""

PRODUCTS.add("matmul", matmul)


def matmul_numbers(left: tuple[int, ...], right: tuple[int, ...]) -> DimensionNumbers:
    """The dimension numbers of `@` for operands of two shapes.

    Raises:
        QuantError: when the inner lengths differ, or batch axes would have to be broadcast.
    """
    if not left or not right:
        raise QuantError(f"matmul needs operands of at least one axis, got shapes {left} and {right}")
    batch = tuple(range(_matmul_batch(left[:-2], right[:-2])))
    inner = max(len(right) - 2, 0)
    if left[-1] != right[inner]:
        raise QuantError(f"matmul cannot contract shapes {left} and {right}: the inner lengths differ")
    return ((len(left) - 1,), (inner,)), (batch, batch)


def _normalized(numbers: tuple[Any, Any], left: tuple[int, ...], right: tuple[int, ...]) -> DimensionNumbers:
    """The dimension numbers as tuples of non-negative axes, the contraction axes in order.

    Raises:
        QuantError: when they do not fit the shapes of the operands, which kernels would find only when they run.
    """

    def axes(given: Sequence[int], ndim: int) -> tuple[int, ...]:
        return tuple(from_front(a, ndim) for a in given)

    contracted, batch = ((axes(a, len(left)), axes(b, len(right))) for a, b in numbers)
    for name, (a, b) in (("contraction", contracted), ("batch", batch)):
        lengths = [left[axis] for axis in a], [right[axis] for axis in b]
        if lengths[0] != lengths[1]:
            raise QuantError(
                f"the {name} axes {a} of lhs {left} have the lengths {lengths[0]}, and the axes {b} of rhs {right} have "
                f"{lengths[1]}; they must be equal"
            )
    for name, taken in (("lhs", contracted[0] + batch[0]), ("rhs", contracted[1] + batch[1])):
        if len(set(taken)) < len(taken):
            raise QuantError(f"the dimension numbers use an axis of {name} twice: {taken}; each is contracted or batch once")
    return contraction_order(*contracted), batch


def untransposed(lhs: PyTree, rhs: PyTree, numbers: DimensionNumbers) -> tuple[PyTree, PyTree, DimensionNumbers]:
    """The same product on the arrays before a transpose, where the result's axes keep their order."""
    operands, axes = [lhs, rhs], [[numbers[0][side], numbers[1][side]] for side in (0, 1)]
    for side, q in enumerate(operands):
        if not isinstance(q, QArray) or q.transposed_from is None:
            continue
        source, order = q.transposed_from
        free = [order[a] for a in range(len(order)) if a not in axes[side][0] and a not in axes[side][1]]
        if free == sorted(free):
            operands[side] = source
            axes[side] = [tuple(order[a] for a in group) for group in axes[side]]
    (left, left_batch), (right, right_batch) = axes
    return operands[0], operands[1], ((left, right), (left_batch, right_batch))


def _matmul_batch(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The number of batch axes; QuantError where they would be broadcast."""
    if left and right and left != right:
        raise QuantError(f"@ takes equal batch axes, or none on one side; got {left} and {right}. Use fb.einsum")
    return min(len(left), len(right))

"""`dot_general` and `@` on operands that may be quantized, or that a policy quantizes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key

from .._tiles import from_front
from ..array import PRODUCTS, QArray, is_qarray
from ..array.sharding import spec_entries
from ..errors import QuantError
from ..kernels.qmatmul import Problem, product
from ..kernels.qmatmul.codes import refuse_accumulator
from ..kernels.qmatmul.problem import DimensionNumbers, Operand
from .arms import AbstractBilinear, Axes, floating, quantized_product
from .gathering import with_gathered_codes
from .latent import Latent
from .operands import operand, resolved
from .policy import Policy


def dot_general(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
    backend: str | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` for operands that are QArrays, or that a policy quantizes.

    Weight-only (a QArray, no policy): the result is that of `lax.dot_general` on the decoded operand, but for the order of sums
    and, by compiled kernels, the rounding of the decoded operand to its dtype, which is left out. Under a policy, floating
    operands are quantized first, with their tiles along the contracted axis, of several along the one that stands last in the
    right operand; where no scale varies along them the codes are multiplied, integers into int32 and all other formats into
    float32. Gradients pass straight through the quantization, and are computed by the policy's arms.

    Args:
        lhs: the left operand.
        rhs: the right operand.
        dimension_numbers: `((lhs contracting, rhs contracting), (lhs batch, rhs batch))`.
        precision: as in `lax.dot_general`, for the products that are computed in floating point. The kernels for CPUs compute
            in float32 whatever is asked, which honours every `lax.Precision` and each algorithm that sums in float32 or less,
            and refuse the others; those of other devices say which they take.
        preferred_element_type: the dtype of the result; None takes the operands' common one.
        policy: how to compute; None takes the policy of the operand that carries one. The weight is that operand, or the
            quantized one; of two floating arrays it is the right one.
        key: a JAX random key, for policies whose backward pass rounds stochastically or rotates.
        backend: the name of a backend to insist on; None chooses.
        out_sharding: how the result lies on an explicit mesh, as in `lax.dot_general`; needed where a contracted axis is
            sharded.

    Returns:
        The product: batch axes, then the left's free axes, then the right's.

    Raises:
        QuantError: when two operands carry different policies and none is given, or a policy needs a key; for a QArray whose
            leaves do not fit its scheme.
        UnsupportedError: when the named backend cannot compute it, and for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> w = quantize(jnp.eye(4), "int8")
    >>> dot_general(jnp.ones((2, 4)), w, (((1,), (1,)), ((), ()))).shape
    (2, 4)
    >>> x, w = jnp.ones((2, 4)), jnp.eye(4)
    >>> dot_general(x, w, (((1,), (1,)), ((), ())), policy=Policy("int8", "int8", dlhs="int8", drhs="int8")).shape
    (2, 4)
    """
    left, right, rules, key = resolved(lhs, rhs, policy, key)
    numbers = _normalized(dimension_numbers, left.ndim, right.ndim)
    dot = Dot(left.ndim, right.ndim, numbers, _hashable(precision), preferred_element_type, backend, out_sharding)
    return dot.forward(left, right, None) if rules is None else quantized_product(dot, rules, left, right, key=key)


@dataclasses.dataclass(frozen=True)
class Dot(AbstractBilinear):
    """`dot_general` with its settings.

    Attributes:
        left_ndim: how many axes the left operand has.
        right_ndim: how many axes the right operand has.
        numbers: the dimension numbers, normalized.
        precision: as in `lax.dot_general`.
        preferred: the dtype of the result, or None.
        backend: the backend to insist on, or None.
        out_sharding: of the result, or None.
    """

    left_ndim: int
    right_ndim: int
    numbers: DimensionNumbers
    precision: Any
    preferred: Any
    backend: str | None
    out_sharding: NamedSharding | PartitionSpec | None = None

    def values(self, lhs: Any, rhs: Any, extra: Any) -> jax.Array:
        if is_qarray(lhs) or is_qarray(rhs):
            lhs, rhs = map(floating, with_gathered_codes(lhs, rhs, self.numbers))
        return jax.lax.dot_general(lhs, rhs, self.numbers, self.precision, self.preferred, out_sharding=self.out_sharding)

    def forward(self, lhs: Any, rhs: Any, extra: Any, accumulator: str | None = None) -> jax.Array:
        return self._product(lhs, rhs, self.numbers, self.preferred, accumulator, self.out_sharding)

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        return self.numbers[0]

    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        _, left, right = self._result_axes
        return (right, self._free(False)) if is_left else (left, self._free(True))

    def beside_gradient(self, is_left: bool, scale: jax.Array, extra: Any) -> jax.Array | None:
        batch, left, right = self._result_axes
        side, met = (1, right) if is_left else (0, left)
        own_batch, own_free = self.numbers[1][side], self._free(side == 0)
        if any(scale.shape[axis] != 1 for axis in self.numbers[0][side]):
            return None
        places = dict(zip((*batch, *met), (*own_batch, *own_free), strict=True))
        order = [places[axis] for axis in sorted(places)]
        kept = scale.transpose(*order, *self.numbers[0][side]).reshape([scale.shape[axis] for axis in order])
        return jnp.expand_dims(kept, left if is_left else right)

    def backward(
        self,
        is_left: bool,
        gradient: Any,
        other: Any,
        like: jax.ShapeDtypeStruct,
        extra: Any,
        accumulator: str | None = None,
    ) -> jax.Array:
        if like.sharding is not None:
            refuse_accumulator(accumulator)
            return self.transposed(is_left, floating(gradient), other, like, extra)
        product = self._product(gradient, other, self._numbers_backward(is_left), jnp.float32, accumulator)
        return product.transpose(np.argsort(self._axes_backward(is_left)))

    def transposed(self, is_left: bool, gradient: Any, other: Any, like: jax.ShapeDtypeStruct, extra: Any) -> jax.Array:
        numbers, axes = self._numbers_backward(is_left), self._axes_backward(is_left)
        sharding = None
        if like.sharding is not None:
            # On an explicit mesh a sum over a sharded axis must be told where its result goes: where its operand is.
            entries = spec_entries(like.sharding.spec, len(like.shape))
            sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*(entries[axis] for axis in axes)))
        if is_qarray(other):
            gradient, other = map(floating, with_gathered_codes(gradient, other, numbers))
        product = jax.lax.dot_general(gradient, other, numbers, self.precision, self.preferred, out_sharding=sharding)
        return product.transpose(np.argsort(axes))

    def _product(
        self, lhs: Any, rhs: Any, numbers: Any, preferred: Any, accumulator: str | None, out_sharding: Any = None
    ) -> jax.Array:
        """The product of the operands as they are, by the backend that the problem selects."""
        if not (is_qarray(lhs) or is_qarray(rhs)):
            if self.backend is not None:
                raise QuantError(f"backend={self.backend!r} computes quantized products; neither operand is a QArray")
            return jax.lax.dot_general(
                lhs, rhs, numbers, precision=self.precision, preferred_element_type=preferred, out_sharding=out_sharding
            )
        lhs, rhs, numbers = untransposed(lhs, rhs, numbers)
        lhs, rhs = with_gathered_codes(lhs, rhs, numbers)
        problem = Problem(Operand.of(lhs), Operand.of(rhs), numbers, self.precision, preferred, accumulator, out_sharding)
        # What only XLA's own products have is for the reference, unless the caller names a backend that knows better.
        is_xlas = accumulator not in (None, "int32") or out_sharding is not None
        return product(problem, lhs, rhs, self.backend or ("reference" if is_xlas else None))

    def _numbers_backward(self, is_left: bool) -> DimensionNumbers:
        """What the incoming gradient and the other operand contract, and their batch axes."""
        batch, _, _ = self._result_axes
        return self.contracted_backward(is_left), (batch, self.numbers[1][1 if is_left else 0])

    def _axes_backward(self, is_left: bool) -> Axes:
        """Which axis of its operand each axis of that product is: batch, free, then contracted in the other's order."""
        side = 0 if is_left else 1
        own, others = self.numbers[0][side], self.numbers[0][1 - side]
        return (*self.numbers[1][side], *self._free(is_left), *(own[i] for i in np.argsort(others)))

    def _free(self, is_left: bool) -> Axes:
        side = 0 if is_left else 1
        taken = (*self.numbers[0][side], *self.numbers[1][side])
        return tuple(a for a in range(self.left_ndim if is_left else self.right_ndim) if a not in taken)

    @property
    def _result_axes(self) -> tuple[Axes, Axes, Axes]:
        """The axes of the result: batch, the left's free ones, the right's."""
        batch, left = len(self.numbers[1][0]), len(self._free(True))
        ndim = batch + left + len(self._free(False))
        return tuple(range(batch)), tuple(range(batch, batch + left)), tuple(range(batch + left, ndim))


def matmul(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray) -> jax.Array:
    """`lhs @ rhs` for operands of which either or both may be a QArray; shapes as in `jnp.matmul`.

    Args:
        lhs: the left operand, `[..., M, K]` or `[K]`.
        rhs: the right operand, `[..., K, N]` or `[K]`. Batch axes are equal on both sides, or there are none on one.

    Returns:
        The product, in the operands' common dtype.

    Raises:
        QuantError: when the inner lengths differ, or batch axes would have to be broadcast.

    >>> from fewbit.kernels.quantize import quantize
    >>> matmul(jnp.ones((2, 4)), quantize(jnp.eye(4), "int8", axis=-2)).shape
    (2, 4)
    """
    left, right = operand(lhs, "lhs"), operand(rhs, "rhs")
    batch = matmul_numbers(left.shape, right.shape)[1][0]
    product = dot_general(*_promoted(left, right), matmul_numbers(left.shape, right.shape))
    # The product puts the left's free axis first; matmul wants it before the right's last one.
    return jnp.moveaxis(product, 0, -2) if not batch and right.ndim > 2 and left.ndim > 1 else product


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


def _hashable(precision: Any) -> Any:
    return tuple(precision) if isinstance(precision, list) else precision


def _normalized(numbers: Any, left_ndim: int, right_ndim: int) -> DimensionNumbers:
    """The dimension numbers as tuples of non-negative axes, the contracted ones in order."""
    (left, right), (left_batch, right_batch) = numbers

    def axes(given: Sequence[int], ndim: int) -> tuple[int, ...]:
        return tuple(from_front(a, ndim) for a in given)

    contracted = in_order(axes(left, left_ndim), axes(right, right_ndim))
    return contracted, (axes(left_batch, left_ndim), axes(right_batch, right_ndim))


def in_order(left: Sequence[int], right: Sequence[int]) -> tuple[Axes, Axes]:
    """The contracted axes of both operands as the right one has them; tiles run along the last.

    The product is the same in any order, and `jnp.einsum` takes the alphabet's: without this, scales would hang on the letters
    that an einsum was written in.

    >>> in_order((3, 2), (1, 0))
    ((2, 3), (0, 1))
    """
    pairs = sorted(zip(left, right, strict=True), key=lambda pair: pair[1])
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def untransposed(lhs: Any, rhs: Any, numbers: DimensionNumbers) -> tuple[Any, Any, DimensionNumbers]:
    """The same product with the arrays that transposed operands were made from, where the result's axes stay in order."""
    operands, axes = [lhs, rhs], [[numbers[0][side], numbers[1][side]] for side in (0, 1)]
    for side, q in enumerate(operands):
        source, order = q.untransposed if is_qarray(q) else (q, ())
        free = [order[a] for a in range(len(order)) if a not in axes[side][0] and a not in axes[side][1]]
        if source is not q and free == sorted(free):
            operands[side] = source
            axes[side] = [tuple(order[a] for a in group) for group in axes[side]]
    (left, left_batch), (right, right_batch) = axes
    return (*operands, ((left, right), (left_batch, right_batch)))


def _matmul_batch(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading axes are batch axes; only equal ones, or none on one side, fit without broadcasting."""
    if left and right and left != right:
        raise QuantError(f"@ takes equal batch axes, or none on one side; got {left} and {right}. Use fb.einsum")
    return len(left) if right else 0


def _promoted(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Both operands in their common dtype, as `jnp.matmul` has it."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return lhs.astype(dtype), rhs.astype(dtype)

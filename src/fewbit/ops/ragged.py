"""`ragged_dot` on quantized operands, or under a policy (mixture of experts)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int, Key

from ..array.qarray import QArray, is_qarray
from ..errors import QuantError, UnsupportedError
from ..kernels.backend import AbstractBackend
from ..kernels.qmatmul.code_product import CodeProduct, refuse_accumulator
from ..kernels.qmatmul.dispatch import product as selected_product
from ..kernels.qmatmul.problem import Operand, Problem, product_dtype
from ..kernels.qmatmul.reference import scale_of_rows
from .bilinear import AbstractBilinear, ArrayOrQArray, Axes, Extra, coded_product, floating, quantized_product, weight_only
from .policy import Policy
from .qat.latent import Latent
from .resolve_policy import resolved

PLAIN = RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
"""The dimension numbers of `ragged_dot`: rows `[M, K]` in groups, a matrix `[K, N]` for each group."""


def ragged_dot(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    group_sizes: Int[ArrayLike, " G"],
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
    backend: str | AbstractBackend[Problem] | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` for operands that are QArrays, or that a policy quantizes.

    Each row of the left operand is multiplied by the matrix of its group. Under a policy, rows have one scale each (per-token)
    and so have the columns of each expert's matrix (per-channel), unless their schemes have smaller tiles (blocks).

    Args:
        lhs: the rows of all groups, `[M, K]`.
        rhs: a matrix for each group, `[G, K, N]`.
        group_sizes: how many rows each group has; rows beyond their sum give zeros.
        precision: as in `lax.ragged_dot`.
        preferred_element_type: as in `lax.ragged_dot`.
        group_offset: as in `lax.ragged_dot`, which has no use for it yet.
        policy: how to compute; None takes the policy that an operand carries.
        key: a JAX random key, for policies whose backward pass draws random numbers.
        backend: the backend or its name, for products of an array with quantized matrices; None chooses.

    Returns:
        The products, `[M, N]`.

    Raises:
        QuantError: when shapes or `group_sizes` do not match; when operands carry different policies and none is given, or a
            policy needs a key.
        UnsupportedError: where the named backend cannot compute it, and for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> experts = quantize(jnp.ones((3, 4, 2)), "int8", axis=-2)
    >>> ragged_dot(jnp.ones((5, 4)), experts, jnp.array([2, 0, 3])).shape
    (5, 2)
    """
    return ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        PLAIN,
        precision,
        preferred_element_type,
        group_offset,
        policy=policy,
        key=key,
        backend=backend,
    )


def ragged_dot_general(
    lhs: ArrayLike | QArray | Latent,
    rhs: ArrayLike | QArray | Latent,
    group_sizes: Int[ArrayLike, " G"],
    ragged_dot_dimension_numbers: RaggedDotDimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Array | None = None,
    *,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
    backend: str | AbstractBackend[Problem] | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` for operands that are QArrays, or that a policy quantizes.

    Weight-only: the result is JAX's on the decoded operand, for any dimension numbers. A policy is followed for those of
    `ragged_dot`, and for matrices `[G, N, K]`.

    Args:
        lhs: the left operand.
        rhs: the right operand.
        group_sizes: the length of each group.
        ragged_dot_dimension_numbers: as in `lax.ragged_dot_general`.
        precision: as in `lax.ragged_dot_general`.
        preferred_element_type: as in `lax.ragged_dot_general`.
        group_offset: as in `lax.ragged_dot_general`, which has no use for it yet.
        policy: how to compute; None takes the policy that an operand carries.
        key: a JAX random key, for policies whose backward pass draws random numbers.
        backend: the backend or its name, for products of an array with quantized matrices; None chooses.

    Returns:
        The products.

    Raises:
        QuantError: when shapes or `group_sizes` do not match; when operands carry different policies and none is given, or a
            policy needs a key.
        UnsupportedError: where the named backend cannot compute it, and for a policy with delayed scaling or other dimension
            numbers.

    >>> from fewbit.kernels.quantize import quantize
    >>> experts = quantize(jnp.ones((3, 4, 2)), "int8", axis=-2)
    >>> ragged_dot_general(jnp.ones((5, 4)), experts, jnp.array([2, 0, 3]), PLAIN).shape
    (5, 2)
    """
    left, right, config, key = resolved(lhs, rhs, policy, key)
    numbers, sizes = _hashable(ragged_dot_dimension_numbers), jnp.asarray(group_sizes)
    _refuse_mismatch(numbers, left.shape, right.shape, sizes)
    product = RaggedDot(numbers, left.shape[0], precision, preferred_element_type, backend)
    extra = (sizes, group_offset)
    if config is None:
        return product.forward(left, right, extra)
    if numbers not in (_hashable(PLAIN), _OVER_COLUMNS):
        remedy = "transpose the operands to [M, K] and [G, K, N] or [G, N, K], or leave the weight unquantized"
        raise UnsupportedError(
            "ragged_dot_general follows a policy for rows in groups only", {"dimension_numbers": f"{numbers}; {remedy}"}
        )
    return quantized_product(product, config, left, right, extra, key)


@dataclasses.dataclass(frozen=True)
class RaggedDot(AbstractBilinear):
    """`ragged_dot_general` with its settings; `extra` is the group sizes and the group offset.

    Attributes:
        numbers: the dimension numbers, from `_hashable`; under a policy those of `ragged_dot` or `_OVER_COLUMNS`.
        rows: the length of the ragged axis of `ragged_dot`.
        precision: as in `lax.ragged_dot_general`.
        preferred: the dtype of the result, or None.
        backend: the backend of an array times quantized matrices, or None.
    """

    numbers: tuple[Any, Any, Any]
    rows: int
    precision: Any
    preferred: Any
    backend: str | AbstractBackend[Problem] | None = None

    def values(self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra) -> jax.Array:
        return self._product(floating(lhs), floating(rhs), extra, self.preferred)

    def forward(
        self, lhs: ArrayOrQArray, rhs: ArrayOrQArray, extra: Extra = None, accumulator: str | None = None
    ) -> jax.Array:
        if self._has_kernels(rhs, extra):
            sides, over_columns = (Operand.of(lhs), Operand.of(rhs)), self.numbers == _OVER_COLUMNS
            problem = Problem.ragged(*sides, over_columns, self.precision, self.preferred, accumulator)
            backend = self.backend
            if backend is None and accumulator not in (None, "int32"):
                backend = "reference"
            return selected_product(problem, lhs, rhs, extra[0], backend=backend)
        refuse_accumulator(accumulator)
        if is_qarray(lhs) and is_qarray(rhs):
            dtype = self.preferred or product_dtype(lhs.dtype, rhs.dtype)
            left, right = (floating(x).astype(jnp.float32) for x in (lhs, rhs))
            return self._product(left, right, extra, jnp.float32).astype(dtype)
        if is_qarray(lhs) or is_qarray(rhs):
            return weight_only(self, lhs, rhs, extra)
        return self.values(lhs, rhs, extra)

    def _has_kernels(self, rhs: ArrayOrQArray, extra: Extra) -> bool:
        """Whether kernels may compute it: rows in groups, and quantized matrices.

        Raises:
            UnsupportedError: where not, and a backend is named.
        """
        is_rows = self.numbers in (_hashable(PLAIN), _OVER_COLUMNS) and extra[1] is None
        if is_rows and is_qarray(rhs):
            return True
        if self.backend not in (None, "reference"):
            reason = "it takes rows in groups, and quantized matrices [G, K, N] or [G, N, K]"
            raise UnsupportedError(
                "ragged_dot cannot run on this backend", {getattr(self.backend, "name", str(self.backend)): reason}
            )
        return False

    def backward(
        self,
        is_left: bool,
        gradient: ArrayOrQArray,
        other: ArrayOrQArray,
        like: jax.ShapeDtypeStruct,
        extra: Extra,
        accumulator: str | None = None,
    ) -> jax.Array:
        return coded_product(self._code_product_backward(is_left, extra), gradient, other, accumulator)

    def _code_product_backward(self, is_left: bool, extra: Extra) -> CodeProduct:
        """The product that gives the gradient of one operand.

        It multiplies the incoming gradient, on the left, and the other operand.
        """

        (_, (k,)), n = self.contracted, self._columns

        def of_rows(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if x.shape[1 if is_gradient else n] != 1:
                return None
            return x if is_gradient else scale_of_rows(jnp.squeeze(x, n), extra[0], self.rows)

        def of_experts(x: jax.Array, is_gradient: bool) -> jax.Array | None:
            if x.shape[0] != 1:
                return None
            return jnp.expand_dims(x, k if is_gradient else n)

        def rows(g: jax.Array, experts: jax.Array, dtype: DTypeLike) -> jax.Array:
            return self._product(g, experts, extra, dtype, _numbers_over(n))

        def experts(g: jax.Array, rows: jax.Array, dtype: DTypeLike) -> jax.Array:
            operands = (rows, g) if k < n else (g, rows)
            return self._product(*operands, extra, dtype, _OVER_ROWS)

        contracted = self.contracted_backward(is_left)
        if is_left:
            return CodeProduct(rows, of_rows, contracted, ((), (k,)))
        return CodeProduct(experts, of_experts, contracted, ((1,), (1,)))

    @property
    def contracted(self) -> tuple[Axes, Axes]:
        return self.numbers[0][0]

    @property
    def _columns(self) -> int:
        """The axis of the matrices that is neither contracted nor that of the groups."""
        return 3 - self.contracted[1][0]

    def contracted_backward(self, is_left: bool) -> tuple[Axes, Axes]:
        if is_left:
            return (1,), (self._columns,)
        return (0,), (0,)

    def scale_for_gradient(self, is_left: bool, scale: jax.Array, extra: Extra) -> jax.Array | None:
        k = self.contracted[int(is_left)][0]
        if scale.shape[k] != 1:
            return None
        return scale_of_rows(jnp.squeeze(scale, k), extra[0], self.rows) if is_left else scale

    def _product(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        extra: Extra,
        preferred: DTypeLike | None,
        numbers: tuple[Any, ...] | None = None,
    ) -> jax.Array:
        sizes, offset = extra
        contracting, ragged, group = numbers or self.numbers
        ragged_numbers = RaggedDotDimensionNumbers(contracting, lhs_ragged_dimensions=ragged, rhs_group_dimensions=group)
        return jax.lax.ragged_dot_general(
            lhs, rhs, sizes, ragged_numbers, precision=self.precision, preferred_element_type=preferred, group_offset=offset
        )


def _numbers_over(axis: int) -> tuple[Any, Any, Any]:
    """The dimension numbers of rows in groups, times matrices that are contracted along `axis`, 1 or 2."""
    return (((1,), (axis,)), ((), ())), (0,), (0,)


_OVER_COLUMNS = _numbers_over(2)
"""The dimension numbers of matrices `[G, N, K]`, and of the gradient of the rows: `g [M, N]` with each group's `[K, N]`."""

_OVER_ROWS = (((0,), (0,)), ((), ())), (0,), ()
"""The dimension numbers of the gradient of the matrices: `[M, K]` with `g [M, N]`, summed over each group's rows."""


def _refuse_mismatch(numbers: tuple[Any, Any, Any], left: tuple[int, ...], right: tuple[int, ...], sizes: jax.Array) -> None:
    """Raises a QuantError for operands that do not fit `ragged_dot`.

    Kernels would find it only when they run. For other dimension numbers JAX compares the shapes.
    """
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise QuantError(f"group_sizes is {sizes.dtype.name}; pass integers, the number of rows in each group")
    if numbers not in (_hashable(PLAIN), _OVER_COLUMNS):
        return
    contracted = numbers[0][0][1][0]
    if len(left) != 2 or len(right) != 3 or left[1] != right[contracted]:
        layout = "[G, K, N]" if contracted == 1 else "[G, N, K]"
        raise QuantError(f"lhs has shape {left} and rhs {right}; pass rows [M, K] and a matrix for each group, {layout}")
    if sizes.shape != right[:1]:
        raise QuantError(f"group_sizes has shape {sizes.shape}; pass one number for each of the {right[0]} groups of rhs")


def _hashable(numbers: RaggedDotDimensionNumbers) -> tuple[Any, Any, Any]:
    """The dimension numbers as tuples."""
    (contracting, batch) = numbers.dot_dimension_numbers
    pairs = tuple(tuple(map(int, side)) for side in contracting), tuple(tuple(map(int, side)) for side in batch)
    return pairs, tuple(map(int, numbers.lhs_ragged_dimensions)), tuple(map(int, numbers.rhs_group_dimensions))

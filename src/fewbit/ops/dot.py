"""`dot_general` and `@` on operands that may be quantized."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..array import PRODUCTS, QArray, dequantize, is_qarray, quantize
from ..errors import QuantError
from ..kernels.qmatmul import BACKENDS, Problem
from ..kernels.qmatmul.problem import DimensionNumbers, Operand
from ..kernels.select import select
from .gathering import with_gathered_codes
from .policy import Policy


def dot_general(
    lhs: ArrayLike | QArray,
    rhs: ArrayLike | QArray,
    dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | None = None,
    backend: str | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` for operands of which either or both may be a QArray.

    Weight-only (no activation scheme): the result is that of `lax.dot_general` on the decoded operand. With an activation
    scheme the float operand is quantized first, with its tiles along the contracted axes; where no scale varies along them
    the codes are multiplied, integers into int32 and all other formats into float32. The gradient with respect to a float
    operand passes straight through its quantization: it is the gradient of the product with the decoded operands.

    Args:
        lhs: the left operand.
        rhs: the right operand.
        dimension_numbers: `((lhs contracting, rhs contracting), (lhs batch, rhs batch))`.
        precision: as in `lax.dot_general`, for the products that are computed in floating point.
        preferred_element_type: the dtype of the result; None takes the operands' common one.
        policy: how to compute; None takes the policy of the quantized operand, if it has one.
        backend: the name of a backend to insist on; None chooses.

    Returns:
        The product: batch axes, then the left's free axes, then the right's.

    Raises:
        QuantError: when two quantized operands carry different policies and none is given, or a policy asks for something
            that the operands cannot have.
        UnsupportedError: when the named backend cannot compute it.

    >>> w = quantize(jnp.eye(4), "int8")
    >>> dot_general(jnp.ones((2, 4)), w, (((1,), (1,)), ((), ()))).shape
    (2, 4)
    """
    left, right = _operand(lhs), _operand(rhs)
    numbers = _normalized(dimension_numbers, left.ndim, right.ndim)
    policy = policy if policy is not None else _carried_policy(left, right)
    if policy is None or policy.activation is None or not _has_one_float(left, right):
        if policy is not None and policy.activation is not None and not _has_quantized(left, right):
            raise QuantError("policy asks for a quantized product, but neither operand is a QArray")
        return _product(left, right, numbers, precision, preferred_element_type, backend)
    return _quantized_activation_product(left, right, numbers, precision, preferred_element_type, policy, backend)


def matmul(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray) -> jax.Array:
    """`lhs @ rhs` for operands of which either or both may be a QArray; shapes as in `jnp.matmul`.

    Args:
        lhs: the left operand, `[..., M, K]` or `[K]`.
        rhs: the right operand, `[..., K, N]` or `[K]`. Batch axes are equal on both sides, or there are none on one.

    Returns:
        The product, in the operands' common dtype.

    Raises:
        QuantError: when the inner lengths differ, or batch axes would have to be broadcast.

    >>> matmul(jnp.ones((2, 4)), quantize(jnp.eye(4), "int8", axis=-2)).shape
    (2, 4)
    """
    left, right = _operand(lhs), _operand(rhs)
    if left.ndim == 0 or right.ndim == 0:
        raise QuantError(f"matmul needs operands of at least one axis, got shapes {left.shape} and {right.shape}")
    batch = tuple(range(_matmul_batch(left.shape[:-2], right.shape[:-2])))
    inner = max(right.ndim - 2, 0)
    if left.shape[-1] != right.shape[inner]:
        raise QuantError(f"matmul cannot contract shapes {left.shape} and {right.shape}: the inner lengths differ")
    product = dot_general(*_promoted(left, right), (((left.ndim - 1,), (inner,)), (batch, batch)))
    # The product puts the left's free axis first; matmul wants it before the right's last one.
    return jnp.moveaxis(product, 0, -2) if not batch and right.ndim > 2 and left.ndim > 1 else product


PRODUCTS.add("matmul", matmul)


def _operand(x: ArrayLike | QArray) -> Any:
    return x if isinstance(x, QArray) else jnp.asarray(x)


def _normalized(numbers: Any, left_ndim: int, right_ndim: int) -> DimensionNumbers:
    """The dimension numbers as tuples of non-negative axes."""
    (left, right), (left_batch, right_batch) = numbers

    def axes(given: Sequence[int], ndim: int) -> tuple[int, ...]:
        return tuple(int(a) % ndim for a in given)

    return (axes(left, left_ndim), axes(right, right_ndim)), (
        axes(left_batch, left_ndim),
        axes(right_batch, right_ndim),
    )


def _carried_policy(lhs: Any, rhs: Any) -> Policy | None:
    """The policy that the operands carry."""
    carried = {x.policy for x in (lhs, rhs) if isinstance(x, QArray) and isinstance(x.policy, Policy)}
    if len(carried) > 1:
        raise QuantError(f"the operands carry different policies ({', '.join(map(str, carried))}); pass policy=")
    return next(iter(carried), None)


def _has_quantized(lhs: Any, rhs: Any) -> bool:
    return isinstance(lhs, QArray) or isinstance(rhs, QArray)


def _has_one_float(lhs: Any, rhs: Any) -> bool:
    return isinstance(lhs, QArray) != isinstance(rhs, QArray)


def _product(lhs: Any, rhs: Any, numbers: Any, precision: Any, preferred: Any, backend: str | None) -> jax.Array:
    """The product of the operands as they are, by the backend that the problem selects."""
    if not _has_quantized(lhs, rhs):
        if backend is not None:
            raise QuantError(f"backend={backend!r} computes quantized products; neither operand is a QArray")
        return jax.lax.dot_general(lhs, rhs, numbers, precision=precision, preferred_element_type=preferred)
    lhs, rhs = with_gathered_codes(lhs, rhs, numbers)
    problem = Problem(Operand.of(lhs), Operand.of(rhs), numbers, precision, preferred)
    return select(BACKENDS, problem, backend).run(problem, lhs, rhs)


def _quantized_activation_product(
    lhs: Any, rhs: Any, numbers: DimensionNumbers, precision: Any, preferred: Any, policy: Policy, backend: str | None
) -> jax.Array:
    """The product after the float operand is quantized; its gradient is that of the product with decoded operands."""
    is_left = not isinstance(lhs, QArray)
    x, q = (lhs, rhs) if is_left else (rhs, lhs)
    axes = numbers[0][0 if is_left else 1]
    assert policy.activation is not None
    scheme = policy.activation

    def ordered(a: Any, b: Any) -> tuple[Any, Any]:
        return (a, b) if is_left else (b, a)

    def decoded(x: jax.Array, q: QArray) -> jax.Array:
        left, right = (dequantize(a) if is_qarray(a) else a for a in with_gathered_codes(*ordered(x, q), numbers))
        return jax.lax.dot_general(left, right, numbers, precision, preferred)

    @jax.custom_vjp
    def product(x: jax.Array, q: QArray) -> jax.Array:
        return _product(*ordered(quantize(x, scheme, axis=axes), q), numbers, precision, preferred, backend)

    def forward(x: jax.Array, q: QArray) -> tuple[jax.Array, Any]:
        return product(x, q), (x, q)

    def backward(saved: Any, gradient: jax.Array) -> Any:
        return jax.vjp(decoded, *saved)[1](gradient)

    product.defvjp(forward, backward)
    return product(x, q)


def _matmul_batch(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading axes are batch axes; only equal ones, or none on one side, fit without broadcasting."""
    if left and right and left != right:
        raise QuantError(f"@ takes equal batch axes, or none on one side; got {left} and {right}. Use fb.einsum")
    return len(left) if right else 0


def _promoted(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Both operands in their common dtype, as `jnp.matmul` has it."""
    dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return lhs.astype(dtype), rhs.astype(dtype)

"""`einsum` on operands that may be quantized, or that a policy quantizes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key

from ..array import QArray, is_qarray
from ..errors import QuantError
from .latent import Latent
from .policy import Policy
from .standin import stands_in
from .transparent import transparent


def einsum(
    subscripts: str,
    *operands: ArrayLike | QArray | Latent,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
) -> jax.Array:
    """`jnp.einsum` for any number of operands, any of which may be a QArray.

    Each pair of operands is contracted by `fb.dot_general`, in the order that `jnp.einsum` chooses; quantized operands keep
    their codes through its transposes. An operand whose indices are summed or repeated on their own is decoded first.

    Args:
        subscripts: as in `jnp.einsum`, such as `"bld,fd->blf"`.
        operands: arrays or QArrays.
        precision: as in `jnp.einsum`.
        preferred_element_type: as in `jnp.einsum`.
        policy: how the products with the last operand are computed, which takes the part of the weight; None takes the
            policies that operands carry.
        key: a JAX random key, for policies whose backward pass draws random numbers.

    Returns:
        The contraction.

    >>> from fewbit.kernels.quantize import quantize
    >>> einsum("bi,oi->bo", jnp.ones((2, 4)), quantize(jnp.eye(4), "int8")).shape
    (2, 4)
    """
    if not isinstance(subscripts, str):
        raise QuantError(f"subscripts is {type(subscripts).__name__}; pass a string such as 'bi,oi->bo'")
    if policy is not None:
        *others, last = operands
        if stands_in(last) or any(map(is_qarray, others)):
            raise QuantError("policy is given for an operand that is quantized already; let its QArray carry the policy")
        operands = (*others, Latent(jnp.asarray(last), key, policy))
    return _contraction(subscripts, precision, preferred_element_type)(*operands)


@functools.lru_cache(maxsize=256)
def _contraction(subscripts: str, precision: Any, preferred: Any) -> Callable[..., jax.Array]:
    """The contraction as a transparent function, kept so that eager calls compile once."""

    def contract(*arrays: Any) -> jax.Array:
        return jnp.einsum(subscripts, *arrays, precision=precision, preferred_element_type=preferred)

    return transparent(contract, fallback="dequantize")

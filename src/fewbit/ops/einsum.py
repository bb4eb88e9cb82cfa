"""`einsum` on quantized operands, or under a policy."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Key

from ..array.qarray import QArray, is_qarray
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize
from .interpret.proxy import is_proxy
from .interpret.transparent import Decoded, transparent
from .policy import Policy
from .qat.latent import Latent
from .resolve_policy import refuse_unless_policy


def einsum(
    subscripts: str,
    *operands: ArrayLike | QArray | Latent,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    policy: Policy | None = None,
    key: Key[Array, ""] | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """`jnp.einsum` for any number of operands, any of which may be a QArray.

    Each pair of operands is contracted by `fb.dot_general`, in the order of `jnp.einsum`; transposes keep codes. A QArray
    with an index that is summed or repeated within it is decoded first.

    Args:
        subscripts: as in `jnp.einsum`, such as `"bld,fd->blf"`.
        operands: arrays or QArrays.
        precision: as in `jnp.einsum`.
        preferred_element_type: as in `jnp.einsum`.
        policy: how the products with the last operand, the weight, are computed; None takes the policies that operands carry.
        key: a JAX random key, for policies whose backward pass draws random numbers.
        out_sharding: as in `jnp.einsum`.

    Returns:
        The contraction.

    Raises:
        QuantError: when `policy` is not a Policy, or is given with a QArray operand, with a single operand, or with a weight
            that has an index summed or repeated within it; when operands carry different policies, or a policy needs a key.
        UnsupportedError: for a policy with delayed scaling.

    >>> from fewbit.kernels.quantize import quantize
    >>> einsum("bi,oi->bo", jnp.ones((2, 4)), quantize(jnp.eye(4), "int8")).shape
    (2, 4)
    """
    if not isinstance(subscripts, str):
        raise QuantError(f"subscripts is {type(subscripts).__name__}; pass a string such as 'bi,oi->bo'")
    refuse_unless_policy(policy)
    report = None
    if policy is not None:
        if len(operands) < 2:
            raise QuantError(f"policy= is given, but {subscripts!r} has no product; pass it with two or more operands")
        *others, last = operands
        if is_proxy(last) or any(map(is_qarray, others)):
            raise QuantError(
                "policy= is given, but an operand is a QArray; pass float arrays, or let the QArray carry the policy"
            )
        operands, report = (*others, Latent(jnp.asarray(last), key, policy)), _refuse_decoded
    elif key is not None:
        operands = tuple(_with_key(x, key) for x in operands)
    return _contraction(subscripts, precision, preferred_element_type, out_sharding, report)(*operands)


def _refuse_decoded(decoded: Decoded) -> None:
    """Refuses a weight that enters a product as a float array, without its policy."""
    raise QuantError(
        "policy= is given, but an index of the last operand is summed or repeated within it before the product "
        f"({decoded.primitive}); sum or take the diagonal first, and pass the result"
    )


def _with_key(x: ArrayLike | QArray | Latent, key: Key[Array, ""]) -> ArrayLike | QArray | Latent:
    """Attaches the key to a QArray whose policy rounds stochastically; other operands are unchanged."""
    if not (isinstance(x, QArray) and isinstance(x.policy, Policy)):
        return x
    if not (x.policy.dlhs.needs_key or x.policy.drhs.needs_key):
        return x
    return Latent(dequantize(x), key, x.policy, prequantized=x)


@functools.lru_cache(maxsize=256)
def _contraction(
    subscripts: str,
    precision: Any,
    preferred: DTypeLike | None,
    out_sharding: NamedSharding | PartitionSpec | None,
    report: Callable[[Decoded], None] | None,
) -> Callable[..., jax.Array]:
    """The contraction as a transparent function, cached so that eager calls compile once."""

    def contract(*arrays: jax.Array) -> jax.Array:
        return jnp.einsum(
            subscripts, *arrays, precision=precision, preferred_element_type=preferred, out_sharding=out_sharding
        )

    return transparent(contract, fallback="dequantize", report=report)

"""Resolves a product's operands: policy, weight side and random key."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..array import QArray, is_qarray, refuse_invalid
from ..errors import QuantError, UnsupportedError
from .bilinear import ProductConfig
from .policy import FLOAT, Policy
from .qat.delayed_scales import widest
from .qat.latent import Latent, is_latent, plain


def resolved(
    lhs: ArrayLike | QArray | Latent, rhs: ArrayLike | QArray | Latent, policy: Policy | None, key: jax.Array | None
) -> tuple[jax.Array | QArray, jax.Array | QArray, ProductConfig | None, jax.Array | None]:
    """Both operands of a product as arrays or QArrays, and the policy applied to them.

    Args:
        lhs: the left operand: an array, a QArray, or a Latent.
        rhs: the right operand, likewise.
        policy: how to compute; None takes the policy that an operand carries.
        key: a JAX random key; None takes the key that an operand carries.

    Returns:
        The left operand, the right one, the rules (None where no policy changes the product or its gradients), and the key.

    Raises:
        QuantError: when operands carry different policies and none is given, or `policy` is not a Policy; for a QArray whose
            leaves do not fit its scheme.
        UnsupportedError: for a policy with delayed scaling whose weight carries no scales of earlier steps.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(f"policy is {policy!r}; pass a Policy, such as fb.Policy('int8', activation='int8')")
    if policy is None:
        policy = _carried_policy(lhs, rhs)
    if key is None:
        key = next((x.key for x in (lhs, rhs) if is_latent(x) and x.key is not None), None)
    weight_is_left = _has_left_weight(lhs, rhs)
    weight = lhs if weight_is_left else rhs
    left, right = operand(plain(lhs), "lhs"), operand(plain(rhs), "rhs")
    if policy is None or not _is_needed(policy, left, right):
        return left, right, None, key
    scales = served = held = None
    if is_latent(weight):
        held = weight.held
        if weight.served is not None:
            served = weight.served.on_last(weight.ndim)
        if policy.delayed is not None and weight.scales is not None:
            scales = widest(weight.scales)
    if policy.delayed is not None and scales is None:
        reason = "its scales come from earlier steps; fb.train carries them, given delayed="
        raise UnsupportedError("a product cannot follow delayed scaling on its own", {str(policy): reason})
    return left, right, ProductConfig(policy, weight_is_left, scales, served, held), key


def operand(x: ArrayLike | QArray, what: str) -> jax.Array | QArray:
    """An operand as an array or a valid QArray; `what` names it in the QuantError of leaves that do not fit the scheme."""
    if not isinstance(x, QArray):
        return jnp.asarray(x)
    refuse_invalid(x, what)
    return x


def _is_needed(policy: Policy, lhs: jax.Array | QArray, rhs: jax.Array | QArray) -> bool:
    """Whether a policy changes the product of two operands, forwards or backwards."""
    has_backward = policy.dlhs != FLOAT or policy.drhs != FLOAT
    floats = 2 - is_qarray(lhs) - is_qarray(rhs)
    return has_backward or (policy.activation is not None and floats > 0) or floats == 2


def _has_left_weight(lhs: object, rhs: object) -> bool:
    """Whether the left operand is the weight: it carries the policy, or it alone is quantized."""
    if is_latent(lhs) or is_latent(rhs):
        return not is_latent(rhs)
    return is_qarray(lhs) and not is_qarray(rhs)


def _carried_policy(lhs: object, rhs: object) -> Policy | None:
    """The policy that the operands carry."""
    carried = {x.policy for x in (lhs, rhs) if isinstance(x, QArray | Latent) and isinstance(x.policy, Policy)}
    if len(carried) > 1:
        raise QuantError(f"the operands carry different policies ({', '.join(sorted(map(str, carried)))}); pass policy=")
    return next(iter(carried), None)

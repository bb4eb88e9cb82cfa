"""What the operands of a product say about how it is computed: their policy, which of them is the weight, their random key."""

from typing import Any

import jax.numpy as jnp

from ..array import is_qarray, refuse_invalid
from ..errors import QuantError, UnsupportedError
from .arms import Rules
from .latent import is_latent, plain
from .policy import FLOAT, Policy
from .stepped import StepScales, widest


def resolved(lhs: Any, rhs: Any, policy: Policy | None, key: Any) -> tuple[Any, Any, Rules | None, Any]:
    """Both operands of a product as arrays or QArrays, and what they follow.

    Args:
        lhs: the left operand: an array, a QArray, or a Latent.
        rhs: the right operand, likewise.
        policy: how to compute; None takes the policy of the operand that carries one.
        key: a JAX random key; None takes the key of the operand that carries one.

    Returns:
        The left operand, the right one, the rules (None where no policy changes the product or its gradients), and the key.

    Raises:
        QuantError: when two operands carry different policies and none is given, or what is given is none; for a QArray
            whose leaves do not fit its scheme.
        UnsupportedError: for a policy with delayed scaling whose weight carries no scales of earlier steps.
    """
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(f"policy is {policy!r}; pass a Policy, such as fb.Policy('int8', activation='int8')")
    policy = policy if policy is not None else _carried_policy(lhs, rhs)
    key = key if key is not None else next((x.key for x in (lhs, rhs) if is_latent(x) and x.key is not None), None)
    weight_is_left = _has_left_weight(lhs, rhs)
    left, right = operand(plain(lhs), "lhs"), operand(plain(rhs), "rhs")
    if policy is None or not _is_needed(policy, left, right):
        return left, right, None, key
    scales = None
    if policy.delayed is not None:
        scales = _carried_scales(lhs if weight_is_left else rhs)
        if scales is None:
            reason = "its scales come from earlier steps; fb.train carries them, given delayed="
            raise UnsupportedError("a product cannot follow delayed scaling on its own", {str(policy): reason})
    weight = lhs if weight_is_left else rhs
    served, held = (weight.served, weight.held) if is_latent(weight) else (None, None)
    served = None if served is None else served.on_last(weight.ndim)
    return left, right, Rules(policy, weight_is_left, scales, served, held), key


def operand(x: Any, what: str) -> Any:
    """An operand as an array or a valid QArray; QuantError names it by `what` where its leaves do not fit its scheme."""
    if not is_qarray(x):
        return jnp.asarray(x)
    refuse_invalid(x, what)
    return x


def _is_needed(policy: Policy, lhs: Any, rhs: Any) -> bool:
    """Whether a policy changes the product of two operands, forwards or backwards."""
    has_backward = policy.dlhs != FLOAT or policy.drhs != FLOAT
    floats = 2 - is_qarray(lhs) - is_qarray(rhs)
    return has_backward or (policy.activation is not None and floats > 0) or floats == 2


def _has_left_weight(lhs: Any, rhs: Any) -> bool:
    """Whether the left operand takes the part of the weight: it carries the policy, or it alone is quantized."""
    if is_latent(lhs) or is_latent(rhs):
        return not is_latent(rhs)
    return is_qarray(lhs) and not is_qarray(rhs)


def _carried_scales(weight: Any) -> StepScales | None:
    """The scales of earlier steps that a weight carries."""
    return None if not is_latent(weight) or weight.scales is None else widest(weight.scales)


def _carried_policy(lhs: Any, rhs: Any) -> Policy | None:
    """The policy that the operands carry."""
    carried = {x.policy for x in (lhs, rhs) if (is_qarray(x) or is_latent(x)) and isinstance(x.policy, Policy)}
    if len(carried) > 1:
        raise QuantError(f"the operands carry different policies ({', '.join(sorted(map(str, carried)))}); pass policy=")
    return next(iter(carried), None)

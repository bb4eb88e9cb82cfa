"""Resolves a product's policy, weight side and key."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..array.qarray import QArray, is_qarray
from ..array.scheme import Scheme
from ..array.validity import refuse_invalid
from ..errors import QuantError, UnsupportedError
from .policy import FLOAT, Arm, Policy
from .qat.delayed_scales import StepScales, widest
from .qat.latent import Label, Latent, is_latent, plain
from .qat.serving_tiles import ServingTiles


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """A Policy applied to one product: which operand is the weight, and its scales.

    Attributes:
        policy: the policy.
        weight_is_left: whether the left operand is the weight.
        scales: the scales from earlier steps, for a policy with delayed scaling; else None.
        served: the weight's tiles at serving time; None: those of its scheme along the contraction axes.
        prequantized: the weight quantized as at serving time, where tiles cannot describe it; else None.
        label: the weight's path in the parameters; empty where it has none.
    """

    policy: Policy
    weight_is_left: bool = False
    scales: StepScales | None = None
    served: ServingTiles | None = None
    prequantized: Any = None
    label: Label = Label()

    def scheme(self, is_left: bool) -> Scheme | None:
        """The scheme of an operand."""
        if is_left == self.weight_is_left:
            return self.policy.weight
        return self.policy.activation

    def arm(self, is_left: bool) -> Arm:
        """How the gradient of an operand is computed."""
        if is_left == self.weight_is_left:
            return self.policy.drhs
        return self.policy.dlhs

    def scale(self, scales: StepScales | None, is_left: bool) -> jax.Array | None:
        """The delayed scale of an operand. None where the scale comes from the operand itself."""
        if scales is None:
            return None
        if is_left == self.weight_is_left:
            return scales.weight
        return scales.activation


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
        The left operand, the right one, the config (None where no policy changes the product or its gradients), and the key.

    Raises:
        QuantError: when operands carry different policies and none is given, or `policy` is not a Policy; for a QArray whose
            leaves do not fit its scheme.
        UnsupportedError: for a policy with delayed scaling whose weight carries no scales of earlier steps.
    """
    refuse_unless_policy(policy)
    if policy is None:
        policy = _carried_policy(lhs, rhs)
    if key is None:
        key = next((x.key for x in (lhs, rhs) if is_latent(x) and x.key is not None), None)
    weight_is_left = _has_left_weight(lhs, rhs)
    weight = lhs if weight_is_left else rhs
    left, right = operand(plain(lhs), "lhs"), operand(plain(rhs), "rhs")
    if policy is None or not _is_needed(policy, left, right):
        return left, right, None, key
    scales, served, prequantized, label = None, None, None, Label()
    if is_latent(weight):
        prequantized, label = weight.prequantized, weight.label
        if weight.served is not None:
            served = weight.served.on_last(weight.ndim)
        if policy.delayed is not None and weight.scales is not None:
            scales = widest(weight.scales)
    if policy.delayed is not None and scales is None:
        reason = "its scales come from earlier steps; fb.train carries them, given delayed="
        raise UnsupportedError("a product cannot follow delayed scaling on its own", {str(policy): reason})
    return left, right, ProductConfig(policy, weight_is_left, scales, served, prequantized, label), key


def refuse_unless_policy(policy: object) -> None:
    """Raises a QuantError for an argument `policy` that is neither a Policy nor None."""
    if policy is not None and not isinstance(policy, Policy):
        raise QuantError(f"policy is {policy!r}; pass a Policy, such as fb.Policy('int8', activation='int8')")


def operand(x: ArrayLike | QArray, what: str) -> jax.Array | QArray:
    """An operand as an array or a valid QArray. `what` names it in the QuantError of leaves that do not fit the scheme."""
    if not isinstance(x, QArray):
        return jnp.asarray(x)
    refuse_invalid(x, what)
    return x


def _is_needed(policy: Policy, lhs: jax.Array | QArray, rhs: jax.Array | QArray) -> bool:
    """Whether a policy changes the product of two operands, forwards or backwards."""
    if policy.accumulator is not None or policy.dlhs != FLOAT or policy.drhs != FLOAT:
        return True
    floats = 2 - is_qarray(lhs) - is_qarray(rhs)
    return (policy.activation is not None and floats > 0) or floats == 2


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

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
from .qat.serving_quantize import quantized_latent
from .qat.serving_tiles import ServingTiles


@dataclasses.dataclass(frozen=True)
class ProductConfig:
    """A Policy applied to one product: which operand is the weight, and its scales.

    Attributes:
        policy: the policy.
        weight_is_left: whether the left operand is the weight.
        scales: the scales from earlier steps, for a policy with delayed scaling; else None.
        served: the weight's tiles at serving time; None: those of its scheme along the contraction axes.
        prequantized: the left and the right operand quantized as at serving time; None for one that this config quantizes.
        label: the weight's path in the parameters; empty where it has none.
    """

    policy: Policy
    weight_is_left: bool = False
    scales: StepScales | None = None
    served: ServingTiles | None = None
    prequantized: tuple[QArray | None, QArray | None] = (None, None)
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
        QuantError: when operands carry policies that differ in more than the weight's scheme and none is given, or `policy` is
            not a Policy, or of another format than the weight, a QArray; for a QArray whose leaves do not fit its scheme, and for a
            key that is no single key.
        UnsupportedError: for a policy with delayed scaling whose weight carries no scales of earlier steps.
    """
    refuse_unless_policy(policy)
    given, weight_is_left = policy, _has_left_weight(lhs, rhs)
    weight, other = (lhs, rhs) if weight_is_left else (rhs, lhs)
    if policy is None:
        policy = _carried_policy(weight, other)
    elif isinstance(weight, QArray) and weight.scheme.format != policy.weight.format:
        raise QuantError(
            f"the policy is {policy}, but the weight is quantized already, to {weight.scheme.name}; pass a policy with that scheme, or "
            "fb.dequantize the weight"
        )
    refuse_unless_key(key)
    if key is None:
        key = next((x.key for x in (lhs, rhs) if is_latent(x) and x.key is not None), None)
    left, right = operand(plain(lhs), "lhs"), operand(plain(rhs), "rhs")
    if policy is None or not _is_needed(policy, left, right):
        return left, right, None, key
    prequantized = _prequantized(lhs, weight, policy, given), _prequantized(rhs, weight, policy, given)
    scales, served, label = None, None, Label()
    if is_latent(weight):
        label = weight.label
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


def refuse_unless_key(key: object) -> None:
    """Raises a QuantError for an argument `key` that is neither one JAX random key nor None."""
    if key is None:
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not (is_typed and shape == ()) and not (dtype == jnp.uint32 and shape is not None and len(shape) == 1):
        shown = f"has shape {shape} and dtype {dtype}" if shape is not None else f"is {key!r}"
        raise QuantError(f"key {shown}; pass one JAX random key, such as jax.random.key(0)")


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


def _prequantized(x: object, weight: object, policy: Policy, given: Policy | None) -> QArray | None:
    """A trained parameter quantized as at serving, where the product does not quantize it as its weight; else None.

    That is the left one of two, and one whose own policy is not the product's.
    """
    if not is_latent(x):
        return None
    if x is weight and policy in (x.policy, given):
        return x.prequantized
    return quantized_latent(x)


def _carried_policy(weight: object, other: object) -> Policy | None:
    """The policy that the operands carry.

    Of two it is that of the weight, or the one that is not weight-only. The weight's schemes may differ: the other operand is
    quantized already, or a parameter that its own scheme quantizes.
    """
    carriers = [x for x in (weight, other) if isinstance(x, QArray | Latent)]
    policies = [x.policy for x in carriers if isinstance(x.policy, Policy)]
    if len(set(policies)) > 1:
        policies = [policy for policy in policies if not policy.is_weight_only] or policies
        if len({_except_weight(policy) for policy in policies}) > 1:
            shown = " and ".join(f"{x.label} ({x.policy})" if isinstance(x, Latent) else str(x.policy) for x in carriers)
            raise QuantError(
                f"the operands carry different policies: {shown}; pass policy=, or give both the same except for the weight's scheme"
            )
    return next(iter(policies), None)


def _except_weight(policy: Policy) -> tuple[Any, ...]:
    """The fields of a policy except `weight`."""
    return tuple(getattr(policy, field.name) for field in dataclasses.fields(policy) if field.name != "weight")

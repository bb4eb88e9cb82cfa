"""Policies for products without a parameter in training."""

from collections.abc import Mapping

import jax
from jaxtyping import Array, Key

from ..ops.interpret.transparent import Choice
from ..ops.policy import Policy
from ..ops.qat.delayed_scales import StepScales
from ..ops.qat.latent import Latent


def chosen_products(
    policies: Mapping[str, Policy], key: Key[Array, ""] | None, scales: Mapping[str, StepScales]
) -> Choice | None:
    """Selects the products without a parameter that follow a policy.

    Args:
        policies: their policies, by the product's name.
        key: the random key of the step, or None.
        scales: the scales of delayed scaling, by the product's name.

    Returns:
        The argument of `fewbit.ops.interpret.transparent.evaluated`; None where no product has a policy.
    """
    if not policies:
        return None
    if key is not None:
        key = jax.random.fold_in(key, 1)
    chosen = {name: Latent(None, key, policy, scales.get(name)) for name, policy in policies.items()}
    return lambda _: chosen

"""Which products without a parameter are trained under a policy."""

from collections.abc import Mapping
from typing import Any

import jax

from ..ops.latent import Latent
from ..ops.policy import Policy
from ..ops.stepped import StepScales
from ..ops.transparent import Choice


def chosen_products(policies: Mapping[str, Policy], key: Any, scales: Mapping[str, StepScales]) -> Choice | None:
    """Which products without a parameter follow a policy.

    Args:
        policies: their policies, by the product's name.
        key: the random key of the step, or None.
        scales: the scales that earlier steps decided, by the product's name.

    Returns:
        What `fewbit.ops.transparent.evaluated` asks; None where no product has a policy.
    """
    if not policies:
        return None
    key = None if key is None else jax.random.fold_in(key, 1)
    chosen = {name: Latent(None, key, policy, scales.get(name)) for name, policy in policies.items()}
    return lambda _: chosen

"""Which products without a parameter are trained under a policy."""

from typing import Any

import jax

from ..errors import UnsupportedError
from ..ops.latent import Latent
from ..ops.transparent import Choice
from ..ops.uses import Product
from ..recipe import Recipe
from ..recipe.matching import matched_product_rules


def chosen_products(recipe: Recipe, key: Any) -> Choice | None:
    """Which products without a parameter follow a policy.

    Args:
        recipe: the recipe.
        key: the random key of the step, or None.

    Returns:
        What `fewbit.ops.transparent.evaluated` asks; None where the recipe has no rules for products.

    Raises:
        UnsupportedError: for a policy with delayed scaling.
    """
    if not recipe.products:
        return None
    if wishing := [rule for rule in recipe.products if rule.policy is not None and rule.policy.delayed is not None]:
        reason = "the scales of earlier steps are kept by parameter, and it has none"
        raise UnsupportedError(f"fb.train cannot follow recipe {recipe.name!r}", {str(rule): reason for rule in wishing})
    key = None if key is None else jax.random.fold_in(key, 1)

    def chosen(products: tuple[Product, ...]) -> dict[str, Latent]:
        rules = matched_product_rules(recipe, products)
        policies = {name: rule.policy for name, rule in rules.items() if rule is not None and rule.policy is not None}
        return {name: Latent(None, key, policy) for name, policy in policies.items()}

    return chosen

"""Which products without a parameter are trained under a policy."""

from collections.abc import Mapping
from typing import Any

import jax

from ..ops.latent import Latent
from ..ops.stepped import StepScales
from ..ops.transparent import Choice
from ..ops.uses import Product
from ..recipe import Recipe
from ..recipe.matching import matched_product_policies


def chosen_products(recipe: Recipe, key: Any, scales: Mapping[str, StepScales]) -> Choice | None:
    """Which products without a parameter follow a policy.

    Args:
        recipe: the recipe.
        key: the random key of the step, or None.
        scales: the scales that earlier steps decided, by the product's name.

    Returns:
        What `fewbit.ops.transparent.evaluated` asks; None where the recipe has no rules for products.
    """
    if not recipe.products:
        return None
    key = None if key is None else jax.random.fold_in(key, 1)

    def chosen(products: tuple[Product, ...]) -> dict[str, Latent]:
        policies = matched_product_policies(recipe, products)
        return {name: Latent(None, key, policy, scales.get(name)) for name, policy in policies.items()}

    return chosen

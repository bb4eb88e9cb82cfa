"""Which parameters, and which products without one, are trained under a policy."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..array import is_qarray
from ..errors import UnsupportedError
from ..ops.latent import Latent
from ..ops.policy import Policy
from ..ops.transparent import Choice
from ..ops.uses import Product, Use, array_paths
from ..recipe import Recipe
from ..recipe.plan import matched_product_rules, matched_rules


def trained_policies(recipe: Recipe, params: Any, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Policy]:
    """The policy of each parameter that a recipe gives one, by its path: of floating arrays of two and more axes.

    Args:
        recipe: the recipe.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        uses: the uses of each parameter.

    Returns:
        The policies.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    rules, leaves = matched_rules(recipe, uses), array_paths(params)
    return {
        path: rule.policy
        for path, rule in rules.items()
        if rule is not None and rule.policy is not None and len(leaves[path].shape) >= 2
        if jnp.issubdtype(leaves[path].dtype, jnp.floating) and not is_qarray(leaves[path])
    }


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

    def chosen(products: tuple[Product, ...]) -> dict[str, Callable[[Any], Latent]]:
        rules = matched_product_rules(recipe, products)
        policies = {name: rule.policy for name, rule in rules.items() if rule is not None and rule.policy is not None}
        return {name: functools.partial(Latent, key=key, policy=policy) for name, policy in policies.items()}

    return chosen

"""Which parameters are trained under a policy."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..ops.policy import Policy
from ..ops.uses import Use, array_paths
from ..recipe import Recipe
from ..recipe.plan import matched_rules


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
        if jnp.issubdtype(leaves[path].dtype, jnp.floating)
    }

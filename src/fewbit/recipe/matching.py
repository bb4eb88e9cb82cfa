"""Which rule of a recipe each parameter follows, and each product without one."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from ..array import is_qarray
from ..errors import QuantError
from ..ops.policy import Policy
from ..ops.uses import Product, Use, array_paths
from .recipe import Recipe
from .rule import Rule


def matched_rules(recipe: Recipe, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Rule | None]:
    """For each parameter, by its path, the first rule that matches it, or None.

    Args:
        recipe: the recipe.
        uses: the uses of each parameter, by its path.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    used_by = {path: tuple(dict.fromkeys(use.op for use in used)) for path, used in uses.items()}
    return _matching(recipe.rules, used_by, recipe.name, "rule", "parameters")


def matched_product_rules(recipe: Recipe, products: tuple[Product, ...]) -> dict[str, Rule | None]:
    """For each product without a parameter, by its name, the first rule that matches it, or None.

    Args:
        recipe: the recipe.
        products: the products.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    named = {product.name: (product.op,) for product in products}
    return _matching(recipe.products, named, recipe.name, "product rule", "products without a parameter")


def _matching(
    rules: tuple[Rule, ...], used_by: Mapping[str, tuple[str, ...]], recipe: str, what: str, things: str
) -> dict[str, Rule | None]:
    """The first rule that matches each name; a rule that matches none must be optional."""
    found = {
        name: next((i for i, rule in enumerate(rules) if rule.matches(name, ops)), None) for name, ops in used_by.items()
    }
    for index, rule in enumerate(rules):
        if index not in found.values() and not rule.optional:
            raise QuantError(
                f"{what} {index + 1} of recipe {recipe!r} ({rule}) matches nothing; the {things} are "
                f"{_few(list(used_by)) or 'none'}. Correct its path, or mark it optional"
            )
    return {name: None if index is None else rules[index] for name, index in found.items()}


def _few(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")


def matched_policies(recipe: Recipe, params: Any, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Policy]:
    """The policy of each parameter that a recipe gives one, by its path: of floating arrays of two and more axes, not of QArrays.

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

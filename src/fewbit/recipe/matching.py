"""Which rule of a recipe each parameter follows, and each product without one; and along which axes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..array import is_qarray
from ..errors import QuantError
from ..ops.policy import Policy
from ..ops.served import Served
from ..ops.uses import Product, Use, array_paths
from .recipe import Recipe
from .roles import QUANTIZED_ROLES, Role, traced_roles
from .rule import PRODUCT_OPS, Rule
from .sparsity import Sparsity


def matched_rules(
    recipe: Recipe, uses: Mapping[str, tuple[Use, ...]], roles: Mapping[str, Role] | None = None
) -> dict[str, Rule | None]:
    """For each parameter, by its path, the first rule that matches it, or None.

    Args:
        recipe: the recipe.
        uses: the uses of each parameter, by its path.
        roles: the role of each parameter; None takes those of its uses.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    roles = traced_roles(uses) if roles is None else roles
    used_by = {path: (tuple(dict.fromkeys(use.op for use in used)), roles[path]) for path, used in uses.items()}
    return _matching(recipe.rules, used_by, recipe.name, "rule", "parameters")


def matched_product_rules(recipe: Recipe, products: tuple[Product, ...]) -> dict[str, Rule | None]:
    """For each product without a parameter, by its name, the first rule that matches it, or None.

    Args:
        recipe: the recipe.
        products: the products.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    named = {product.name: ((product.op,), None) for product in products}
    return _matching(recipe.products, named, recipe.name, "product rule", "products without a parameter")


def matched_product_policies(recipe: Recipe, products: tuple[Product, ...]) -> dict[str, Policy]:
    """The policy of each product without a parameter that a recipe gives one, by its name.

    Args:
        recipe: the recipe.
        products: the products.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    rules = matched_product_rules(recipe, products)
    return {name: rule.policy for name, rule in rules.items() if rule is not None and rule.policy is not None}


def _matching(
    rules: tuple[Rule, ...], used_by: Mapping[str, tuple[tuple[str, ...], Role | None]], recipe: str, what: str, things: str
) -> dict[str, Rule | None]:
    """The first rule that matches each name; a rule that matches none must be optional.

    So must one that matches only what rules before it take, unless these are optional: they say which names are special, and
    all of them may be.
    """
    found: dict[str, int | None] = dict.fromkeys(used_by)
    for index, rule in enumerate(rules):
        names = used_by if rule.literal is None else {rule.literal} & used_by.keys()
        matching = [name for name in names if rule.matches(name, *used_by[name])]
        taken = {name: earlier for name in matching if (earlier := found[name]) is not None}
        found.update((name, index) for name in matching if name not in taken)
        if rule.optional or len(taken) < len(matching) or (taken and all(rules[i].optional for i in taken.values())):
            continue
        where = f"{what} {index + 1} of recipe {recipe!r} ({rule})"
        if taken:
            earlier = ", ".join(f"rule {i + 1} ({rules[i]})" for i in sorted(set(taken.values())))
            raise QuantError(
                f"{where} matches only what rules before it take: {_few(list(taken))}, by {earlier}. Put it first, or mark it "
                "optional"
            )
        refused = {name: role for name, (_, role) in used_by.items() if role is not None and rule.matches_path(name)}
        before = [found[name] for name in refused if found[name] is not None]
        if before and Role.UNKNOWN not in refused.values() and all(rules[i].optional for i in before if i is not None):
            continue
        if refused:
            raise QuantError(f"{where} quantizes nothing: {_refusal(rule, refused)}")
        raise QuantError(
            f"{where} matches nothing; the {things} are {_few(list(used_by)) or 'none'}. Correct its path, or mark it optional"
        )
    return {name: None if index is None else rules[index] for name, index in found.items()}


def _refusal(rule: Rule, refused: Mapping[str, Role]) -> str:
    """Why a rule takes none of the parameters that its path matches, and what to do."""
    paths = {role: [path for path, own in refused.items() if own is role] for role in dict.fromkeys(refused.values())}
    listed = "; ".join(f"{_few(own)} ({role.words})" for role, own in paths.items())
    if all(role in rule.taken_roles for role in paths):
        return f"its path matches {listed}, of which none is used by {' or '.join(rule.ops)}. Correct its path or its ops"
    remedies = []
    if Role.UNKNOWN in paths and not rule.roles:
        remedies.append("give the rule the contracted axis, as in axis=-1, where a role is unknown")
    elif Role.UNKNOWN in paths:
        remedies.append(
            "where a role is unknown, pass the model's function to fb.plan, or write a rule with a path, a scheme and the "
            'contracted axis: {"path": "...", "policy": "nf4", "axis": -1}'
        )
    if not rule.roles and (named := [str(role) for role in paths if role not in (Role.UNKNOWN, *QUANTIZED_ROLES)]):
        remedies.append(f"name roles={named} in the rule to quantize these all the same")
    return f"its path matches {listed}. {'; '.join((*remedies, 'correct its path; or mark it optional')).capitalize()}"


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
        if rule is not None and rule.policy is not None and why_whole(leaves[path]) is None
    }


def served_tiles(recipe: Recipe, params: Any, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Served]:
    """The tiles that each parameter has where it is served by a plan of the recipe, by its path.

    Args:
        recipe: the recipe.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        uses: the uses of each parameter.

    Returns:
        The tiles. A parameter that no plan could serve, because its products contract different axes, has none, nor has one
        with delayed scaling.
    """
    rules, leaves = matched_rules(recipe, uses), array_paths(params)
    found = {}
    for path, policy in matched_policies(recipe, params, uses).items():
        rule, shape = rules[path], tuple(leaves[path].shape)
        assert rule is not None
        try:
            axis = rule.axis or contracted_axes(path, uses[path])
        except QuantError:
            continue
        stacked = stacked_axes(uses[path])
        if axis is not None and policy.delayed is None and stacked == tuple(range(-len(shape), len(stacked) - len(shape))):
            axis = tuple(a if a < 0 else a - len(shape) for a in axis)
            found[path] = Served.along(policy.weight, axis, shape, len(stacked))
    return found


def stacked_axes(uses: tuple[Use, ...]) -> tuple[int, ...]:
    """The axes of a parameter, negative, that a loop takes one element of at a time."""
    return tuple(sorted({a for use in uses for a in use.stacked}))


def contracted_axes(path: str, uses: tuple[Use, ...]) -> tuple[int, ...] | None:
    """The axes that the products of a parameter contract; for one that is only looked up, the last of the others.

    Args:
        path: the parameter.
        uses: its uses.

    Returns:
        The axes, negative; None where no product contracts it.

    Raises:
        QuantError: where its products contract different axes.
    """
    axes = {use.axes for use in uses if use.op in PRODUCT_OPS and use.axes}
    if len(axes) > 1:
        places = "; ".join(f"{use.op} over {use.axes} at {use.source}" for use in uses if use.op in PRODUCT_OPS)
        raise QuantError(f"{path}: its products contract different axes ({places}); give its rule an axis")
    if axes:
        return next(iter(axes))
    looked_up = {a for use in uses if use.op == "take" for a in use.axes}
    return (-1,) if looked_up and -1 not in looked_up else (-2,) if looked_up else None


def matched_sparsity(recipe: Recipe, params: Any, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Sparsity]:
    """The sparsity of each parameter that a recipe gives one, by its path, with the axes that its groups run along.

    Args:
        recipe: the recipe.
        params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        uses: the uses of each parameter.

    Returns:
        The sparsities.

    Raises:
        QuantError: when a rule that is not optional matches nothing, and for groups that do not fit a parameter.
    """
    rules, leaves = matched_rules(recipe, uses), array_paths(params)
    found = {path: resolved_sparsity(path, leaves[path], uses[path], rule) for path, rule in rules.items()}
    return {path: sparsity for path, sparsity in found.items() if sparsity is not None}


def resolved_sparsity(path: str, leaf: Any, uses: tuple[Use, ...], rule: Rule | None) -> Sparsity | None:
    """The sparsity of one parameter under the rule that matches it, with its axes, negative; None where it stays dense."""
    if rule is None or rule.sparsity is None or why_whole(leaf) is not None:
        return None
    axis = rule.sparsity.axis or rule.axis
    if axis is None and (contracted := contracted_axes(path, uses)) is not None:
        # A convolution's axes are its window, which is no neighbourhood of channels, and then its input channels.
        is_window = any(use.op == "conv_general_dilated" for use in uses)
        axis = contracted[-1:] if is_window else tuple(sorted(contracted))
    if axis is None:
        return None
    ndim = len(leaf.shape)
    sparsity = dataclasses.replace(rule.sparsity, axis=tuple(a if a < 0 else a - ndim for a in axis))
    try:
        jax.eval_shape(sparsity.pruned, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    except QuantError as error:
        raise QuantError(f"{path} {tuple(leaf.shape)}: {error}") from error
    return sparsity


def why_whole(leaf: Any) -> str | None:
    """Why a parameter can be neither quantized nor pruned, or None."""
    if is_qarray(leaf):
        return f"quantized already, as {leaf.scheme.name}"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"{jnp.dtype(leaf.dtype).name} is not floating"
    if len(leaf.shape) < 2:
        return "a vector: no product contracts it" if leaf.shape else "a scalar"
    return "no elements" if 0 in leaf.shape else None

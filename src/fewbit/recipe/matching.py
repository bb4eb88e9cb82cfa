"""Matches rules to parameters and products."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..array.qarray import QArray
from ..errors import QuantError
from ..ops.interpret.parameter_uses import Product, Use
from .recipe import Recipe
from .role import QUANTIZED_ROLES, Role
from .rule import OPS, PRODUCT_OPS, Rule
from .sparsity import Sparsity

Leaf: TypeAlias = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | QArray
"""A parameter: an array, quantized or not, or the shape and dtype of one."""


def matched_rules(recipe: Recipe, uses: Mapping[str, tuple[Use, ...]], roles: Mapping[str, Role]) -> dict[str, Rule | None]:
    """The first rule that matches each parameter, by path; None where none does.

    Args:
        recipe: the recipe.
        uses: the uses of each parameter, by its path.
        roles: the role of each parameter.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    used_by = {path: (tuple(dict.fromkeys(use.op for use in used)), roles[path]) for path, used in uses.items()}
    return _matching(recipe.rules, used_by, recipe.name, "rule", "parameters")


def matched_product_rules(recipe: Recipe, products: tuple[Product, ...]) -> dict[str, Rule | None]:
    """The first rule that matches each product without a parameter, by name, or None.

    Args:
        recipe: the recipe.
        products: the products.

    Raises:
        QuantError: when a rule that is not optional matches nothing.
    """
    named = {product.name: ((product.op,), None) for product in products}
    return _matching(recipe.products, named, recipe.name, "product rule", "products without a parameter")


def _matching(
    rules: tuple[Rule, ...], used_by: Mapping[str, tuple[tuple[str, ...], Role | None]], recipe: str, what: str, things: str
) -> dict[str, Rule | None]:
    """The first rule that matches each name; QuantError for a rule without effect.

    A rule that matches no name must be optional. So must one whose names all follow earlier rules, unless these are
    optional: an optional rule says which names are special, and all of them may be.
    """
    found: dict[str, int | None] = dict.fromkeys(used_by)
    candidates = _candidates(list(used_by))
    for index, rule in enumerate(rules):
        matching = [name for name in candidates(rule) if rule.matches(name, *used_by[name])]
        taken = {name: earlier for name in matching if (earlier := found[name]) is not None}
        found.update((name, index) for name in matching if name not in taken)
        if rule.optional or len(taken) < len(matching) or (taken and all(rules[i].optional for i in taken.values())):
            continue
        where = f"{what} {index + 1} of recipe {recipe!r} ({rule})"
        if taken:
            earlier = ", ".join(f"rule {i + 1} ({rules[i]})" for i in sorted(set(taken.values())))
            raise QuantError(
                f"{where} has no effect: earlier rules match all of its {things}: {_few(list(taken))}, by {earlier}. "
                "Move it before them, or mark it optional"
            )
        refused = {name: role for name, (_, role) in used_by.items() if role is not None and rule.matches_path(name)}
        before = [found[name] for name in refused if found[name] is not None]
        if before and Role.UNKNOWN not in refused.values() and all(rules[i].optional for i in before if i is not None):
            continue
        if refused:
            raise QuantError(f"{where} quantizes nothing: {_refusal(rule, refused)}")
        raise QuantError(
            f"{where} matches nothing; the {things} are {_few(list(used_by)) or 'none'}. Correct its path, or mark it "
            "optional"
        )
    return dict.fromkeys(used_by) | {name: rules[index] for name, index in found.items() if index is not None}


def _candidates(names: list[str]) -> Callable[[Rule], list[str]]:
    """A function that returns the names that a rule may match.

    They begin with the literal prefix of its path, and are in their order.
    """
    places, ordered = {name: i for i, name in enumerate(names)}, sorted(names)

    def of_rule(rule: Rule) -> list[str]:
        literal, prefix = rule.pattern.literal, rule.pattern.prefix
        if literal is not None:
            return [literal] if literal in places else []
        if not prefix:
            return names
        first = bisect.bisect_left(ordered, prefix)
        last = bisect.bisect_right(ordered, prefix, lo=first, key=lambda name: name[: len(prefix)])
        return sorted(ordered[first:last], key=places.__getitem__)

    return of_rule


def _refusal(rule: Rule, refused: Mapping[str, Role]) -> str:
    """Why a rule quantizes no parameter that its path matches, and what to do."""
    paths = {role: [path for path, own in refused.items() if own is role] for role in dict.fromkeys(refused.values())}
    listed = "; ".join(f"{_few(own)} ({role.words})" for role, own in paths.items())
    if all(role in rule.taken_roles for role in paths):
        return f"its path matches {listed}, of which none is used by {' or '.join(rule.ops)}. Correct its path or its ops"
    remedies = []
    if Role.UNKNOWN in paths and not rule.roles:
        remedies.append("give the rule the contracted axis, as in axis=-1, where a role is unknown")
    elif Role.UNKNOWN in paths:
        remedies.append(
            "where a role is unknown, write a rule with a path, a scheme and the contracted axis: "
            '{"path": "...", "policy": "nf4", "axis": -1}, or, for code in jax, pass the model\'s function to fb.plan'
        )
    if not rule.roles and (named := [str(role) for role in paths if role not in (Role.UNKNOWN, *QUANTIZED_ROLES)]):
        remedies.append(f"name roles={named} in the rule to quantize these")
    return f"its path matches {listed}. {'; '.join((*remedies, 'correct its path; or mark it optional')).capitalize()}"


def _few(paths: list[str]) -> str:
    if len(paths) <= 8:
        return ", ".join(paths)
    return f"{', '.join(paths[:8])} and {len(paths) - 8} more"


def stacked_axes(uses: tuple[Use, ...]) -> tuple[int, ...]:
    """The axes, negative, that a loop runs over before a product or look-up."""
    return tuple(sorted({a for use in uses if use.op in OPS for a in use.stacked}))


def common_casts(uses: tuple[Use, ...]) -> tuple[str, ...]:
    """The casts shared by all products and look-ups of a parameter. It is quantized after them.

    Where one use reads it uncast, or two cast it to different dtypes, there are none: all uses share one set of codes, and
    each casts the decoded numbers.
    """
    each = [use.casts for use in uses if use.op in OPS]
    return tuple(column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*each, strict=False)))


def contracted_axes(uses: tuple[Use, ...]) -> tuple[int, ...]:
    """The axes, negative, that the products of a parameter contract. With several products, they are those of all."""
    return tuple(sorted({a for use in uses if use.op in PRODUCT_OPS for a in use.axes}))


def tile_axes(
    path: str,
    uses: tuple[Use, ...],
    tiles: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda axes: axes,
    remedy: str = "give its rule an axis",
) -> tuple[int, ...] | None:
    """The axes that the tiles (blocks with one scale) of a parameter run along.

    Its products contract these axes; look-ups take rows along them. Tied embeddings have both uses, and they agree where
    both want the same tiles: `e[ids]` and `h @ e.T` do.

    Args:
        path: the parameter.
        uses: its uses.
        tiles: the tile lengths along axes. Uses that want different axes agree where these are the same.
        remedy: what the error says to do.

    Returns:
        The axes, negative; None where no product contracts it, and no look-up takes rows of it.

    Raises:
        QuantError: where its uses want different tiles.
    """
    wanting = _tiling(uses)
    axes = list(dict.fromkeys(use.tiled for use in wanting))
    if len(axes) > 1 and len(set(map(tiles, axes))) > 1:
        places = "; ".join(f"{use.op} over {use.tiled} at {use.source}" for use in wanting)
        what = "its products and look-ups want tiles along different axes"
        if all(use.op in PRODUCT_OPS for use in wanting):
            what = "its products contract different axes"
        raise QuantError(f"{path}: {what} ({places}); {remedy}")
    return next(iter(axes), None)


def _tiling(uses: tuple[Use, ...]) -> list[Use]:
    """The uses that want tiles along axes."""
    return [use for use in uses if use.op in OPS and use.tiled]


def resolved_sparsity(path: str, leaf: Leaf, uses: tuple[Use, ...], rule: Rule | None) -> Sparsity | None:
    """The sparsity of one parameter with its axes, negative. None where it stays dense."""
    if rule is None or rule.sparsity is None or why_unquantizable(leaf) is not None:
        return None
    axis = rule.sparsity.axis
    if axis is None and len({use.tiled for use in _tiling(uses)}) != 1:
        axis = rule.axis
    if axis is None and (contracted := tile_axes(path, uses)) is not None:
        axis = tuple(sorted(contracted))
        if any(use.op == "conv_general_dilated" for use in uses):
            axis = contracted[-1:]  # the input channels, which follow the axes of the window
    if axis is None:
        return None
    ndim = len(leaf.shape)
    sparsity = dataclasses.replace(rule.sparsity, axis=tuple(a if a < 0 else a - ndim for a in axis))
    try:
        jax.eval_shape(sparsity.pruned, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    except QuantError as error:
        raise QuantError(f"{path} {tuple(leaf.shape)}: {error}") from error
    return sparsity


def why_unquantizable(leaf: Leaf) -> str | None:
    """Why a parameter can be neither quantized nor pruned, or None."""
    if isinstance(leaf, QArray):
        return f"quantized already, as {leaf.scheme.name}"
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"{leaf.dtype.name} is not floating"
    match leaf.shape:
        case ():
            return "a scalar"
        case (_,):
            return "a vector: no product contracts it"
        case shape if 0 in shape:
            return "no elements"
    return None

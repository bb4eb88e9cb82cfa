"""Which rule of a recipe each parameter follows, and each product without one; and along which axes."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..array import is_qarray
from ..errors import QuantError
from ..ops.uses import Product, Use
from .recipe import Recipe
from .rule import OPS, PRODUCT_OPS, Rule
from .sparsity import Sparsity


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
    """The first rule that matches each name; a rule that matches none must be optional.

    So must one that matches only what rules before it take, unless these are optional: they say which names are special, and
    all of them may be.
    """
    matching = {name: [i for i, rule in enumerate(rules) if rule.matches(name, ops)] for name, ops in used_by.items()}
    found = {name: indices[0] if indices else None for name, indices in matching.items()}
    for index, rule in enumerate(rules):
        taken = {name: indices[0] for name, indices in matching.items() if index in indices}
        if index in found.values() or rule.optional or (taken and all(rules[i].optional for i in taken.values())):
            continue
        where = f"{what} {index + 1} of recipe {recipe!r} ({rule})"
        if taken:
            earlier = ", ".join(f"rule {i + 1} ({rules[i]})" for i in sorted(set(taken.values())))
            raise QuantError(
                f"{where} matches only what rules before it take: {_few(list(taken))}, by {earlier}. Put it first, or mark it "
                "optional"
            )
        raise QuantError(
            f"{where} matches nothing; the {things} are {_few(list(used_by)) or 'none'}. Correct its path, or mark it optional"
        )
    return {name: None if index is None else rules[index] for name, index in found.items()}


def _few(paths: list[str]) -> str:
    return ", ".join(paths[:8]) + (f" and {len(paths) - 8} more" if len(paths) > 8 else "")


def stacked_axes(uses: tuple[Use, ...]) -> tuple[int, ...]:
    """The axes of a parameter, negative, that a loop takes one element of at a time before a product or a look-up."""
    return tuple(sorted({a for use in uses if use.op in OPS for a in use.stacked}))


def common_casts(uses: tuple[Use, ...]) -> tuple[str, ...]:
    """The casts that all products and look-ups of a parameter begin with; the parameter is quantized after them.

    Where one use reads it as it is, or two cast it to different dtypes, there are none: one set of codes serves all uses, and
    each casts the numbers that these codes stand for.
    """
    each = [use.casts for use in uses if use.op in OPS]
    return tuple(column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*each, strict=False)))


def tile_axes(
    path: str,
    uses: tuple[Use, ...],
    tiles: Callable[[tuple[int, ...]], Any] = lambda axes: axes,
    remedy: str = "give its rule an axis",
) -> tuple[int, ...] | None:
    """The axes that tiles of a parameter run along: what its products contract, the rows that its look-ups take.

    A table that is also a product's weight, as where embeddings are tied, has one answer when both want the same tiles: `e[ids]`
    and `h @ e.T` do.

    Args:
        path: the parameter.
        uses: its uses.
        tiles: what tiles along axes are like. Uses that want different axes agree where the tiles are the same.
        remedy: what the error tells the caller to do.

    Returns:
        The axes, negative; None where no product contracts it, and no look-up takes rows of it.

    Raises:
        QuantError: where its uses want different tiles.
    """
    wanting = [use for use in uses if use.op in OPS and use.tiled]
    axes = list(dict.fromkeys(use.tiled for use in wanting))
    if len(axes) > 1 and len(set(map(tiles, axes))) > 1:
        places = "; ".join(f"{use.op} over {use.tiled} at {use.source}" for use in wanting)
        is_products = all(use.op in PRODUCT_OPS for use in wanting)
        what = (
            "its products contract different axes"
            if is_products
            else "its products and look-ups want tiles along different axes"
        )
        raise QuantError(f"{path}: {what} ({places}); {remedy}")
    return axes[0] if axes else None


def resolved_sparsity(path: str, leaf: Any, uses: tuple[Use, ...], rule: Rule | None) -> Sparsity | None:
    """The sparsity of one parameter under the rule that matches it, with its axes, negative; None where it stays dense."""
    if rule is None or rule.sparsity is None or why_whole(leaf) is not None:
        return None
    axis = rule.sparsity.axis or rule.axis
    if axis is None and (contracted := tile_axes(path, uses)) is not None:
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

"""Resolutions: the rules of a recipe matched once against one traced function; plans and training read them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from ..array.quantize import laid_along
from ..errors import QuantError
from ..ops.policy import Policy
from ..ops.served import Served, axis_within
from ..ops.uses import Product, Use, array_paths, parameter_uses
from .matching import (
    common_casts,
    matched_product_rules,
    matched_rules,
    resolved_sparsity,
    stacked_axes,
    tile_axes,
    why_whole,
)
from .recipe import Recipe
from .rule import Rule
from .sparsity import Sparsity


@dataclasses.dataclass(frozen=True)
class Resolved:
    """One parameter under the rule that matches it.

    Attributes:
        path: the parameter.
        shape: its shape, dtype and sharding.
        uses: what uses it.
        rule: the first rule that matches it, or None.
        whole: why it can be neither quantized nor pruned, or None.
        axis: the axes along which its tiles run, negative; None where no use says it, or it has no policy.
        stacked: the axes, negative, that a loop takes one element of at a time; each element is quantized on its own.
        casts: the dtypes, of fewer numbers, that every use casts it to first; it is quantized after these casts.
        sparsity: which of its weights are pruned, along which axes; None: none.
    """

    path: str
    shape: jax.ShapeDtypeStruct
    uses: tuple[Use, ...]
    rule: Rule | None
    whole: str | None
    axis: tuple[int, ...] | None
    stacked: tuple[int, ...]
    casts: tuple[str, ...]
    sparsity: Sparsity | None

    @property
    def policy(self) -> Policy | None:
        """The policy of its products and look-ups; None where its rule has none, or nothing of it can be quantized."""
        return None if self.rule is None or self.axis is None else self.rule.policy

    @property
    def served(self) -> Served | None:
        """How it is quantized where a plan serves it; None where no plan does."""
        if self.policy is None or self.axis is None or self.policy.delayed is not None:
            return None
        return Served.along(self.policy.weight, self.axis, self.shape, self.stacked, self.casts)


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A recipe resolved against one function.

    Attributes:
        recipe: the recipe.
        parameters: each parameter under its rule, by its path.
        products: the products without a parameter, in the order of the trace.
        product_rules: for each product, by its name, the first rule that matches it, or None.
    """

    recipe: Recipe
    parameters: Mapping[str, Resolved]
    products: tuple[Product, ...]
    product_rules: Mapping[str, Rule | None]

    @classmethod
    def of(cls, recipe: Recipe, fn: Callable[..., Any], params: Any, *inputs: Any, **kwargs: Any) -> Self:
        """The recipe resolved against `fn(params, *inputs, **kwargs)`, which is traced with shapes only.

        Args:
            recipe: the recipe.
            fn: the function.
            params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
            inputs: example inputs, likewise.
            kwargs: keyword arguments, which are not traced.

        Returns:
            The resolution.

        Raises:
            QuantError: when a rule that is not optional matches nothing, when uses of a parameter want tiles along different
                axes and its rule names none, and for groups of a sparsity that do not fit a parameter.
        """
        uses, products = parameter_uses(lambda params, *inputs: fn(params, *inputs, **kwargs), params, *inputs)
        return cls(recipe, _resolved(recipe, params, uses), products, matched_product_rules(recipe, products))

    @classmethod
    def without_code(cls, recipe: Recipe, params: Any) -> Self:
        """The recipe resolved against parameters alone: products are taken to contract the last of two or more axes.

        Args:
            recipe: the recipe.
            params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.

        Returns:
            The resolution.

        Raises:
            QuantError: as `of`, and for a recipe with rules for products without a parameter.
        """
        uses = {
            path: (Use("dot_general", (-1,), tiled=(-1,)),) if len(leaf.shape) >= 2 else ()
            for path, leaf in array_paths(params).items()
        }
        resolved = _resolved(recipe, params, uses)
        if recipe.products:
            raise QuantError(f"recipe {recipe.name!r} has rules for products, which only traced code has; pass fn")
        return cls(recipe, resolved, (), {})

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies of the parameters that have one, by path."""
        return {path: one.policy for path, one in self.parameters.items() if one.policy is not None}

    @property
    def product_policies(self) -> dict[str, Policy]:
        """The policies of the products without a parameter that have one, by name."""
        return {
            name: rule.policy for name, rule in self.product_rules.items() if rule is not None and rule.policy is not None
        }

    @property
    def sparsities(self) -> dict[str, Sparsity]:
        """The sparsities of the parameters that have one, by path."""
        return {path: one.sparsity for path, one in self.parameters.items() if one.sparsity is not None}


def _resolved(recipe: Recipe, params: Any, uses: Mapping[str, tuple[Use, ...]]) -> dict[str, Resolved]:
    rules, leaves = matched_rules(recipe, uses), array_paths(params)
    return {path: _of_parameter(path, leaf, uses[path], rules[path]) for path, leaf in leaves.items()}


def _of_parameter(path: str, leaf: Any, uses: tuple[Use, ...], rule: Rule | None) -> Resolved:
    """One parameter under the rule that matches it."""
    like = jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    whole, stacked, axis = why_whole(leaf), stacked_axes(uses), None
    sparsity = resolved_sparsity(path, leaf, uses, rule)
    if rule is not None and rule.policy is not None and whole is None:
        policy = rule.policy
        axis = rule.axis or tile_axes(path, uses, lambda axis: _tiles(policy, like, axis, stacked))
        axis = None if axis is None else _negative(axis, path, like.shape, stacked)
    return Resolved(path, like, uses, rule, whole, axis, stacked, common_casts(uses), sparsity)


def _negative(axis: tuple[int, ...], path: str, shape: tuple[int, ...], stacked: tuple[int, ...]) -> tuple[int, ...]:
    """The axes counted from the end; QuantError for one that the parameter does not have, or that a loop runs over."""
    for a in axis:
        if not -len(shape) <= a < len(shape):
            raise QuantError(f"{path} {shape}: axis is {a}, must be from {-len(shape)} to {len(shape) - 1}")
    axis = tuple(a if a < 0 else a - len(shape) for a in axis)
    try:
        axis_within(axis, stacked, len(shape))
    except QuantError as error:
        raise QuantError(f"{path} {shape}: {error}") from error
    return axis


def _tiles(policy: Policy, like: Any, axis: tuple[int, ...], stacked: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of the tiles along axes; a scheme with one scale for all of an array has the same along any."""
    shape = tuple(n for a, n in zip(range(-len(like.shape), 0), like.shape, strict=True) if a not in stacked)
    tiles = laid_along(policy.weight, axis_within(axis, stacked, len(like.shape)), shape).tiles(len(shape))
    return tuple(n if tile is None else min(tile, n) for tile, n in zip(tiles, shape, strict=True))

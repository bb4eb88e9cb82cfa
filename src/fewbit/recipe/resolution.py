"""Resolution: a recipe matched against one traced function."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from jaxtyping import PyTree

from ..array.scheme import laid_along
from ..errors import QuantError
from ..ops.interpret.parameter_uses import Place, Product, Use, Uses, array_paths, parameter_uses
from ..ops.interpret.traced import Traced
from ..ops.policy import Policy
from ..ops.qat.serving_tiles import ServingTiles, axis_within
from .matching import (
    Leaf,
    common_casts,
    matched_product_rules,
    matched_rules,
    resolved_sparsity,
    stacked_axes,
    tile_axes,
    why_unquantizable,
)
from .recipe import Recipe
from .role import Role
from .roles import TensorRole, traced_roles
from .rule import Rule
from .sparsity import Sparsity


@dataclasses.dataclass(frozen=True)
class Resolved:
    """One parameter under the rule that matches it.

    Attributes:
        path: the parameter.
        shape: its shape, dtype and sharding.
        role: what it does in the model.
        role_source: where the role comes from, see `TensorRole`.
        uses: what uses it.
        rule: the first rule that matches it, or None.
        whole: why it can be neither quantized nor pruned, or None.
        axis: the axes along which its tiles run, negative; None where no use determines it, or it has no policy.
        stacked: the axes, negative, that a loop runs over; each element is quantized on its own.
        casts: the narrower dtypes that every use casts it to first; it is quantized after these casts.
        sparsity: which of its weights are pruned, along which axes; None: none.
    """

    path: str
    shape: jax.ShapeDtypeStruct
    role: Role
    role_source: str
    uses: tuple[Use, ...]
    rule: Rule | None
    whole: str | None
    axis: tuple[int, ...] | None
    stacked: tuple[int, ...]
    casts: tuple[str, ...]
    sparsity: Sparsity | None

    @property
    def policy(self) -> Policy | None:
        """The policy of its products and look-ups; None where it is not quantized."""
        if self.rule is None or self.axis is None:
            return None
        return self.rule.policy

    @property
    def served(self) -> ServingTiles | None:
        """How `fb.quantize_params` quantizes it; None where it does not."""
        if self.policy is None or self.axis is None or self.policy.delayed is not None:
            return None
        return ServingTiles.along(self.policy.weight, self.axis, self.shape, self.stacked, self.casts)


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A recipe resolved against one function.

    Attributes:
        recipe: the recipe.
        parameters: each parameter under its rule, by its path.
        products: the products without a parameter, in the order of the trace.
        product_rules: for each product, by its name, the first rule that matches it, or None.
        places: for each product, by its name, its equation in the trace and those around it.
    """

    recipe: Recipe
    parameters: Mapping[str, Resolved]
    products: tuple[Product, ...]
    product_rules: Mapping[str, Rule | None]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, recipe: Recipe, fn: Callable[..., Any], params: PyTree, *inputs: PyTree, **kwargs: object) -> Self:
        """Resolves a recipe against `fn(params, *inputs, **kwargs)`, traced with shapes only.

        Args:
            recipe: the recipe.
            fn: the function.
            params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
            inputs: example inputs, likewise.
            kwargs: keyword arguments, which are not traced.

        Raises:
            QuantError: when a rule that is not optional matches nothing, when uses of a parameter want tiles along different
                axes and its rule names none, and for groups of a sparsity that do not fit a parameter.
        """
        return cls.of_traced(recipe, Traced.of(functools.partial(fn, **kwargs), (params, *inputs), {}), params)

    @classmethod
    def of_traced(cls, recipe: Recipe, traced: Traced, params: PyTree) -> Self:
        """Resolves a recipe against a function that is traced already.

        Args:
            recipe: the recipe.
            traced: the function of `params` and other arguments.
            params: the tree of parameters with which it was traced.

        Raises:
            QuantError: as `of`.
        """
        return cls._of_uses(recipe, parameter_uses(traced, params), params, {})

    @classmethod
    def of_roles(
        cls,
        recipe: Recipe,
        fn: Callable[..., Any] | None,
        params: PyTree,
        inputs: tuple[PyTree, ...],
        roles: Mapping[str, TensorRole],
    ) -> Self:
        """Resolves a recipe with given roles, with or without a trace.

        Args:
            recipe: the recipe.
            fn: the function, `fn(params, *inputs)`; None: only the roles decide.
            params: the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
            inputs: example inputs of `fn`.
            roles: the roles of parameters, by path. Where `fn` is given they override its roles, not its axes.

        Raises:
            QuantError: as `of`; without code for a recipe with rules for products without a parameter.
        """
        if fn is not None:
            return cls._of_uses(recipe, parameter_uses(Traced.of(fn, (params, *inputs), {}), params), params, roles)
        if recipe.products:
            raise QuantError(f"recipe {recipe.name!r} has rules for products, which only traced code has; pass fn")
        return cls._of_uses(recipe, None, params, roles)

    @classmethod
    def _of_uses(cls, recipe: Recipe, found: Uses | None, params: PyTree, roles: Mapping[str, TensorRole]) -> Self:
        """Resolves a recipe with the uses of a trace, or with the given roles only."""
        leaves = array_paths(params)
        if found is None:
            known = dict.fromkeys(leaves, (Role.UNKNOWN, ""))
            uses: dict[str, tuple[Use, ...]] = dict.fromkeys(leaves, ())
            uses |= {path: one.uses(len(leaves[path].shape)) for path, one in roles.items() if path in leaves}
            found = Uses(uses, (), {})
        else:
            known = {path: (role, "trace") for path, role in traced_roles(found.parameters).items()}
        known |= {path: (one.role, one.source) for path, one in roles.items()}
        rules = matched_rules(recipe, found.parameters, {path: role for path, (role, _) in known.items()})
        parameters = {
            path: _of_parameter(path, leaf, *known[path], found.parameters[path], rules[path])
            for path, leaf in leaves.items()
        }
        return cls(recipe, parameters, found.products, matched_product_rules(recipe, found.products), found.places)

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies of the parameters that have one, by path."""
        return {path: policy for path, one in self.parameters.items() if (policy := one.policy) is not None}

    @property
    def product_policies(self) -> dict[str, Policy]:
        """The policies of the products without a parameter that have one, by name."""
        return {name: rule.policy for name, rule in self.product_rules.items() if rule and rule.policy is not None}

    @property
    def chosen_products(self) -> dict[str, tuple[Product, Place]]:
        """The products without a parameter that have a policy, with their places, by name."""
        policies = self.product_policies
        return {product.name: (product, self.places[product.name]) for product in self.products if product.name in policies}

    @property
    def sparsities(self) -> dict[str, Sparsity]:
        """The sparsities of the parameters that have one, by path."""
        return {path: one.sparsity for path, one in self.parameters.items() if one.sparsity is not None}


def _of_parameter(path: str, leaf: Leaf, role: Role, source: str, uses: tuple[Use, ...], rule: Rule | None) -> Resolved:
    """One parameter under the rule that matches it."""
    like = jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    whole, stacked, axis = why_unquantizable(leaf), stacked_axes(uses), None
    sparsity = resolved_sparsity(path, leaf, uses, rule)
    if rule is not None and rule.policy is not None and whole is None:
        policy = rule.policy
        axis = rule.axis or tile_axes(path, uses, lambda axis: _tiles(policy, path, like.shape, axis, stacked))
        if axis is not None:
            axis = _negative(axis, path, like.shape, stacked)
    return Resolved(path, like, role, source, uses, rule, whole, axis, stacked, common_casts(uses), sparsity)


def _negative(axis: tuple[int, ...], path: str, shape: tuple[int, ...], stacked: tuple[int, ...]) -> tuple[int, ...]:
    """The axes counted from the end. QuantError for an axis out of range or one that a loop runs over."""
    for a in axis:
        if not -len(shape) <= a < len(shape):
            raise QuantError(f"{path} {shape}: axis is {a}, must be from {-len(shape)} to {len(shape) - 1}")
    axis = tuple(range(-len(shape), 0)[a] for a in axis)
    _within(axis, path, shape, stacked)
    return axis


def _within(axis: tuple[int, ...], path: str, shape: tuple[int, ...], stacked: tuple[int, ...]) -> tuple[int, ...]:
    """`axis_within` of a parameter, which the message of an error names."""
    try:
        return axis_within(axis, stacked, len(shape))
    except QuantError as error:
        raise QuantError(f"{path} {shape}: {error}") from error


def _tiles(
    policy: Policy, path: str, shape: tuple[int, ...], axis: tuple[int, ...], stacked: tuple[int, ...]
) -> tuple[int, ...]:
    """The tile lengths along axes; per-tensor schemes have the same along any."""
    axis = _within(axis, path, shape, stacked)
    shape = tuple(n for a, n in zip(range(-len(shape), 0), shape, strict=True) if a not in stacked)
    tiles = laid_along(policy.weight, axis, shape).tiles(len(shape))
    return tuple(n if tile is None else min(tile, n) for tile, n in zip(tiles, shape, strict=True))

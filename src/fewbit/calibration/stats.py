"""Calibration statistics, and recipes of static ranges."""

import dataclasses
import re
from collections.abc import Mapping

import jax
import numpy as np

from .._registry import near_names
from ..array.scales.fixed import Fixed
from ..errors import QuantError
from ..ops.policy import Policy
from ..recipe import recipe as as_recipe
from ..recipe.recipe import Recipe, RecipeLike
from ..recipe.role import Role
from ..recipe.rule import Rule
from .measure import Observation, ProductObservation
from .ranges import RangeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Activation statistics by parameter. A pytree, to checkpoint as such.

    Attributes:
        observations: by the parameter's path.
        ops: the operations that use each parameter, by its path. Static.
        roles: the role of each of these parameters, in the same order. Static.
        products: the ranges of the operands of products without a parameter, by the product's name.
        product_ops: the operation of each of these products, by its name. Static.
    """

    observations: Mapping[str, Observation]
    ops: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(metadata={"static": True})
    roles: tuple[Role, ...] = dataclasses.field(metadata={"static": True})
    products: Mapping[str, ProductObservation] = dataclasses.field(default_factory=dict)
    product_ops: tuple[tuple[str, str], ...] = dataclasses.field(default=(), metadata={"static": True})

    def __getitem__(self, path: str) -> Observation:
        if path not in self.observations:
            raise QuantError(f"there are no statistics of {path!r}; {near_names(path, tuple(self.observations))}")
        return self.observations[path]

    def recipe(self, recipe: RecipeLike) -> Recipe:
        """A recipe with static activation ranges in place of dynamic ones.

        Each observed parameter whose policy quantizes activations gets its own rule before the others, with the calibration
        `fixed,low,high`; the rest of its policy is unchanged. Stacked layers are one parameter with one policy, so it has
        the widest of their ranges. Of a product without a parameter the right operand's range is static, too.

        Args:
            recipe: a Recipe, or anything that `fb.recipe` takes; that of `fb.observe`, or another one.

        Returns:
            The recipe, for `fb.plan`, `fb.quantize_params` and `fb.train`, and for JSON.

        Raises:
            QuantError: for per-channel, empty, or non-finite ranges; it names the parameter.
        """
        plain = as_recipe(recipe)
        used = [(path, ops, role) for (path, ops), role in zip(self.ops, self.roles, strict=True)]
        own = [rule for one in used if (rule := self._static(*one, plain)) is not None]
        products = [rule for name, op in self.product_ops if (rule := self._static_product(name, op, plain)) is not None]
        rules, product_rules = (
            tuple(dataclasses.replace(rule, optional=True) for rule in some) for some in (plain.rules, plain.products)
        )
        return dataclasses.replace(plain, rules=(*own, *rules), products=(*products, *product_rules))

    def _static(self, path: str, ops: tuple[str, ...], role: Role, recipe: Recipe) -> Rule | None:
        """The rule of one parameter; None where its activations stay float."""
        rule = next((rule for rule in recipe.rules if rule.matches(path, ops, role)), None)
        if rule is None or rule.policy is None or rule.policy.activation is None or rule.policy.delayed is not None:
            return None
        activation = dataclasses.replace(rule.policy.activation, calibration=_fixed(path, self.observations[path].range))
        policy: Policy = dataclasses.replace(rule.policy, activation=activation)
        return dataclasses.replace(rule, path=re.escape(path), policy=policy, optional=False)

    def _static_product(self, name: str, op: str, recipe: Recipe) -> Rule | None:
        """The rule of one product without a parameter. None where it is not quantized."""
        rule = next((rule for rule in recipe.products if rule.matches(name, (op,))), None)
        if rule is None or rule.policy is None or rule.policy.delayed is not None:
            return None
        policy, seen = rule.policy, self.products[name]
        weight = dataclasses.replace(policy.weight, calibration=_fixed(f"product {name}, right operand", seen.right))
        activation = policy.activation
        if activation is not None:
            activation = dataclasses.replace(activation, calibration=_fixed(f"product {name}, left operand", seen.left))
        static = dataclasses.replace(policy, weight=weight, activation=activation)
        return dataclasses.replace(rule, path=re.escape(name), policy=static, optional=False)


def _fixed(what: str, state: RangeState | None) -> Fixed:
    """The calibration with the observed range."""
    if state is None:
        raise QuantError(f"{what}: no range was collected; observe with collect=('range',)")
    if state.rule.axes:
        raise QuantError(
            f"{what}: a recipe takes per-tensor ranges, and these have axes {state.rule.axes}; observe without axes, or "
            "pass "
            "their scales to fb.quantize"
        )
    low, high = float(np.min(state.low)), float(np.max(state.high))
    if not np.isfinite([low, high]).all():
        raise QuantError(f"{what}: its activations have a NaN or an infinity; check the batches")
    if low == high == 0:
        raise QuantError(f"{what}: its activations were all zero; observe other batches, or leave it out of the recipe")
    return Fixed(min(low, 0.0), max(high, 0.0))

"""Statistics by parameter, and the recipe with static ranges that they give."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._registry import near_names
from ..array.scales import Fixed
from ..errors import QuantError
from ..ops import Policy
from ..recipe import Recipe, Role, Rule
from ..recipe import recipe as as_recipe
from .measure import Observation, ProductObservation
from .ranges import RangeState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """What the parameters of a model met over calibration batches. A pytree, to checkpoint as such.

    Attributes:
        observations: by the parameter's path.
        ops: what uses each parameter, by its path, as rules ask for it. Static.
        roles: the role of each of these parameters, in the same order. Static.
        products: the ranges of the operands of products without a parameter, by the product's name.
        product_ops: what each of these products is, by its name. Static.
    """

    observations: Mapping[str, Observation]
    ops: tuple[tuple[str, tuple[str, ...]], ...] = dataclasses.field(metadata={"static": True})
    roles: tuple[Role, ...] = dataclasses.field(metadata={"static": True})
    products: Mapping[str, ProductObservation] = dataclasses.field(default_factory=dict)
    product_ops: tuple[tuple[str, str], ...] = dataclasses.field(default=(), metadata={"static": True})

    def __getitem__(self, path: str) -> Observation:
        if path not in self.observations:
            raise QuantError(f"nothing was observed of {path!r}; {near_names(path, tuple(self.observations))}")
        return self.observations[path]

    def recipe(self, recipe: Any) -> Recipe:
        """A recipe with the activations' ranges that were observed: static, in the place of those of the arrays at hand.

        Each parameter that was observed, and whose policy quantizes activations, gets a rule of its own before the others, with
        the calibration `fixed,low,high`; nothing else of its policy changes. Layers that a loop stacks are one parameter with
        one policy, so their ranges join to the widest. Of a product without a parameter the right operand's range is static, too.

        Args:
            recipe: a Recipe, or anything that `fb.recipe` takes; that of `fb.observe`, or another one.

        Returns:
            The recipe, for `fb.plan`, `fb.quantize_params` and `fb.train`, and for JSON.

        Raises:
            QuantError: for ranges that are kept for each channel, empty, or not finite: the parameter, and what to do.
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
        """The rule of one parameter; None where its activations are not quantized."""
        rule = next((rule for rule in recipe.rules if rule.matches(path, ops, role)), None)
        if rule is None or rule.policy is None or rule.policy.activation is None or rule.policy.delayed is not None:
            return None
        activation = dataclasses.replace(rule.policy.activation, calibration=_fixed(path, self.observations[path].range))
        policy: Policy = dataclasses.replace(rule.policy, activation=activation)
        return dataclasses.replace(rule, path=re.escape(path), policy=policy, optional=False)

    def _static_product(self, name: str, op: str, recipe: Recipe) -> Rule | None:
        """The rule of one product without a parameter; None where it is not quantized."""
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
    """The calibration of the range that was observed."""
    if state is None:
        raise QuantError(f"{what}: no range was collected; observe with collect=('range',)")
    if state.rule.axes:
        raise QuantError(
            f"{what}: a recipe holds one range for a tensor, and these are kept on axes {state.rule.axes}; observe without "
            "axes, or give their scales to fb.quantize"
        )
    low, high = float(np.min(state.low)), float(np.max(state.high))
    if not np.isfinite([low, high]).all():
        raise QuantError(f"{what}: its activations held a NaN or an infinity")
    if low == high == 0:
        raise QuantError(f"{what}: its activations were all zero; observe other batches, or leave it out of the recipe")
    return Fixed(min(low, 0.0), max(high, 0.0))

"""Delayed scaling of a whole model: the histories of its products, as a pytree beside the parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from ..array import Scheme
from ..errors import QuantError
from ..ops.delayed import DelayedScaling
from ..ops.policy import Policy
from ..ops.stepped import StepScales
from ..recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from ..recipe.rule import OPS
from .delayed import DelayedScale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProductScales:
    """The histories of one parameter's products: of itself, of what it meets, and of the gradient that comes in.

    Of a product without a parameter those of its right operand, of its left one, and of the gradient.

    Attributes:
        weight: of the parameter.
        activation: of the other operand; None where the policy leaves it as it is.
        gradient: of the incoming gradient; None where no arm quantizes it.
    """

    weight: DelayedScale
    activation: DelayedScale | None
    gradient: DelayedScale | None

    @classmethod
    def init(cls, policy: Policy, stack: tuple[int, ...] = ()) -> Self:
        """The state before the first step.

        Args:
            policy: the policy, with delayed scaling.
            stack: the lengths of leading axes of which each element has a state of its own.

        Returns:
            Empty histories, and scales of 1.
        """
        assert policy.delayed is not None

        def empty(scheme: Scheme | None, wish: DelayedScaling = policy.delayed) -> DelayedScale | None:
            if scheme is None:
                return None
            one = DelayedScale.init(scheme.format, length=wish.length, margin=wish.margin)
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), one)

        weight = empty(policy.weight)
        assert weight is not None
        return cls(weight, empty(policy.activation), empty(policy.gradient))

    @property
    def scales(self) -> StepScales:
        """The scales of this step."""
        held = (self.weight, self.activation, self.gradient)
        return StepScales(*(None if state is None else state.scale for state in held))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """The state of delayed scaling: for each parameter, by its path, the histories of its products; a plain pytree.

    It goes into a function of `fb.train` as `delayed=`, and what the step saw comes out as the cotangent: a DelayedState whose
    scales are the largest magnitudes of the step and whose histories are zero. It goes around the optimizer.

    Attributes:
        products: the histories by the parameter's path.
        weightless: those of products without a parameter, by the product's name.
    """

    products: Mapping[str, ProductScales]
    weightless: Mapping[str, ProductScales] = dataclasses.field(default_factory=dict)

    def advance(self, seen: "DelayedState") -> Self:
        """The state after a step: its largest magnitudes enter the histories, and give the next scales.

        Args:
            seen: the gradient of the loss with respect to this state, or several of them `merge`d.

        Returns:
            The state of the next step.
        """
        is_history = {"is_leaf": lambda x: isinstance(x, DelayedScale)}
        return jax.tree.map(lambda state, told: state.advance(told.scale), self, seen, **is_history)

    def merge(self, other: "DelayedState") -> Self:
        """What a step saw that was computed in parts, such as micro-batches: the larger of each two magnitudes.

        Gradients of the parameters are added up; those of this state never are.

        Args:
            other: the gradient with respect to the state of another part of the step.

        Returns:
            The gradient of both.
        """
        return jax.tree.map(jnp.maximum, self, other)


def delayed_state(fn: Callable[..., Any], params: Any, *inputs: Any, recipe: Any, **kwargs: Any) -> DelayedState:
    """The state of delayed scaling before the first step of a model under a recipe.

    A parameter whose policy asks for delayed scaling has one history for itself, one for the activations that it meets, and
    one for the gradients that come in. One that a loop takes apart (layers in a `scan`) has them for each element of the
    loop's axis, where that is the parameter's first axis; layers that are stacked along another share them. Where several
    products use a parameter, or one in a loop takes it whole, they share its histories, and the largest magnitude of all
    counts. A product without a parameter, such as attention's scores, has histories of its own, which the turns of a loop
    around it share.

    Args:
        fn: the function that `fb.train` is given. It is traced with shapes only.
        params: its first argument, the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        inputs: example inputs, likewise.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: keyword arguments of `fn`.

    Returns:
        The state: empty histories, and scales of 1. It is empty where no policy asks for delayed scaling.

    Raises:
        QuantError: when a rule that is not optional matches nothing, and for a parameter that `fb.plan` refuses.

    >>> params, x = {"w": jnp.eye(4)}, jnp.full((2, 4), 7.0)
    >>> def loss(params, delayed):
    ...     return jnp.sum(fb.train(lambda params, x: x @ params["w"], "te_fp8_delayedscaling")(params, x, delayed=delayed))
    >>> delayed = delayed_state(lambda params, x: x @ params["w"], params, x, recipe="te_fp8_delayedscaling")
    >>> gradient, seen = jax.grad(loss, argnums=(0, 1))(params, delayed)
    >>> float(seen.products["w"].activation.scale)
    7.0
    >>> float(delayed.advance(seen).products["w"].activation.scale)  # 7 / 448
    0.015625
    """
    found = Resolution.of(as_recipe(recipe), fn, params, *inputs, **kwargs)
    policies, weightless = found.policies, found.product_policies

    def stack(path: str) -> tuple[int, ...]:
        """The leading axes that some loop takes apart."""
        shape, uses = found.parameters[path].shape.shape, found.parameters[path].uses
        taken = {axis for use in uses if use.op in OPS for axis in use.stacked}
        depth = next((i for i in range(len(shape)) if i - len(shape) not in taken), len(shape))
        return shape[:depth]

    return DelayedState(
        {path: ProductScales.init(policy, stack(path)) for path, policy in _wishing(policies).items()},
        {name: ProductScales.init(policy) for name, policy in _wishing(weightless).items()},
    )


def _wishing(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policies that ask for delayed scaling."""
    return {name: policy for name, policy in policies.items() if policy.delayed is not None}


def step_scales(
    state: DelayedState | None, policies: Mapping[str, Policy], weightless: Mapping[str, Policy]
) -> tuple[dict[str, StepScales], dict[str, StepScales]]:
    """The scales of this step by parameter, and by product without one.

    Args:
        state: the state; None where the caller has none.
        policies: the policies of the parameters that are trained.
        weightless: the policies of products without a parameter.

    Returns:
        The scales of the parameters, and of the products, whose policies ask for delayed scaling.

    Raises:
        QuantError: when the state is for others than those.
    """
    held = DelayedState({}) if state is None else state
    need = _labels(_wishing(policies), _wishing(weightless))
    have = _labels(held.products, held.weightless)
    if need != have:
        told = "there is no delayed=" if state is None else f"delayed= has them for {sorted(have)[:5]}"
        raise QuantError(
            f"delayed scaling takes the scales of {sorted(need)[:5]} from earlier steps, and {told}; begin with "
            "delayed_state, from where train comes (fb, frameworks.nnx or frameworks.linen), of the same function, parameters and "
            "recipe, and pass it as delayed="
        )
    by_path, by_name = ({key: scales.scales for key, scales in some.items()} for some in (held.products, held.weightless))
    return by_path, by_name


def _labels(paths: Mapping[str, Any], names: Mapping[str, Any]) -> set[str]:
    """What parameters and products without one are called together."""
    return {*paths, *(f"product {name}" for name in names)}

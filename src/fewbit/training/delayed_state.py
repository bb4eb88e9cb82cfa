"""Delayed scaling of a model: a pytree of amax histories."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..array.scheme import Scheme
from ..errors import QuantError
from ..ops.policy import Policy
from ..ops.qat.delayed_scales import StepScales
from ..recipe.recipe import RecipeLike
from ..recipe.recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from ..recipe.rule import OPS
from .delayed import DelayedScale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ProductScales:
    """The amax histories of one parameter's products: weight, activation, gradient.

    Of a product without a parameter they are those of its right operand, its left operand, and the gradient.

    Attributes:
        weight: of the parameter.
        activation: of the other operand; None where the policy does not quantize it.
        gradient: of the incoming gradient; None where neither dgrad nor wgrad quantizes it.
    """

    weight: DelayedScale
    activation: DelayedScale | None
    gradient: DelayedScale | None

    @classmethod
    def init(cls, policy: Policy, stack: tuple[int, ...] = ()) -> Self:
        """The state before the first step: empty histories, and scales of 1.

        Args:
            policy: the policy, with delayed scaling.
            stack: the lengths of leading axes of which each element has a state of its own.
        """
        config = policy.delayed
        assert config is not None

        def empty(scheme: Scheme | None) -> DelayedScale | None:
            if scheme is None:
                return None
            one = DelayedScale.init(scheme.format, length=config.length, margin=config.margin)
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), one)

        weight = empty(policy.weight)
        assert weight is not None
        return cls(weight, empty(policy.activation), empty(policy.gradient))

    @property
    def scales(self) -> StepScales:
        """The scales of this step."""
        states = (self.weight, self.activation, self.gradient)
        return StepScales(*(state and state.scale for state in states))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedState:
    """The state of delayed scaling: the amax histories by parameter path; a pytree.

    A function of `fb.train` takes it as `delayed=`, and returns the amax of the step as its cotangent: a DelayedState whose
    scales are these amax and whose histories are zero. Do not pass it to the optimizer.

    Attributes:
        products: the histories by the parameter's path.
        weightless: those of products without a parameter, by the product's name.
    """

    products: Mapping[str, ProductScales]
    weightless: Mapping[str, ProductScales] = dataclasses.field(default_factory=dict)

    def advance(self, seen: "DelayedState") -> Self:
        """The state after a step. Its amax enter the histories, from which the next scales follow.

        Args:
            seen: the gradient of the loss with respect to this state, or several of them `merge`d.
        """
        is_history = {"is_leaf": lambda x: isinstance(x, DelayedScale)}
        return jax.tree.map(lambda state, amax: state.advance(amax.scale), self, seen, **is_history)

    def merge(self, other: "DelayedState") -> Self:
        """Merges the gradients of a step computed in parts, such as micro-batches, by maximum.

        Gradients of the parameters are summed; those of this state never are.

        Args:
            other: the gradient with respect to the state of another part of the step.
        """
        return jax.tree.map(jnp.maximum, self, other)


def delayed_state(
    fn: Callable[..., Any], params: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> DelayedState:
    """The state of delayed scaling before the first step.

    A parameter with delayed scaling has one history for itself, one for the activations of its products, and one for their
    incoming gradients. Layers stacked for a `scan` along the parameter's first axis have them each; those stacked along
    another axis share them. Where several products use a parameter, or a loop uses all of it in each iteration, they share
    its histories, with the maximum of their amax. A product without a parameter, such as attention's, has histories of its
    own, shared by the iterations of a loop around it.

    Args:
        fn: the function that `fb.train` is given. It is traced with shapes only.
        params: its first argument, the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        inputs: example inputs, arrays or shapes.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: keyword arguments of `fn`.

    Returns:
        The state: empty histories, and scales of 1. It is empty where no policy has delayed scaling.

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
        """The lengths of the leading axes that some loop runs over."""
        shape, uses = found.parameters[path].shape.shape, found.parameters[path].uses
        taken = {axis for use in uses if use.op in OPS for axis in use.stacked}
        depth = next((i for i in range(len(shape)) if i - len(shape) not in taken), len(shape))
        return shape[:depth]

    return DelayedState(
        {path: ProductScales.init(policy, stack(path)) for path, policy in _delayed(policies).items()},
        {name: ProductScales.init(policy) for name, policy in _delayed(weightless).items()},
    )


def _delayed(policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policies with delayed scaling."""
    return {name: policy for name, policy in policies.items() if policy.delayed is not None}


def step_scales(state: DelayedState | None, found: Resolution) -> tuple[dict[str, StepScales], dict[str, StepScales]]:
    """The delayed scales of this step, by parameter and by product without one.

    Args:
        state: the state; None where the caller has none.
        found: the recipe resolved against the function that is trained.

    Raises:
        QuantError: when the state is for other parameters or products.
    """
    given = state or DelayedState({})
    need = _labels(_delayed(found.policies), _delayed(found.product_policies))
    have = _labels(given.products, given.weightless)
    if need != have:
        what = "there is no delayed=" if state is None else f"delayed= has them for {sorted(have)[:5]}"
        raise QuantError(
            f"delayed scaling takes the scales of {sorted(need)[:5]} from earlier steps, and {what}; start with delayed_state "
            "of the same function, parameters and recipe, imported from where train is (fb, frameworks.nnx or "
            "frameworks.linen), and pass it as delayed="
        )
    for path, scales in given.products.items():
        stack, shape = scales.weight.scale.shape, found.parameters[path].shape.shape
        if stack != shape[: len(stack)]:
            raise QuantError(
                f"delayed= is of another model: it has scales of shape {stack} for {path}, whose shape is {shape}; start with "
                "delayed_state of the same parameters"
            )
    by_path, by_name = ({key: scales.scales for key, scales in some.items()} for some in (given.products, given.weightless))
    return by_path, by_name


def _labels(paths: Iterable[str], names: Iterable[str]) -> set[str]:
    """The paths of parameters and the labelled names of products without one."""
    return {*paths, *(f"product {name}" for name in names)}

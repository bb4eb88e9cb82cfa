"""N:M sparsity of a model: a pytree of masks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from ..errors import QuantError
from ..ops.interpret.parameter_uses import array_paths, parameter_paths, with_leaves
from ..recipe.recipe import RecipeLike
from ..recipe.recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from ..recipe.sparsity import Sparsity, SparsityState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelSparsity:
    """The masks of a model's sparse parameters, by path. A pytree.

    Do not pass it to the optimizer. A step starts with `update`, computes with a function of `fb.train` that takes the state
    as `sparsity=`, and returns the state; `apply` gives the masked parameters, for inference.

    Attributes:
        masks: by the parameter's path, True where a weight is kept.
        step: the number of updates, int32.
        rules: by the parameter's path its sparsity, with the axes of its groups. Static.

    Raises:
        QuantError: in every method, when the parameters are others than the state's.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    masks: Mapping[str, Any]
    step: Any
    rules: tuple[tuple[str, Sparsity], ...] = dataclasses.field(metadata={"static": True})

    def update(self, params: PyTree, step: Int[ArrayLike, ""] | None = None) -> Self:
        """The state with the masks for one step, renewed on the schedule of each sparsity.

        Args:
            params: the parameters, dense. They are not differentiated.
            step: the number of this step; None counts the updates from 0.

        Returns:
            The state for this step.
        """
        leaves = self._leaves(params)
        now = self.step if step is None else jnp.asarray(step, jnp.int32)
        renewed = {path: rule.update(self._state(path), leaves[path], now).mask for path, rule in self.rules}
        return dataclasses.replace(self, masks=renewed, step=now + 1)

    def apply(self, params: PyTree) -> PyTree:
        """The parameters, exact zeros where masks prune; gradients are as each sparsity says.

        Args:
            params: the parameters.

        Returns:
            A tree of the same structure.
        """
        self._leaves(params)
        leaves = parameter_paths(params)
        masked = {path: rule.apply(jnp.asarray(leaves[path]), self._state(path)) for path, rule in self.rules}
        return with_leaves(params, masked)

    def penalty(self, params: PyTree) -> Float[Array, ""]:
        """Half the sum of squares of all pruned weights, float32: `Sparsity.penalty`.

        Args:
            params: the parameters.
        """
        leaves = self._leaves(params)
        return sum((rule.penalty(leaves[path], self._state(path)) for path, rule in self.rules), jnp.float32(0))

    def _state(self, path: str) -> SparsityState:
        return SparsityState(self.masks[path], self.step)

    def _leaves(self, params: PyTree) -> dict[str, Any]:
        """The arrays of the tree by path, after a check that the masks fit them."""
        leaves = array_paths(params)
        for path, mask in self.masks.items():
            what = f"the sparsity is of another model: it has a mask of shape {mask.shape} for {path}"
            if path not in leaves:
                raise QuantError(f"{what}, which is not among the parameters {sorted(leaves)[:5]}")
            if leaves[path].shape != mask.shape:
                raise QuantError(f"{what}, whose shape is {tuple(leaves[path].shape)}")
        return leaves


def sparsity_state(
    fn: Callable[..., Any], params: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> ModelSparsity:
    """The sparsity of a model before the first step: everything is kept.

    Args:
        fn: the function that `fb.train` is given; its products determine the contracted axes. It is traced with shapes only.
        params: its first argument, the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        inputs: example inputs, arrays or shapes.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: keyword arguments of `fn`.

    Returns:
        The state; without masks where no rule has a sparsity.

    Raises:
        QuantError: when a rule that is not optional matches nothing, and for groups that do not fit a parameter.

    >>> params, x = {"w": jnp.array([[1.0, 2.0], [-3.0, 0.5]])}, jnp.ones((1, 2))
    >>> recipe = fb.Recipe((fb.Rule("w", "int8", sparsity=fb.Sparsity(1, 2)),))
    >>> state = sparsity_state(lambda params, x: x @ params["w"], params, x, recipe=recipe)
    >>> state.update(params).apply(params)["w"].tolist()
    [[0.0, 2.0], [-3.0, 0.0]]
    """
    rules = Resolution.of(as_recipe(recipe), fn, params, *inputs, **kwargs).sparsities
    leaves = array_paths(params)
    masks = {path: jnp.ones_like(leaves[path], jnp.bool_) for path in rules}  # sharded as they are
    return ModelSparsity(masks, jnp.zeros((), jnp.int32), tuple(rules.items()))


def masked(params: PyTree, state: ModelSparsity | None, rules: Mapping[str, Sparsity]) -> PyTree:
    """The parameters that a step computes with: pruned where the masks say.

    Args:
        params: the parameters.
        state: the state; None where the caller has none.
        rules: the sparsities of the recipe.

    Raises:
        QuantError: when the state is not one of those sparsities.
    """
    own = dict((state or ModelSparsity({}, 0, ())).rules)
    if dict(rules) != own:
        asked, given = ({f"{path} {rule.to_json()}" for path, rule in some.items()} for some in (rules, own))
        what = "there is no sparsity=" if state is None else f"sparsity= has {sorted(given - asked)[:5]} instead"
        raise QuantError(
            f"the recipe makes parameters sparse, {sorted(asked - given)[:5]}, and {what}; start with sparsity_state of the "
            "same function, parameters and recipe, imported from where train is (fb, frameworks.nnx or frameworks.linen), "
            "update it in each step, and pass it as sparsity="
        )
    return params if state is None else state.apply(params)

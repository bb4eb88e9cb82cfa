"""N:M sparsity of a whole model: the masks of its parameters, as a pytree beside them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from ..array import is_qarray
from ..errors import QuantError
from ..ops.uses import array_paths, parameter_paths
from ..recipe import Sparsity, SparsityState
from ..recipe import recipe as as_recipe
from ..recipe.resolution import Resolution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelSparsity:
    """The sparsity of a model: for each sparse parameter, by its path, the mask in force. A plain pytree.

    It goes around the optimizer. A step begins with `update`, computes with a function of `fb.train` that takes the state as
    `sparsity=`, and hands the state on; `apply` gives the parameters as they were computed with, to serve them.

    Attributes:
        masks: by the parameter's path, True where a weight is kept.
        step: how many updates there were, int32.
        rules: by the parameter's path its sparsity, with the axes that its groups run along. Static.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    masks: Mapping[str, Any]
    step: Any
    rules: tuple[tuple[str, Sparsity], ...] = dataclasses.field(metadata={"static": True})

    def update(self, params: Any, step: Int[ArrayLike, ""] | None = None) -> Self:
        """The state with the masks for one step; each is made anew when its sparsity's schedule says so.

        Args:
            params: the parameters, dense. They are not differentiated.
            step: the number of this step; None counts the updates from 0.

        Returns:
            The state for this step.

        Raises:
            QuantError: when the parameters are others than the state's.
        """
        leaves = self._leaves(params)
        now = self.step if step is None else jnp.asarray(step, jnp.int32)
        renewed = {path: rule.update(self._state(path), leaves[path], now).mask for path, rule in self.rules}
        return dataclasses.replace(self, masks=renewed, step=now + 1)

    def apply(self, params: Any) -> Any:
        """The parameters with exact zeros where the masks prune them; gradients are as each sparsity says.

        Args:
            params: the parameters.

        Returns:
            A tree of the same structure.

        Raises:
            QuantError: when the parameters are others than the state's.
        """
        self._leaves(params)
        rules = dict(self.rules)

        def applied(path: str, x: Any) -> Any:
            return rules[path].apply(jnp.asarray(x), self._state(path)) if path in rules else x

        treedef = jax.tree.structure(params, is_leaf=is_qarray)
        return jax.tree.unflatten(treedef, [applied(*leaf) for leaf in parameter_paths(params).items()])

    def penalty(self, params: Any) -> Float[Array, ""]:
        """Half the sum of the squares of all pruned weights, float32: `Sparsity.penalty`, the decay of SR-STE.

        Args:
            params: the parameters.

        Returns:
            A float32 number.

        Raises:
            QuantError: when the parameters are others than the state's.
        """
        leaves = self._leaves(params)
        return sum((rule.penalty(leaves[path], self._state(path)) for path, rule in self.rules), jnp.float32(0))

    def _state(self, path: str) -> SparsityState:
        return SparsityState(self.masks[path], self.step)

    def _leaves(self, params: Any) -> dict[str, Any]:
        """The arrays of the tree by their paths, after a check that the masks fit them."""
        leaves = array_paths(params)
        for path, mask in self.masks.items():
            if path not in leaves or leaves[path].shape != mask.shape:
                got = f"{tuple(leaves[path].shape)}" if path in leaves else f"none among {sorted(leaves)[:5]}"
                raise QuantError(
                    f"the sparsity is of another model: its mask of {path} has {mask.shape}, the parameter {got}"
                )
        return leaves


def sparsity_state(fn: Callable[..., Any], params: Any, *inputs: Any, recipe: Any, **kwargs: Any) -> ModelSparsity:
    """The sparsity of a model under a recipe before the first step: everything is kept.

    Args:
        fn: the function that `fb.train` is given; its products say which axes are contracted. It is traced with shapes only.
        params: its first argument, the tree of parameters; arrays or `jax.ShapeDtypeStruct`s.
        inputs: example inputs, likewise.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: keyword arguments of `fn`.

    Returns:
        The state; without masks where no rule asks for sparsity.

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


def masked(params: Any, state: ModelSparsity | None, rules: Mapping[str, Sparsity]) -> Any:
    """The parameters as a step computes with them.

    Args:
        params: the parameters.
        state: the state; None where the caller has none.
        rules: the sparsities that the recipe asks for.

    Returns:
        The tree with zeros where the masks prune it.

    Raises:
        QuantError: when the state is not one of those sparsities.
    """
    held = {} if state is None else dict(state.rules)
    if dict(rules) != held:
        asked, given = ({f"{path} {rule.to_json()}" for path, rule in some.items()} for some in (rules, held))
        told = "there is no sparsity=" if state is None else f"sparsity= has {sorted(given - asked)[:5]} in their place"
        raise QuantError(
            f"the recipe makes parameters sparse, {sorted(asked - given)[:5]}, and {told}; begin with "
            "sparsity_state, from where train comes (fb, frameworks.nnx or frameworks.linen), of the same function, "
            "parameters and recipe, update it in each step, and pass it as sparsity="
        )
    return params if state is None else state.apply(params)

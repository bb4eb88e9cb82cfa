"""Quantization-aware and fully quantized training of unchanged code, by a recipe."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..errors import UnsupportedError
from ..ops.latent import Latent
from ..ops.policy import Policy
from ..ops.transparent import Decoded, transparent
from ..ops.uses import parameter_paths, parameter_uses
from ..recipe import Recipe
from ..recipe import recipe as as_recipe
from ..recipe.plan import matched_rules

R = TypeVar("R")


def train(fn: Callable[..., R], recipe: Any, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., R]:
    """Makes a function of float parameters compute its products as a recipe says, forwards and backwards.

    The parameters stay float arrays, in a tree of the same structure, so optimizers, checkpoints and shardings are those of
    the float model; each product of one that a rule matches quantizes it on the way in, and its gradients are computed by the
    policy's arms. What was trained is what is served: `fb.quantize_params` with a plan of the same recipe gives the very
    codes that the forward pass computes with.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules are matched by parameter path and by what uses it.
        report: called while tracing with each place where a parameter that a rule matches is read as the float array it is,
            because its primitive is no product, and with each where a QArray among the arguments is decoded.

    Returns:
        `fn` with one more argument, `key=`: a JAX random key, needed when a policy rounds stochastically or rotates; take
        another one for each step.

    Raises:
        QuantError: when a rule that is not optional matches nothing; in the backward pass when a policy needs a key and there
            is none.
        UnsupportedError: for delayed scaling, and for rules for products without a parameter.

    >>> import fewbit as fb
    >>> params = {"w": jnp.eye(4)}
    >>> def loss(params, x):
    ...     return jnp.sum((x @ params["w"]) ** 2)
    >>> recipe = fb.Recipe((fb.Rule("w", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))
    >>> jax.grad(fb.train(loss, recipe))(params, jnp.ones((2, 4)))["w"].shape
    (4, 4)
    """
    resolved = as_recipe(recipe)
    _refuse_unsupported(resolved)
    run = transparent(fn, fallback="dequantize", report=report)

    def trained(params: Any, *args: Any, key: Key[Array, ""] | None = None, **kwargs: Any) -> R:
        uses, _ = parameter_uses(lambda params, *args: fn(params, *args, **kwargs), params, *args)
        return run(_latents(params, resolved, uses, key), *args, **kwargs)

    trained.__name__ = getattr(fn, "__name__", "trained")
    trained.__doc__ = fn.__doc__
    return trained


def _refuse_unsupported(recipe: Recipe) -> None:
    """Refuses what needs more than the parameters: state from step to step, and policies of products without a weight."""
    delayed = [str(rule) for rule in recipe.rules if rule.policy is not None and rule.policy.delayed is not None]
    if delayed:
        reason = "its scales come from earlier steps; fb.training.DelayedScale holds such state for steps written by hand"
        raise UnsupportedError(f"fb.train cannot follow recipe {recipe.name!r}", dict.fromkeys(delayed, reason))
    if recipe.products:
        reason = "it is for a product without a parameter; call fb.dot_general or fb.einsum with policy= there"
        raise UnsupportedError(f"fb.train cannot follow recipe {recipe.name!r}", {str(r): reason for r in recipe.products})


def _latents(params: Any, recipe: Recipe, uses: Any, key: Any) -> Any:
    """The tree with a Latent in the place of each parameter that a rule gives a policy."""
    rules = matched_rules(recipe, uses)
    policies = {path: None if rule is None else rule.policy for path, rule in rules.items()}
    drawing = [path for path, policy in policies.items() if policy is not None and policy.needs_key]
    keys = dict(zip(drawing, jax.random.split(key, len(drawing)), strict=True)) if drawing and key is not None else {}

    def latent(path: str, x: Any, policy: Policy | None) -> Any:
        if policy is None or not jnp.issubdtype(jnp.result_type(x), jnp.floating) or jnp.ndim(x) < 2:
            return x
        return Latent(x, keys.get(path), policy)

    leaves = parameter_paths(params)
    treedef = jax.tree.structure(params)
    return jax.tree.unflatten(treedef, [latent(path, x, policies.get(path)) for path, x in leaves.items()])

"""Quantization-aware and fully quantized training of unchanged code, by a recipe."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ..array import is_qarray
from ..ops.latent import Latent
from ..ops.stepped import StepScales
from ..ops.transparent import Decoded, evaluated
from ..ops.uses import parameter_paths
from ..recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from .delayed_state import DelayedState, step_scales
from .model_sparsity import ModelSparsity, masked
from .products import chosen_products

R = TypeVar("R")


def train(fn: Callable[..., R], recipe: Any, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., R]:
    """Makes a function of float parameters compute its products as a recipe says, forwards and backwards.

    The parameters stay float arrays, in a tree of the same structure, so optimizers, checkpoints and shardings are those of
    the float model; each product of one that a rule matches quantizes it on the way in, and its gradients are computed by the
    policy's arms. What was trained is what is served: `fb.quantize_params` with a plan of the same recipe gives the very
    codes that the forward pass computes with, also where the code casts, reshapes or slices a parameter before its product:
    a parameter that every use casts to bfloat16 first is quantized after the cast, here and by the plan.

    The recipe's rules for products quantize both operands of products without a parameter, such as attention's, the right one
    as the policy's `weight`; their gradients follow the arms likewise.

    Parameters that the recipe makes sparse are masked before anything else sees them, with gradients as their sparsity says.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters. Those of them that are QArrays stay
            what they are: `fb.train` serves them, too, with the policies of products without a parameter.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules are matched by parameter path and by what uses it.
        report: called while tracing with each place where a parameter that a rule matches is read as the float array it is,
            because its primitive is no product, and with each where a QArray among the arguments is decoded.

    Returns:
        `fn` with three more arguments. `key=`: a JAX random key, needed when a policy rounds stochastically or rotates; take
        another one for each step. `delayed=`: the state of `fb.delayed_state`, needed when a policy asks for delayed scaling;
        its gradient is what the step saw, for `delayed.advance`. `sparsity=`: the state of `fb.sparsity_state`, updated for this
        step, needed when a rule asks for sparsity.

    Raises:
        QuantError: when a rule that is not optional matches nothing; for a parameter that `fb.plan` refuses, because its uses
            want tiles along different axes and its rule names none; when a policy asks for delayed scaling, or a rule for
            sparsity, and `delayed` or `sparsity` is missing or for other parameters; in the backward pass when a policy needs a
            key and there is none.
        UnsupportedError: for a product without a parameter that has a policy, or a parameter with delayed scaling, inside a
            function with a derivative rule of its own.

    >>> import fewbit as fb
    >>> params = {"w": jnp.eye(4)}
    >>> def loss(params, x):
    ...     return jnp.sum((x @ params["w"]) ** 2)
    >>> recipe = fb.Recipe((fb.Rule("w", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))
    >>> jax.grad(fb.train(loss, recipe))(params, jnp.ones((2, 4)))["w"].shape
    (4, 4)
    """
    resolved = as_recipe(recipe)
    kept = evaluated(fn, "dequantize", report, None)

    def trained(
        params: Any,
        *args: Any,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: Any,
    ) -> R:
        found = Resolution.of(resolved, fn, params, *args, **kwargs)
        scales, product_scales = step_scales(delayed, found.policies, found.product_policies)
        params = masked(params, sparsity, found.sparsities)
        chosen = chosen_products(found.product_policies, key, product_scales)
        run = kept if chosen is None else evaluated(fn, "dequantize", report, chosen)
        return run(_latents(params, found, key, scales), *args, **kwargs)

    trained.__name__ = getattr(fn, "__name__", "trained")
    trained.__doc__ = fn.__doc__
    return trained


def _latents(params: Any, found: Resolution, key: Any, scales: Mapping[str, StepScales]) -> Any:
    """The tree with a Latent in the place of each parameter that has a policy."""
    policies = found.policies
    drawing = [path for path, policy in policies.items() if policy.needs_key]
    keys = dict(zip(drawing, jax.random.split(key, len(drawing)), strict=True)) if drawing and key is not None else {}

    def latent(path: str, x: Any) -> Any:
        if path not in policies:
            return x
        served = found.parameters[path].served
        return Latent(jnp.asarray(x), keys.get(path), policies[path], scales.get(path), None, served)

    treedef = jax.tree.structure(params, is_leaf=is_qarray)
    return jax.tree.unflatten(treedef, [latent(*leaf) for leaf in parameter_paths(params).items()])

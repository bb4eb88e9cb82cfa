"""Quantization-aware and fully quantized training of unchanged code."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from .._wrapping import copy_signature, refuse_shared_keywords, signature_of
from ..array import scheme
from ..array.scheme import Scheme
from ..ops.interpret.parameter_uses import parameter_paths, with_leaves
from ..ops.interpret.traced import Traced, array_leaves
from ..ops.interpret.transparent import Decoded, evaluate, evaluator
from ..ops.policy import SchemeSpec
from ..ops.qat.delayed_scales import StepScales
from ..ops.qat.latent import Label, Latent
from ..ops.resolve_policy import refuse_unless_key
from ..recipe.recipe import RecipeLike
from ..recipe.recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from .delayed_state import DelayedState, step_scales
from .model_sparsity import ModelSparsity, masked

R = TypeVar("R")
_KEYWORDS = ("key", "delayed", "sparsity")


def train(
    fn: Callable[..., R],
    recipe: RecipeLike,
    *,
    report: Callable[[Decoded], None] | None = None,
    reduction: SchemeSpec | None = None,
) -> Callable[..., R]:
    """Trains a function of float parameters under a recipe, forward and backward.

    The parameters stay float arrays in a tree of the same structure, so optimizers, checkpoints and shardings are those of
    the float model. Products quantize the parameters that a rule matches, and the policy computes dgrad and wgrad.
    `fb.quantize_params` with a plan of the same recipe gives the same codes as the forward pass, also where the code casts,
    reshapes or slices a parameter before its product: a parameter that every use casts to bfloat16 first is quantized after
    the cast, here and by the plan.

    The recipe's rules for products quantize both operands of products without a parameter, such as attention's, the right
    one as the policy's `weight`, and their gradients.

    Sparse parameters are masked first, with gradients as their sparsity says.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters. QArrays among them are computed
            with as by `fb.transparent`, with the policies of products without a parameter.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules are matched by parameter path and by use.
        report: called while tracing for each use of a matched parameter as a float array, in a primitive that is no product,
            and for each QArray that is decoded.
        reduction: the scheme in which devices exchange the gradient of a matched parameter that the function gathers by
            `jax.lax.all_gather` within `jax.shard_map`, see `fb.ops.psum_scatter`; None: in its own dtype.

    Returns:
        `fn` with three more arguments. `key=`: a JAX random key, required when a policy rounds stochastically or rotates;
        use a new one for each step. `delayed=`: the state of `fb.delayed_state`, required for delayed scaling; its gradient
        has the amax of the step, for `delayed.advance`. `sparsity=`: the state of `fb.sparsity_state`, updated for this
        step, required when a rule has a sparsity. A function with an argument of one of these names gets its own by position.

    Raises:
        QuantError: when a rule that is not optional matches nothing; for a parameter that `fb.plan` refuses, because its
            uses want tiles along different axes and its rule names none; when `delayed` or `sparsity` is required and
            missing or for other parameters; for one of the three if the function takes an argument of that name and does not
            get it by position; in the backward pass when a policy needs a key and there is none.
        UnsupportedError: for a product without a parameter that has a policy, or a parameter with delayed scaling, inside a
            function with its own derivative rule (`custom_jvp`, `custom_vjp`).

    >>> import fewbit as fb
    >>> params = {"w": jnp.eye(4)}
    >>> def loss(params, x):
    ...     return jnp.sum((x @ params["w"]) ** 2)
    >>> recipe = fb.Recipe((fb.Rule("w", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))
    >>> jax.grad(fb.train(loss, recipe))(params, jnp.ones((2, 4)))["w"].shape
    (4, 4)
    """
    resolved, exchanged = as_recipe(recipe), None
    if reduction is not None:
        exchanged = scheme(reduction)
    interpreter, signature = evaluator("dequantize", report), signature_of(fn)

    def trained(
        params: PyTree,
        *args: PyTree,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: object,
    ) -> R:
        passed = {"key": key, "delayed": delayed, "sparsity": sparsity}
        refuse_shared_keywords(signature, (params, *args), passed, "fb.train")
        refuse_unless_key(key)
        traced = Traced.of(fn, (params, *args), kwargs)
        found = Resolution.of_traced(resolved, traced, params)
        scales, product_scales = step_scales(delayed, found)
        if sparsity is not None or found.sparsities:
            params = masked(params, sparsity, found.sparsities)
        labelled = (*found.policies, *found.product_policies)
        chosen, product_key = [], None
        if found.product_policies and key is not None:
            product_key = jax.random.fold_in(key, 1)
        for name, policy in found.product_policies.items():
            latent = Latent(None, product_key, policy, product_scales.get(name), label=Label(name, labelled))
            chosen.append((*found.chosen_products[name], latent))
        latents = _latents(params, found, key, scales, exchanged, labelled)
        result: R = evaluate(interpreter, traced, array_leaves(((latents, *args), kwargs)), chosen)
        return result

    copy_signature(fn, trained, keywords=_KEYWORDS)
    return trained


def _latents(
    params: PyTree,
    found: Resolution,
    key: Key[Array, ""] | None,
    scales: Mapping[str, StepScales],
    reduction: Scheme | None,
    labelled: tuple[str, ...],
) -> PyTree:
    """The tree with a Latent for each parameter that has a policy. `labelled` are the names of all Latents."""
    policies, keys = found.policies, {}
    random = [path for path, policy in policies.items() if policy.needs_key]
    if random and key is not None:
        keys = dict(zip(random, jax.random.split(key, len(random)), strict=True))
    leaves, latents = parameter_paths(params), {}
    for path, policy in policies.items():
        served = found.parameters[path].served
        value, label = jnp.asarray(leaves[path]), Label(path, labelled)
        latents[path] = Latent(value, keys.get(path), policy, scales.get(path), None, served, label, reduction)
    return with_leaves(params, latents)

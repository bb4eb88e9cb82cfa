"""The mixture of experts of a decoder layer.

Experts stored separately are a list of feed-forward blocks, and each one computes every token; `stack_experts` stacks them, so
that a token passes its own experts only. E experts, `k` of them active for a token, F their hidden width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .config import DecoderConfig
from .layer import Params, activated, changed_input, feed_forward, gated, linear, plus_bias, rms_norm, scaled
from .part_configs import Experts

_OVER_INPUTS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,))
"""Rows `[M, in]` in groups, times matrices `[E, out, in]`."""


def dense_and_mixture(
    x: Float[Array, "B T D"], y: Float[Array, "B T D"], layer: Params, config: DecoderConfig, experts: Experts
) -> Float[Array, "B T D"]:
    """The sum of a dense feed-forward block and a mixture of experts (Gemma 4).

    Args:
        x: the residual stream, which the router and the experts read through norms of their own.
        y: the normed stream, which the dense block reads.
        layer: the parameters of the layer, `mlp` the dense block and `moe` the mixture.
        config: the configuration.
        experts: its `experts`.
    """
    mlp, moe = layer["mlp"], layer["moe"]
    dense = rms_norm(feed_forward(y, mlp, config), mlp["out_norm"], config)
    routed = scaled(rms_norm(x, moe["router_norm"], config), config.width**-0.5)
    mixed = mixture(rms_norm(x, moe["norm"], config), moe, config, experts, routed)
    return dense + rms_norm(mixed, moe["out_norm"], config)


def mixture(
    y: Float[Array, "B T D"],
    mlp: Params,
    config: DecoderConfig,
    experts: Experts,
    routed: Float[Array, "B T D"] | None = None,
) -> Float[Array, "B T D"]:
    """The sum of a token's active experts by the router's weights, plus the shared expert.

    The router reads `routed`, or `y` where it is None.
    """
    weights, chosen = _routed(y if routed is None else routed, mlp, experts)
    if "router_scale" in mlp:
        weights = weights * jnp.take(mlp["router_scale"].astype(jnp.float32), chosen, axis=0)
    read = linear(y, mlp["latent_in"]) if experts.latent else y
    if isinstance(mlp["experts"], list):
        total = jnp.zeros(read.shape, jnp.float32)
        for index, expert in enumerate(mlp["experts"]):
            is_chosen = chosen == index
            weight = jnp.sum(jnp.where(is_chosen, weights, 0.0), axis=-1, keepdims=True)
            if experts.scales_input:
                out = feed_forward((weight * read).astype(read.dtype), expert, config).astype(jnp.float32)
            else:
                out = weight * feed_forward(read, expert, config).astype(jnp.float32)
            total = total + jnp.where(jnp.any(is_chosen, axis=-1, keepdims=True), out, 0.0)  # others may be infinite
    else:
        total = _ragged(read, weights, chosen, mlp["experts"], config, experts)
    if experts.latent:
        total = linear(total.astype(y.dtype), mlp["latent_out"], dtype=jnp.float32)
    if "shared" in mlp:
        shared = feed_forward(y, mlp["shared"], config).astype(jnp.float32)
        if experts.shared_gate:
            shared = jax.nn.sigmoid(linear(y, mlp["shared_expert_gate"], dtype=jnp.float32)) * shared
        total = total + shared
    return total.astype(y.dtype)


def _routed(y: Array, mlp: Params, experts: Experts) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """The weights and numbers of each token's active experts."""
    logits = plus_bias(linear(y, mlp["router"], dtype=jnp.float32), mlp, "router")
    if experts.scores != "softmax":
        scores = jax.nn.softmax(logits, axis=-1) if experts.scores == "corrected_softmax" else jax.nn.sigmoid(logits)
        choice, summed = logits, 1  # not the scores, of which several may be 1
        if experts.has_correction:
            choice, summed = scores + mlp["router_correction_bias"].astype(jnp.float32).reshape(1, 1, -1), 2
        _, chosen = lax.top_k(_of_best_groups(choice, experts, summed), experts.active)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.normalized:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + experts.sum_eps)
        return weights * experts.scale, chosen
    largest, chosen = lax.top_k(_of_best_groups(logits, experts, summed=1), experts.active)
    if experts.normalized:
        return jax.nn.softmax(largest, axis=-1) * experts.scale, chosen
    return jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True)) * experts.scale, chosen


def _of_best_groups(scores: Float[Array, "B T E"], experts: Experts, summed: int) -> Float[Array, "B T E"]:
    """The scores, with -inf outside of the active groups.

    Active are those with the largest sum of their `summed` largest scores.
    """
    if experts.active_groups == experts.groups:
        return scores
    grouped = scores.reshape(*scores.shape[:2], experts.groups, -1)  # [B, T, groups, E / groups]
    best, _ = lax.top_k(grouped, summed)
    _, chosen = lax.top_k(jnp.sum(best, axis=-1), experts.active_groups)
    groups = jnp.arange(experts.groups, dtype=chosen.dtype)[None, None, :, None]
    is_active = jnp.any(chosen[:, :, None, :] == groups, axis=-1, keepdims=True)  # [B, T, groups, 1]
    return jnp.where(is_active, grouped, -jnp.inf).reshape(scores.shape)


def _ragged(
    y: Array, weights: Array, chosen: Array, stacks: Params, config: DecoderConfig, experts: Experts
) -> Float[Array, "B T D"]:
    """The weighted sum over stacked experts: tokens are sorted by expert for ragged products."""
    B, T, D = y.shape
    k = experts.active
    flat = chosen.reshape(-1)  # [B T k]
    order = jnp.argsort(flat, stable=True)
    rows = jnp.take(y.reshape(-1, D), order // k, axis=0)  # [B T k, D]
    if experts.scales_input:
        rows = (jnp.take(weights.reshape(-1), order)[:, None] * rows).astype(y.dtype)
        weights = jnp.ones_like(weights)
    sizes = jnp.sum(flat[None, :] == jnp.arange(experts.count, dtype=flat.dtype)[:, None], axis=1, dtype=jnp.int32)
    of_row = flat[order]
    if config.gated:
        hidden = gated(*_gate_and_up(rows, sizes, of_row, stacks, experts), config)
    else:
        hidden = activated(_product(rows, sizes, of_row, stacks, "up", experts), config)
    hidden = changed_input(hidden, stacks, "down", config, of_row)
    out = _product(hidden, sizes, of_row, stacks, "down", experts)
    back = jnp.take(out.astype(jnp.float32), jnp.argsort(order), axis=0).reshape(B, T, k, D)
    return jnp.sum(back * weights[..., None], axis=2)


def _gate_and_up(rows: Array, sizes: Array, of_row: Array, stacks: Params, experts: Experts) -> tuple[Array, Array]:
    """The gate and up projections of the rows, `[M, F]` each."""
    if "gate+up" not in stacks:
        gate = _product(rows, sizes, of_row, stacks, "gate", experts)
        return gate, _product(rows, sizes, of_row, stacks, "up", experts)
    both = _product(rows, sizes, of_row, stacks, "gate+up", experts)
    if experts.layout == "interleaved":
        return both[:, 0::2], both[:, 1::2]
    gate, up = jnp.split(both, 2, axis=-1)
    return gate, up


def _product(
    rows: Float[Array, "M K"], sizes: Array, of_row: Array, stacks: Params, name: str, experts: Experts
) -> Float[Array, "M N"]:
    """Each row times the matrix of its expert, plus the expert's bias."""
    weight: Any = stacks[name].astype(rows.dtype)
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    settings: dict[str, Any] = {"precision": precision, "preferred_element_type": jnp.float32}
    if experts.is_in_out:
        product = lax.ragged_dot(rows, weight, sizes, **settings)
    else:
        product = lax.ragged_dot_general(rows, weight, sizes, _OVER_INPUTS, **settings)
    bias = stacks.get(f"{name}_bias")
    if bias is not None:
        product = product + jnp.take(bias, of_row, axis=0).astype(jnp.float32)
    return product.astype(rows.dtype)

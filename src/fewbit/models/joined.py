"""Fuses weights with a shared input (QKV), and stacks experts."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..array.qarray import QArray, is_qarray
from ..array.scheme import Scheme

Params: TypeAlias = dict[str, Any]

JOINED = {"attn": ("q", "k", "v"), "mlp": ("gate", "up")}
"""The weights of a layer with the same input; fused they are one leaf, `q+k+v` and `gate+up`."""


def fuse_weights(params: Params) -> Params:
    """Concatenates quantized weights with the same input along their outputs, without loss.

    `x [q; k; v]^T = [x q^T, x k^T, x v^T]`: codes, scales and zero points are concatenated unchanged. So a layer has four
    matmuls instead of seven. Weights are left alone if they are not quantized, have different schemes, or share a scale
    between rows.

    Args:
        params: a pytree whose `layers` is a list, as for `forward`.

    Returns:
        The pytree with `layers/0/attn/q+k+v` in place of three leaves and `layers/0/mlp/gate+up` in place of two.
    """
    return {**params, "layers": [_layer_joined(layer) for layer in params["layers"]]}


def stack_experts(params: Params) -> Params:
    """Stacks experts that are stored separately. A token then passes its own experts only.

    Experts are left alone if they are not all alike (scheme, shape, dtype), or quantize activations too.

    Args:
        params: a pytree whose `layers` is a list, as for `forward`.

    Returns:
        The pytree with `layers/0/mlp/experts/gate [E, F, D]` in place of `layers/0/mlp/experts/3/gate [F, D]`.
    """
    return {**params, "layers": [_with_stacked_experts(layer) for layer in params["layers"]]}


def _with_stacked_experts(layer: Params) -> Params:
    experts = layer.get("mlp", {}).get("experts")
    if not isinstance(experts, list) or not _can_stack(experts):
        return layer
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
    return {**layer, "mlp": {**layer["mlp"], "experts": stacked}}


def _can_stack(experts: list[Params]) -> bool:
    """Whether all experts have the same leaves, and QArrays no policy of their own."""
    leaves = [leaf for expert in experts for leaf in jax.tree.leaves(expert, is_leaf=is_qarray)]
    if any(isinstance(leaf, QArray) and leaf.policy is not None for leaf in leaves):
        return False
    kinds = {(jax.tree.structure(expert), tuple((a.shape, a.dtype) for a in jax.tree.leaves(expert))) for expert in experts}
    return len(kinds) == 1


def products(tree: Params, names: tuple[str, ...], widths: Sequence[int], linear: Callable[[Any], Array]) -> list[Array]:
    """The matmuls of several weights of a layer with one input, fused or not.

    Args:
        tree: the part of the layer that contains the weights.
        names: their names.
        widths: the output size of each.
        linear: multiplies the input by a weight.

    Returns:
        One result for each weight.
    """
    if "+".join(names) not in tree:
        return [linear(tree[name]) for name in names]
    ends = [sum(widths[:i]) for i in range(1, len(names))]
    return jnp.split(linear(tree["+".join(names)]), ends, axis=-1)


def _layer_joined(layer: Params) -> Params:
    parts = {}
    for part, names in JOINED.items():
        weights = [layer.get(part, {}).get(name) for name in names]
        if _can_join(weights):
            others = {name: leaf for name, leaf in layer[part].items() if name not in names}
            fused = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *weights)
            parts[part] = {**others, "+".join(names): fused}
    return {**layer, **parts}


def _can_join(weights: list[Any]) -> bool:
    """Whether weights have the same scheme and K, and independent rows. No row may share scales or bytes with another."""
    if not all(isinstance(q, QArray) and q.ndim == 2 and q.tensor_scale is None for q in weights):
        return False
    scheme = weights[0].scheme
    if isinstance(scheme.scale, Scheme):  # several rows share the scales of their scales
        return False
    same = len({(jax.tree.structure(q), q.shape[1]) for q in weights}) == 1
    return same and scheme.tiles(2)[0] == 1 and scheme.pack_axis == -1

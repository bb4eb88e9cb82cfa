"""Matrices that meet the same activations as one: a short product costs its call more than its numbers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..array import QArray

Params: TypeAlias = dict[str, Any]

JOINED = {"attn": ("q", "k", "v"), "mlp": ("gate", "up")}
"""The matrices of a layer that read the same input; joined they are one leaf, `q+k+v` and `gate+up`."""


def join_products(params: Params) -> Params:
    """The same parameters with the quantized matrices that read the same input joined along their outputs, without loss.

    `x [q; k; v]^T = [x q^T, x k^T, x v^T]`: codes, scales and zero points stand below each other as they are. So a layer
    makes four products instead of seven. Layers whose matrices differ in their scheme, or share a scale between rows, stay
    as they are, and so do those that are not quantized.

    Args:
        params: a tree whose `layers` is a list, as for `forward`.

    Returns:
        The tree with `layers/0/attn/q+k+v` in place of three leaves and `layers/0/mlp/gate+up` in place of two.
    """
    return {**params, "layers": [_layer_joined(layer) for layer in params["layers"]]}


def products(tree: Params, names: tuple[str, ...], widths: Sequence[int], linear: Callable[[Any], Array]) -> list[Array]:
    """The products of several matrices of a layer with one input, joined or not.

    Args:
        tree: the layer's part that holds the matrices.
        names: theirs.
        widths: how many outputs each has.
        linear: the product of the input and a matrix.

    Returns:
        A product for each matrix.
    """
    if "+".join(names) not in tree:
        return [linear(tree[name]) for name in names]
    ends = [sum(widths[:i]) for i in range(1, len(names))]
    return jnp.split(linear(tree["+".join(names)]), ends, axis=-1)


def _layer_joined(layer: Params) -> Params:
    parts = {}
    for part, names in JOINED.items():
        held = [layer[part][name] for name in names]
        if _can_join(held):
            others = {name: leaf for name, leaf in layer[part].items() if name not in names}
            whole = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=0), *held)
            parts[part] = {**others, "+".join(names): whole}
    return {**layer, **parts}


def _can_join(held: list[Any]) -> bool:
    """Whether matrices are alike, and each row has its scales and bytes to itself."""
    if not all(isinstance(q, QArray) and q.ndim == 2 and q.tensor_scale is None for q in held):
        return False
    is_alike = len({(jax.tree.structure(q), q.shape[1]) for q in held}) == 1
    return is_alike and held[0].scheme.tiles(2)[0] == 1 and held[0].scheme.pack_axis == -1

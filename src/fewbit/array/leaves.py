"""Functions of a QArray's scale-like leaves."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._tiles import Tile
from .qarray import QArray


def taken_rows(q: QArray, at: jax.Array, axis: int) -> QArray:
    """The rows of a QArray at in-bounds indices, along an axis.

    They stay quantized, each with its own scale unless all share one. Codes must not be packed along the axis.
    """
    place = at // (q.tiles[axis] or 1)

    def on_tiles(leaf: jax.Array | QArray) -> jax.Array | QArray:
        if leaf.shape[axis] == 1:
            return leaf
        if isinstance(leaf, QArray):
            return taken_rows(leaf, place, axis)
        return jnp.take(leaf, place, axis=axis)

    tiles: list[Tile] = list(q.tiles)
    tiles[axis] = None if q.scale.shape[axis] == 1 else 1
    scheme = q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis)
    return with_leaves(q, on_tiles, codes=jnp.take(q.codes, at, axis=axis), scheme=scheme)


def with_leaves(q: QArray, of_leaf: Callable[[Any], Any], **changes: Any) -> QArray:
    """The array with `of_leaf` applied to all its leaves but the codes.

    Those are the scale, the zero point and the tensor scale. `changes` replaces other fields.
    """
    leaves = {"scale": q.scale, "zero_point": q.zero_point, "tensor_scale": q.tensor_scale}
    return dataclasses.replace(q, **{name: of_leaf(leaf) for name, leaf in leaves.items() if leaf is not None}, **changes)

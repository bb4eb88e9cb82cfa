"""Traced: a function as a jaxpr, traced once with shapes."""

import bisect
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core as jex_core
from jax.sharding import AxisType, NamedSharding
from jaxtyping import PyTree

from ...array.qarray import QArray
from .proxy import is_proxy, is_proxy_type

_ARRAYS = (np.ndarray, np.generic, jax.Array)


@dataclasses.dataclass(frozen=True)
class Traced:
    """The jaxpr of `fn(*args, **kwargs)`.

    Uses of parameters are found in it, and it is evaluated with proxies in their place.

    Attributes:
        closed: the jaxpr. Its inputs are the array leaves of the arguments, in order; a proxy is one leaf.
        first: how many inputs are leaves of the first argument, a model's parameters.
        out_tree: the structure of the results.
    """

    closed: jex_core.ClosedJaxpr
    first: int
    out_tree: Any

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Self:
        """Traces a function with the shapes and dtypes of its arrays. The other leaves of its arguments are passed through.

        Args:
            fn: the function.
            args: its arguments: arrays, proxies, `jax.ShapeDtypeStruct`s, or anything with a shape and a dtype.
            kwargs: its keyword arguments, likewise.
        """
        leaves, treedef = jax.tree.flatten((args, dict(kwargs)), is_leaf=is_proxy)
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        end = treedef.children()[0].children()[0].num_leaves if args else 0
        out_tree = None

        def flat(*arrays: PyTree) -> list[Any]:
            nonlocal out_tree
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
            outputs, out_tree = jax.tree.flatten(fn(*inner_args, **inner_kwargs))
            return outputs

        trace = jax.make_jaxpr(flat)
        if getattr(jax.config, "jax_disable_jit", False):  # there loops would be traced iteration by iteration
            trace = jax.disable_jit(False)(trace)
        closed = trace(*map(abstract, [leaves[place] for place in places]))
        return cls(closed, bisect.bisect_left(places, end), out_tree)


def array_leaves(tree: PyTree) -> list[Any]:
    """The leaves of a tree that are traced, in order. A proxy is one."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_proxy) if is_array(leaf)]


def abstract(leaf: Any) -> Any:
    """The shape, dtype and sharding of a leaf, for a trace. Of a proxy they are those of the array that it replaces."""
    array = leaf
    if isinstance(leaf, QArray):
        array = leaf.codes  # they have the axes of the array
    elif is_proxy(leaf):
        array = jax.tree.leaves(leaf)[0]
    elif isinstance(leaf, _ARRAYS):
        return leaf
    if isinstance(array, jax.Array):
        seen: ShapedArray = jax.typeof(array)
        return seen.update(shape=leaf.shape, dtype=leaf.dtype)
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    sharding = getattr(array, "sharding", None)  # on an explicit mesh it is part of the type
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        like = like.update(sharding=sharding)
    return like


def is_array(leaf: object) -> bool:
    """Whether a leaf is traced: an array, a proxy or a numpy scalar."""
    return is_proxy_type(type(leaf)) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))

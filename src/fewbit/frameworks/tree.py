"""Plain trees of parameters, and modules that are such trees (Equinox, Penzai, dataclasses): planned and quantized in one step.

`fb.transparent`, `fb.train` and `fb.plan` take them as they are, with leaves that are no arrays among the others.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from ..array import is_qarray
from ..errors import QuantError
from ..ops.uses import array_paths, parameter_paths
from ..recipe import Plan, quantize_params
from ..recipe import plan as make_plan
from ..recipe.apply import check_storable, quantize_row


def quantize(fn: Callable[..., Any] | None, tree: Any, *inputs: Any, recipe: Any, donate: bool = False) -> Any:
    """Quantizes a tree of parameters as a recipe says for the products of a function.

    Parameters are quantized one at a time. With `donate` each float array is freed as soon as its codes are there, so beside
    the tree never more than one parameter is held.

    Args:
        fn: the function whose products decide the axes, `fn(tree, *inputs)`, as in `fb.plan`.
        tree: the tree; an Equinox module is one.
        inputs: example inputs of `fn`; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan of this tree.
        donate: whether the float arrays of the quantized parameters are deleted. The tree that was handed in cannot be used
            any more; an array that stands at several places of it is kept.

    Returns:
        A tree of the same structure with QArrays in the place of quantized leaves; call it with `fb.transparent(fn)`.

    Raises:
        QuantError: for what `fb.plan` and `fb.quantize_params` refuse, and for `donate` under a trace.
        UnsupportedError: for what `fb.quantize_params` refuses.

    >>> def fn(params, x):
    ...     return x @ params["w"]
    >>> quantize(fn, {"w": jnp.ones((64, 32))}, jnp.ones((1, 64)), recipe="int8")
    {'w': QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)}
    """
    planned = recipe if isinstance(recipe, Plan) else make_plan(fn, tree, *inputs, recipe=recipe)
    return _quantized_and_freed(tree, planned) if donate else quantize_params(tree, planned)


def _quantized_and_freed(tree: Any, plan: Plan) -> Any:
    """`quantize_params`, with each source freed before the next parameter is read."""
    check_storable(plan)
    rows = {row.path: row for row in plan}
    if other := sorted(set(rows) ^ set(array_paths(tree))):
        raise QuantError(f"the plan is for another tree: {', '.join(other[:5])} stand in one of the two only")
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_qarray)
    places = Counter(map(id, leaves))
    for i, path in enumerate(parameter_paths(tree)):
        source = leaves[i]
        if isinstance(source, Tracer):
            raise QuantError(f"donate=True deletes arrays, and {path} is traced; donate the argument of jax.jit instead")
        if path in rows and (q := quantize_row(source, rows[path])) is not source:
            leaves[i] = jax.block_until_ready(q)
            if places[id(source)] == 1 and isinstance(source, jax.Array):
                source.delete()
    return jax.tree.unflatten(treedef, leaves)

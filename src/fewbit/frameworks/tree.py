"""Quantization of parameter pytrees and Equinox modules.

Those are Equinox, Penzai and dataclass modules; `fb.transparent`, `fb.train` and `fb.plan` take them directly, also with leaves
that are not arrays.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import PyTree

from ..array.qarray import is_qarray
from ..errors import QuantError
from ..ops.interpret.parameter_uses import parameter_paths
from ..recipe.apply import planned_observations, quantize_params
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from ..recipe.plan import plan as make_plan
from ..recipe.quantize_row import SupportsObservations, check_quantizable, quantize_row
from ..recipe.recipe import RecipeLike


def quantize(
    fn: Callable[..., Any] | None,
    tree: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    method: AbstractMethod = NEAREST,
    stats: SupportsObservations | None = None,
    donate: bool = False,
) -> PyTree:
    """Quantizes a parameter tree by a recipe.

    Parameters are quantized one at a time. With `donate` each float array is freed once it is quantized, so peak memory is the
    tree and one more parameter.

    Args:
        fn: the function whose matmuls decide the axes, `fn(tree, *inputs)`, as in `fb.plan`.
        tree: the parameters, such as an Equinox module.
        inputs: example inputs of `fn`; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan of this tree.
        method: how scales and codes are chosen, as in `fb.quantize_params`.
        stats: what `fb.observe` collected with `collect=method.collect`, as in `fb.quantize_params`.
        donate: whether the float arrays of quantized parameters are deleted. `tree` cannot be used afterwards; an array that
            `tree` or `inputs` contain a second time, or that shares its buffer with another of theirs, is kept.

    Returns:
        A tree of the same structure with QArrays for quantized leaves; call `fb.transparent(fn)` with it.

    Raises:
        QuantError: for what `fb.plan` and `fb.quantize_params` refuse, and for `donate` under a trace; nothing is deleted then.
        UnsupportedError: for what `fb.quantize_params` refuses; likewise.

    >>> def fn(params, x):
    ...     return x @ params["w"]
    >>> quantize(fn, {"w": jnp.ones((64, 32))}, jnp.ones((1, 64)), recipe="int8")
    {'w': QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)}
    """
    if not isinstance(recipe, Plan):
        recipe = make_plan(fn, tree, *inputs, recipe=recipe)
    if not donate:
        return quantize_params(tree, recipe, method=method, stats=stats)
    return _quantize_and_free(tree, recipe, method, stats, inputs)


def _quantize_and_free(
    tree: PyTree, plan: Plan, method: AbstractMethod, stats: SupportsObservations | None, inputs: PyTree
) -> PyTree:
    """`quantize_params` that frees each float array before it reads the next. All are checked before the first is freed.

    A buffer that another array of the tree or of the inputs uses is kept.
    """
    seen = planned_observations(tree, plan, method, stats)
    rows = {row.path: row for row in plan}
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_qarray)
    paths = parameter_paths(tree)
    for path, source in paths.items():
        if isinstance(source, Tracer):
            raise QuantError(f"donate=True deletes arrays, and {path} is traced; donate the argument of jax.jit instead")
        if path in rows:
            check_quantizable(source, rows[path], method, seen[path])
    uses = Counter(buffer for leaf in jax.tree.leaves((tree, inputs)) for buffer in _buffers(leaf))
    for i, path in enumerate(paths):
        source = leaves[i]
        if path in rows and (q := quantize_row(source, rows[path], method, seen[path])) is not source:
            leaves[i] = jax.block_until_ready(q)
            if isinstance(source, jax.Array) and all(uses[buffer] == 1 for buffer in _buffers(source)):
                source.delete()
    return jax.tree.unflatten(treedef, leaves)


def _buffers(x: object) -> list[tuple[int, int]]:
    """Device and address of each buffer of a float array. `jax.device_put` may return another array of the same buffer.

    Where the platform gives no addresses, the id of the array is used.
    """
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
        return []
    try:
        return [(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in x.addressable_shards]
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return [(-1, id(x))]

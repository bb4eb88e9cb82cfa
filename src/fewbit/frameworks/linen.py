"""Flax Linen: a module's variables quantized in their collections, and its methods called on them, without changing the module.

Rules match the paths below the collection `params`, `decoder/layers_0/mlp/wi/kernel`. Boxes of sharding metadata
(`nn.Partitioned`, `nn.LogicallyPartitioned`) stay around what they describe, and no path mentions them.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import jax

from ..array import is_qarray
from ..ops import transparent
from ..ops.transparent import Decoded
from ..recipe import Plan
from ..recipe import plan as make_plan
from ..statistics import AbsMaxRange, AbstractRange, Stats
from ..statistics import observe as observe_function
from ..statistics.measure import Statistic
from ..training import DelayedState, ModelSparsity
from ..training import delayed_state as state_of
from ..training import sparsity_state as sparsity_of
from ..training import train as train_function
from . import serialization, tree
from ._flax import flax


def plan(module: Any, variables: Any, *inputs: Any, recipe: Any, **kwargs: Any) -> Plan:
    """Resolves a recipe against a module: what happens to every parameter, and why.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The plan; its paths are those below `params`.

    Raises:
        QuantError: for what `fb.plan` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import linen
    >>> dense = linen.Dense(32)
    >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 64)))
    >>> plan(dense, variables, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    params, boxed, others = _split(variables)

    def fn(params: Any, others: Any, *inputs: Any) -> Any:
        return module.apply({**others, "params": boxed(params)}, *inputs, **kwargs)

    return make_plan(fn, params, others, *inputs, recipe=recipe)


def quantize(
    module: Any, variables: Any, *inputs: Any, recipe: Any, method: Any = None, donate: bool = False, **kwargs: Any
) -> Any:
    """Quantizes the parameters of a module; every other collection, and all metadata, stays as it is.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan, as `plan` gives it.
        method: the method, or its name, whose products decide the axes; None is `__call__`.
        donate: whether each float array is deleted as soon as its codes are there, as in `tree.quantize`.
        kwargs: what else `module.apply` takes: `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The variables with QArrays in the place of quantized arrays, inside the same boxes; for `apply`.

    Raises:
        QuantError: for what `fb.plan` and `fb.quantize_params` refuse.
        UnsupportedError: when flax is not installed, and for what `fb.quantize_params` refuses.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = quantize(dense, dense.init(jax.random.key(0), x), x, recipe="int8")
    >>> variables["params"]["kernel"]
    QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)
    >>> apply(dense)(variables, x).shape
    (1, 32)
    """
    serialization.register()
    if not isinstance(recipe, Plan):
        recipe = plan(module, variables, *inputs, recipe=recipe, method=method, **kwargs)
    params, boxed, others = _split(variables)
    return {**others, "params": boxed(tree.quantize(None, params, recipe=recipe, donate=donate))}


def apply(module: Any, *, fallback: Any = "error", report: Callable[[Decoded], None] | None = None) -> Callable[..., Any]:
    """Makes `module.apply` take quantized variables, for every method.

    Make it once, outside the loop that calls it, and jit it like `module.apply`.

    Args:
        module: the Linen module.
        fallback: as in `fb.transparent`.
        report: as in `fb.transparent`.

    Returns:
        A function of the arguments of `module.apply`: the variables, the inputs, `method`, `rngs`, `mutable` and so on.
    """
    return transparent(module.apply, fallback=fallback, report=report)


def train(module: Any, recipe: Any, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., Any]:
    """Makes `module.apply` compute its products as a recipe says, forwards and backwards, from float variables.

    Args:
        module: the Linen module.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules match the paths below `params`.
        report: as in `fb.train`.

    Returns:
        A function of the arguments of `module.apply`, and `key=`: a JAX random key, needed when a policy rounds stochastically
        or rotates; `delayed=`: the state of `delayed_state`, needed for delayed scaling; and `sparsity=`: the state of
        `sparsity_state`, needed for sparsity. The variables, their gradients and so their checkpoints have the structure of
        the float model.

    Raises:
        QuantError: for what `fb.train` refuses.
        UnsupportedError: when flax is not installed, and for what `fb.train` refuses.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> gradient = jax.grad(lambda variables: jnp.sum(train(dense, "w8a8")(variables, x)))(variables)
    >>> jax.tree.structure(gradient) == jax.tree.structure(variables)
    True
    """

    trained = train_function(_pure(module), recipe, report=report)

    def applied(
        variables: Any, *args: Any, key: Any = None, delayed: Any = None, sparsity: Any = None, **kwargs: Any
    ) -> Any:
        return trained(*_split(variables), *args, key=key, delayed=delayed, sparsity=sparsity, **kwargs)

    return applied


def delayed_state(module: Any, variables: Any, *inputs: Any, recipe: Any, **kwargs: Any) -> DelayedState:
    """The state of delayed scaling before the first step of a module under a recipe, for what `train` gives.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The state, as `fb.delayed_state` gives it.

    Raises:
        QuantError: for what `fb.delayed_state` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> list(delayed_state(dense, dense.init(jax.random.key(0), x), x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return state_of(_pure(module), *_split(variables), *inputs, recipe=recipe, **kwargs)


def sparsity_state(module: Any, variables: Any, *inputs: Any, recipe: Any, **kwargs: Any) -> ModelSparsity:
    """The sparsity of a module under a recipe before the first step, for what `train` gives.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The state, as `fb.sparsity_state` gives it; paths are those below `params`.

    Raises:
        QuantError: for what `fb.sparsity_state` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> recipe = fb.Recipe((fb.Rule(".*", "int8", sparsity=fb.Sparsity(2, 4)),))
    >>> state = update_sparsity(sparsity_state(dense, variables, x, recipe=recipe), variables)
    >>> int(state.masks["kernel"].sum()), int((pruned(variables, state)["params"]["kernel"] != 0).sum())
    (1024, 1024)
    """
    return sparsity_of(_pure(module), *_split(variables), *inputs, recipe=recipe, **kwargs)


def update_sparsity(state: ModelSparsity, variables: Any, step: Any = None) -> ModelSparsity:
    """The sparsity for one step, as `ModelSparsity.update` gives it.

    Args:
        state: the state before.
        variables: the variables, dense.
        step: the number of this step; None counts the updates from 0.

    Returns:
        The state for this step.

    Raises:
        QuantError: when the variables are another module's.
        UnsupportedError: when flax is not installed.
    """
    return state.update(_split(variables)[0], step)


def pruned(variables: Any, state: ModelSparsity) -> Any:
    """The variables with zeros where the masks prune them, as `train` computed with them: to quantize and to serve.

    Args:
        variables: the variables.
        state: the sparsity.

    Returns:
        The variables; all but the sparse parameters are those that came in.

    Raises:
        QuantError: when the variables are another module's.
        UnsupportedError: when flax is not installed.
    """
    params, boxed, others = _split(variables)
    return {**others, "params": boxed(state.apply(params))}


def observe(
    module: Any,
    variables: Any,
    batches: Iterable[Any],
    recipe: Any,
    *,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
    **kwargs: Any,
) -> Stats:
    """Runs a module over batches, and measures what each parameter that a recipe quantizes meets in its products.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`, floating.
        batches: for each batch the tuple of the method's arguments, or the one argument.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        rule: how ranges are estimated, as in `fb.observe`.
        collect: the statistics, as in `fb.observe`.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The statistics, as `fb.observe` gives them; paths are those below `params`.

    Raises:
        QuantError: for what `fb.observe` refuses.
        UnsupportedError: when flax is not installed, and for what `fb.observe` refuses.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.full((1, 64), 3.0)
    >>> stats = observe(dense, dense.init(jax.random.key(0), x), [x, -2 * x], "w8a8")
    >>> float(stats["kernel"].range.high)
    6.0
    """
    params, boxed, others = _split(variables)
    fn = _pure(module)

    def called(params: Any, *inputs: Any) -> Any:
        return fn(params, boxed, others, *inputs, **kwargs)

    return observe_function(called, params, batches, recipe, rule=rule, collect=collect)


def _pure(module: Any) -> Callable[..., Any]:
    """`module.apply` as a function of what `_split` gives, and of the other arguments."""

    def fn(params: Any, boxed: Callable[[Any], Any], others: Any, *args: Any, **kwargs: Any) -> Any:
        return module.apply({**others, "params": boxed(params)}, *args, **kwargs)

    return fn


def _split(variables: Any) -> tuple[Any, Callable[[Any], Any], dict[str, Any]]:
    """The parameters without boxes, the function that puts them back into theirs, and the other collections."""
    meta = flax("core.meta")

    def is_whole(x: Any) -> bool:
        return is_qarray(x) or isinstance(x, meta.AxisMetadata)

    leaves, treedef = jax.tree.flatten(variables.get("params", {}), is_leaf=is_whole)

    def boxed(params: Any) -> Any:
        values = treedef.flatten_up_to(params)
        return treedef.unflatten(
            x.replace_boxed(value) if isinstance(x, meta.AxisMetadata) else value
            for x, value in zip(leaves, values, strict=True)
        )

    others = {name: collection for name, collection in variables.items() if name != "params"}
    return treedef.unflatten(_unboxed(x, meta) for x in leaves), boxed, others


def _unboxed(x: Any, meta: ModuleType) -> Any:
    """What a box holds; its own `unbox` would constrain the sharding, which a QArray outside `transparent` cannot be."""
    if isinstance(x, meta.Partitioned):
        return x.value
    return x.unbox() if isinstance(x, meta.AxisMetadata) else x

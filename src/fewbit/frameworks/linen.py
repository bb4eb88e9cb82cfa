"""Quantized and quantization-aware Flax Linen modules.

Rules match the paths below the collection `params`, such as `decoder/layers_0/mlp/wi/kernel`. Boxes of sharding metadata
(`nn.Partitioned`, `nn.LogicallyPartitioned`) are kept and do not appear in paths. Every function raises UnsupportedError when
flax is not installed, besides what its counterpart in `fb` raises.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, PyTree

from ..array import is_qarray
from ..calibration import AbsMaxRange, AbstractRange, Stats
from ..calibration import observe as observe_function
from ..calibration.measure import Statistic
from ..ops import transparent
from ..ops.interpret.transparent import Decoded
from ..recipe import Plan
from ..recipe import plan as make_plan
from ..training import DelayedState, ModelSparsity
from ..training import delayed_state as state_of
from ..training import sparsity_state as sparsity_of
from ..training import train as train_function
from . import serialization, tree
from ._flax import LinenModule, flax
from .tree import RecipeLike


def plan(module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object) -> Plan:
    """Resolves a recipe against a module without running it.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: other arguments of `module.apply`: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The plan of every parameter, with paths below `params`.

    Raises:
        QuantError: as `fb.plan`.

    >>> from flax import linen
    >>> dense = linen.Dense(32)
    >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 64)))
    >>> plan(dense, variables, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    params, boxed, others = _split(variables)

    def fn(params: PyTree, others: PyTree, *inputs: PyTree) -> PyTree:
        return module.apply({**others, "params": boxed(params)}, *inputs, **kwargs)

    return make_plan(fn, params, others, *inputs, recipe=recipe)


def quantize(
    module: LinenModule,
    variables: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    method: Callable[..., Any] | str | None = None,
    donate: bool = False,
    **kwargs: object,
) -> PyTree:
    """Quantizes a module's parameters; keeps other collections and metadata.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan of `plan`.
        method: the method, or its name, whose matmuls decide the axes; None is `__call__`.
        donate: whether each float array is deleted once it is quantized, as in `tree.quantize`.
        kwargs: other arguments of `module.apply`: `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The variables with QArrays inside the same boxes, for `apply`.

    Raises:
        QuantError: as `fb.plan` and `fb.quantize_params`.

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


def apply(
    module: LinenModule,
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """`module.apply` for quantized variables and any method; other arguments as for `fb.transparent`.

    Create it once, outside the loop that calls it, and jit it like `module.apply`, whose arguments it takes.

    Args:
        module: the Linen module.
        fallback: as in `fb.transparent`.
        report: as in `fb.transparent`.

    Returns:
        A function of the arguments of `module.apply`: the variables, the inputs, `method`, `rngs`, `mutable` and so on.
    """
    return transparent(module.apply, fallback=fallback, report=report)


def train(module: LinenModule, recipe: RecipeLike, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., Any]:
    """`module.apply` with quantized forward and backward matmuls (QAT).

    Args:
        module: the Linen module.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules match the paths below `params`.
        report: as in `fb.train`.

    Returns:
        A function with the arguments of `module.apply`, and `key=`: a JAX random key, required for stochastic rounding and
        rotation; `delayed=`: the state of `delayed_state`, required for delayed scaling; `sparsity=`: the state of
        `sparsity_state`, required for sparsity. Variables, gradients and checkpoints have the structure of the float model.

    Raises:
        QuantError: as `fb.train`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> gradient = jax.grad(lambda variables: jnp.sum(train(dense, "w8a8")(variables, x)))(variables)
    >>> jax.tree.structure(gradient) == jax.tree.structure(variables)
    True
    """
    trained = train_function(_pure(module), recipe, report=report)

    def applied(
        variables: PyTree,
        *args: PyTree,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: object,
    ) -> Any:
        return trained(*_split(variables), *args, key=key, delayed=delayed, sparsity=sparsity, **kwargs)

    return applied


def delayed_state(
    module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> DelayedState:
    """The initial state of delayed scaling, for `train`; arguments as for `plan`.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The state, as `fb.delayed_state` gives it.

    Raises:
        QuantError: as `fb.delayed_state`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> list(delayed_state(dense, dense.init(jax.random.key(0), x), x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return state_of(_pure(module), *_split(variables), *inputs, recipe=recipe, **kwargs)


def sparsity_state(
    module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> ModelSparsity:
    """The initial sparsity masks, for `train`; arguments as for `plan`.

    Args:
        module: the Linen module.
        variables: its variables, with the collection `params`; arrays or `jax.ShapeDtypeStruct`s, boxed or not.
        inputs: example inputs of the method; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        kwargs: what else `module.apply` takes: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The state, as `fb.sparsity_state` gives it; paths are those below `params`.

    Raises:
        QuantError: as `fb.sparsity_state`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> recipe = fb.Recipe((fb.Rule(".*", "int8", sparsity=fb.Sparsity(2, 4)),))
    >>> state = update_sparsity(sparsity_state(dense, variables, x, recipe=recipe), variables)
    >>> int(state.masks["kernel"].sum()), int((pruned(variables, state)["params"]["kernel"] != 0).sum())
    (1024, 1024)
    """
    return sparsity_of(_pure(module), *_split(variables), *inputs, recipe=recipe, **kwargs)


def update_sparsity(state: ModelSparsity, variables: PyTree, step: Int[ArrayLike, ""] | None = None) -> ModelSparsity:
    """Updates the sparsity masks for one step, as `ModelSparsity.update`.

    Args:
        state: the previous state.
        variables: the dense variables.
        step: the number of this step; None counts the updates from 0.

    Returns:
        The state for this step.

    Raises:
        QuantError: for variables of another module.
    """
    return state.update(_split(variables)[0], step)


def pruned(variables: PyTree, state: ModelSparsity) -> PyTree:
    """Sets pruned weights to zero, to quantize and serve what `train` trained.

    Args:
        variables: the dense variables; all but the sparse parameters are returned unchanged.
        state: the sparsity.

    Returns:
        The variables; all but the sparse parameters are those that came in.

    Raises:
        QuantError: for variables of another module.
    """
    params, boxed, others = _split(variables)
    return {**others, "params": boxed(state.apply(params))}


def observe(
    module: LinenModule,
    variables: PyTree,
    batches: Iterable[PyTree],
    recipe: RecipeLike,
    *,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
    **kwargs: object,
) -> Stats:
    """Collects activation statistics of a module over calibration batches.

    Args:
        module: the Linen module.
        variables: its float variables, with the collection `params`.
        batches: for each batch the tuple of the method's arguments, or the single argument.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        rule: how ranges are estimated, as in `fb.observe`.
        collect: the statistics, as in `fb.observe`.
        kwargs: other arguments of `module.apply`: `method`, `rngs`, `mutable`, and keyword arguments of the method.

    Returns:
        The statistics of the inputs of each parameter that the recipe quantizes, with paths below `params`.

    Raises:
        QuantError: as `fb.observe`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.full((1, 64), 3.0)
    >>> stats = observe(dense, dense.init(jax.random.key(0), x), [x, -2 * x], "w8a8")
    >>> float(stats["kernel"].range.high)
    6.0
    """
    params, boxed, others = _split(variables)
    fn = _pure(module)

    def called(params: PyTree, *inputs: PyTree) -> Any:
        return fn(params, boxed, others, *inputs, **kwargs)

    return observe_function(called, params, batches, recipe, rule=rule, collect=collect)


def _pure(module: LinenModule) -> Callable[..., Any]:
    """`module.apply` as a function of the results of `_split`."""

    def fn(params: PyTree, boxed: Callable[[Any], Any], others: PyTree, *args: PyTree, **kwargs: object) -> Any:
        return module.apply({**others, "params": boxed(params)}, *args, **kwargs)

    return fn


def _split(variables: PyTree) -> tuple[PyTree, Callable[[Any], Any], dict[str, Any]]:
    """The unboxed parameters, the function that boxes them again, and the other collections."""
    meta = flax("core.meta")

    def is_leaf(x: object) -> bool:
        return is_qarray(x) or isinstance(x, meta.AxisMetadata)

    leaves, treedef = jax.tree.flatten(variables.get("params", {}), is_leaf=is_leaf)

    def boxed(params: PyTree) -> PyTree:
        values = treedef.flatten_up_to(params)
        return treedef.unflatten(
            x.replace_boxed(value) if isinstance(x, meta.AxisMetadata) else value
            for x, value in zip(leaves, values, strict=True)
        )

    others = {name: collection for name, collection in variables.items() if name != "params"}
    return treedef.unflatten(_unboxed(x, meta) for x in leaves), boxed, others


def _unboxed(x: PyTree, meta: ModuleType) -> PyTree:
    """The content of a box."""
    if isinstance(x, meta.Partitioned):
        return x.value  # `unbox` would constrain the sharding, which a QArray outside `transparent` does not support
    if isinstance(x, meta.AxisMetadata):
        return x.unbox()
    return x

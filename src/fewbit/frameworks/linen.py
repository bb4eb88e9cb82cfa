"""Quantized and quantization-aware Flax Linen modules.

Rules match the paths below the collection `params`, such as `decoder/layers_0/mlp/wi/kernel`; other collections are kept. Boxes
of sharding metadata (`nn.Partitioned`, `nn.LogicallyPartitioned`) are kept and do not appear in paths.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Literal

import jax
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ..array.qarray import is_qarray
from ..calibration.measure import Statistic
from ..calibration.observe import observe as observe_function
from ..calibration.range_rules import AbsMaxRange
from ..calibration.ranges import AbstractRange
from ..calibration.stats import Stats
from ..ops.interpret.transparent import Decoded, transparent
from ..recipe.plan import Plan
from ..recipe.plan import plan as make_plan
from ..recipe.recipe import RecipeLike
from ..training.delayed_state import DelayedState
from ..training.delayed_state import delayed_state as state_of
from ..training.model_sparsity import ModelSparsity
from ..training.model_sparsity import sparsity_state as sparsity_of
from ..training.train import train as train_function
from . import serialization
from ._flax import LinenModule, flax
from .adapter import SplitModel


def plan(module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object) -> Plan:
    """Resolves a recipe against a module without running it, as `fb.plan`.

    >>> from flax import linen
    >>> dense = linen.Dense(32)
    >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 64)))
    >>> plan(dense, variables, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    return make_plan(*_split(variables).call(module.apply, **kwargs), *inputs, recipe=recipe)


def quantize(
    module: LinenModule,
    variables: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    donate: bool = False,
    **kwargs: object,
) -> PyTree:
    """Quantizes a module's parameters, as `fb.quantize_params`.

    Returns:
        The variables with QArrays inside the same boxes, for `apply`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = quantize(dense, dense.init(jax.random.key(0), x), x, recipe="int8")
    >>> variables["params"]["kernel"]
    QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)
    >>> apply(dense)(variables, x).shape
    (1, 32)
    """
    serialization.register()
    return _split(variables).quantize(module.apply, *inputs, recipe=recipe, donate=donate, **kwargs)


def apply(
    module: LinenModule,
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """`module.apply` for quantized variables, as `fb.transparent`.

    Create it once, outside the loop that calls it, and jit it like `module.apply`, whose arguments it takes.
    """
    return transparent(module.apply, fallback=fallback, report=report)


def train(module: LinenModule, recipe: RecipeLike, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., Any]:
    """`module.apply` with quantized forward and backward matmuls (QAT), as `fb.train`.

    Returns:
        A function with the arguments of `module.apply`, and `key=`, `delayed=` and `sparsity=` as for a function of
        `fb.train`. Variables, gradients and checkpoints have the structure of the float model.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> gradient = jax.grad(lambda variables: jnp.sum(train(dense, "w8a8")(variables, x)))(variables)
    >>> jax.tree.structure(gradient) == jax.tree.structure(variables)
    True
    """

    def joined(params: PyTree, rest: PyTree, rebuild: Callable[..., Any], *args: PyTree, **kwargs: object) -> Any:
        return module.apply(rebuild(params, rest), *args, **kwargs)

    trained = train_function(joined, recipe, report=report)

    def applied(variables: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
        split = _split(variables)
        return trained(split.params, split.rest, split.rebuild, *args, **kwargs)

    return applied


def delayed_state(
    module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> DelayedState:
    """The initial state of delayed scaling, for `train`, as `fb.delayed_state`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> list(delayed_state(dense, dense.init(jax.random.key(0), x), x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return state_of(*_split(variables).call(module.apply, **kwargs), *inputs, recipe=recipe)


def sparsity_state(
    module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object
) -> ModelSparsity:
    """The initial sparsity masks, for `train`, as `fb.sparsity_state`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = dense.init(jax.random.key(0), x)
    >>> recipe = fb.Recipe((fb.Rule(".*", "int8", sparsity=fb.Sparsity(2, 4)),))
    >>> state = update_sparsity(sparsity_state(dense, variables, x, recipe=recipe), variables)
    >>> int(state.masks["kernel"].sum()), int((pruned(variables, state)["params"]["kernel"] != 0).sum())
    (1024, 1024)
    """
    return sparsity_of(*_split(variables).call(module.apply, **kwargs), *inputs, recipe=recipe)


def update_sparsity(state: ModelSparsity, variables: PyTree, step: Int[ArrayLike, ""] | None = None) -> ModelSparsity:
    """Updates the sparsity masks for one step, as `fb.ModelSparsity.update`."""
    return state.update(_split(variables).params, step)


def pruned(variables: PyTree, state: ModelSparsity) -> PyTree:
    """The sparse variables, to quantize and serve, as `fb.ModelSparsity.apply`."""
    return _split(variables).replaced(state.apply)


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
    """Collects activation statistics of a module over calibration batches, as `fb.observe`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.full((1, 64), 3.0)
    >>> stats = observe(dense, dense.init(jax.random.key(0), x), [x, -2 * x], "w8a8")
    >>> float(stats["kernel"].range.high)
    6.0
    """
    called, params, rest = _split(variables).call(module.apply, **kwargs)
    return observe_function(
        lambda params, *inputs: called(params, rest, *inputs), params, batches, recipe, rule=rule, collect=collect
    )


def _split(variables: PyTree) -> SplitModel:
    """The unboxed parameters and the other collections."""
    meta = flax("core.meta")

    def is_leaf(x: object) -> bool:
        return is_qarray(x) or isinstance(x, meta.AxisMetadata)

    leaves, treedef = jax.tree.flatten(variables.get("params", {}), is_leaf=is_leaf)

    def boxed(params: PyTree, others: dict[str, PyTree]) -> dict[str, PyTree]:
        values = treedef.flatten_up_to(params)
        params = treedef.unflatten(
            x.replace_boxed(value) if isinstance(x, meta.AxisMetadata) else value
            for x, value in zip(leaves, values, strict=True)
        )
        return {**others, "params": params}

    others = {name: collection for name, collection in variables.items() if name != "params"}
    return SplitModel(treedef.unflatten(_unboxed(x, meta) for x in leaves), others, boxed)


def _unboxed(x: PyTree, meta: ModuleType) -> PyTree:
    """The content of a box."""
    if isinstance(x, meta.Partitioned):
        return x.value  # `unbox` would constrain the sharding, which a QArray outside `transparent` does not support
    if isinstance(x, meta.AxisMetadata):
        return x.unbox()
    return x

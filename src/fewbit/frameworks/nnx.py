"""Quantized and quantization-aware Flax NNX models.

Rules match the paths of the `nnx.Param`s of the model, such as `layers/0/mlp/wi/kernel`. What a function changes in its models
(batch statistics, RNG counters, caches) is written back, as under `nnx.jit`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, PyTree

from ..array.qarray import is_qarray
from ..array.scheme import Scheme
from ..calibration.measure import Statistic
from ..calibration.observe import observe as observe_function
from ..calibration.range_rules import AbsMaxRange
from ..calibration.ranges import AbstractRange
from ..calibration.stats import Stats
from ..ops.interpret.transparent import Decoded
from ..ops.interpret.transparent import transparent as transparent_function
from ..recipe.plan import Plan
from ..recipe.plan import plan as make_plan
from ..recipe.recipe import RecipeLike
from ..training.delayed_state import DelayedState
from ..training.delayed_state import delayed_state as state_of
from ..training.lora.adapter import Adapter
from ..training.lora.adapter import init as lora_adapters
from ..training.lora.apply import apply as with_lora
from ..training.lora.merge import merge as merged_lora
from ..training.model_sparsity import ModelSparsity
from ..training.model_sparsity import sparsity_state as sparsity_of
from ..training.train import train as train_function
from . import serialization
from ._flax import flax
from .adapter import SplitModel


def _call(model: Callable[..., Any], *inputs: PyTree) -> Any:
    return model(*inputs)


def plan(model: PyTree, *inputs: PyTree, recipe: RecipeLike, fn: Callable[..., Any] | None = None) -> Plan:
    """Resolves a recipe against a model without running it, as `fb.plan`.

    >>> from flax import nnx
    >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> plan(model, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    return make_plan(*_split(model).call(fn or _call), *inputs, recipe=recipe)


def quantize(
    model: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    fn: Callable[..., Any] | None = None,
    donate: bool = False,
) -> PyTree:
    """Quantizes the parameters of a model, as `fb.quantize_params`.

    Returns:
        A new model with QArrays in its Variables, for `transparent`; metadata is kept and all other arrays are shared with `model`.

    >>> from flax import nnx
    >>> x = jnp.ones((1, 64))
    >>> model = quantize(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), x, recipe="int8")
    >>> model.kernel.get_raw_value()
    QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)
    >>> nnx.jit(transparent(lambda model, x: model(x)))(model, x).shape
    (1, 32)
    """
    serialization.register()
    return _split(model).quantize(fn or _call, *inputs, recipe=recipe, donate=donate)


def transparent(
    fn: Callable[..., Any],
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a model accept a quantized model, as `fb.transparent`, with or without jit.

    Args:
        fn: a function whose first argument is an NNX model; other arguments may be or contain NNX objects too, such as Rngs.

    Returns:
        A function of the same arguments. The Variables that `fn` changes are changed in its arguments.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> quantized = quantize(model, x, recipe="int8")
    >>> float(jnp.abs(transparent(lambda model, x: model(x))(quantized, x) - model(x)).max()) < 0.05
    True
    """
    pure = transparent_function(_pure(fn), fallback=fallback, report=report)

    @functools.wraps(fn)
    def wrapped(*args: PyTree, **kwargs: PyTree) -> Any:
        return _run(pure, args, kwargs)

    return wrapped


def train(
    fn: Callable[..., Any], recipe: RecipeLike, *, report: Callable[[Decoded], None] | None = None
) -> Callable[..., Any]:
    """Makes a function of a float model quantize its forward and backward matmuls (QAT), as `fb.train`.

    Args:
        fn: a function whose first argument is an NNX model, such as the loss that `nnx.value_and_grad` takes.

    Returns:
        A function of the same arguments, and `key=`, `delayed=` and `sparsity=` as for a function of `fb.train`. `nnx.grad`
        passes only keywords that `fn` has; give it `lambda model, x, key: trained(model, x, key=key)`. Model, gradients and
        optimizer stay those of float training.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> gradient = nnx.grad(train(lambda model, x: jnp.sum(model(x)), "w8a8"))(model, x)
    >>> gradient["kernel"].shape
    (64, 32)
    """
    pure = train_function(_pure(fn), recipe, report=report)

    @functools.wraps(fn)  # nnx.grad reads the signature
    def trained(
        *args: PyTree,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: PyTree,
    ) -> Any:
        return _run(pure, args, kwargs, key=key, delayed=delayed, sparsity=sparsity)

    return trained


def delayed_state(model: PyTree, *inputs: PyTree, recipe: RecipeLike, fn: Callable[..., Any] | None = None) -> DelayedState:
    """The initial state of delayed scaling, for `train`, as `fb.delayed_state`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> list(delayed_state(model, x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return state_of(*_split(model).call(fn or _call), *inputs, recipe=recipe)


def sparsity_state(
    model: PyTree, *inputs: PyTree, recipe: RecipeLike, fn: Callable[..., Any] | None = None
) -> ModelSparsity:
    """The initial sparsity masks, for `train`, as `fb.sparsity_state`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> recipe = fb.Recipe((fb.Rule(".*", "int8", sparsity=fb.Sparsity(2, 4)),))
    >>> state = update_sparsity(sparsity_state(model, x, recipe=recipe), model)
    >>> int(state.masks["kernel"].sum()), int((pruned(model, state).kernel[...] != 0).sum())
    (1024, 1024)
    """
    return sparsity_of(*_split(model).call(fn or _call), *inputs, recipe=recipe)


def update_sparsity(state: ModelSparsity, model: PyTree, step: Int[ArrayLike, ""] | None = None) -> ModelSparsity:
    """Updates the sparsity masks for one step, as `fb.ModelSparsity.update`."""
    return state.update(_split(model).params, step)


def pruned(model: PyTree, state: ModelSparsity) -> PyTree:
    """The sparse model, to quantize and serve, with shared other arrays, as `fb.ModelSparsity.apply`."""
    return _split(model).replaced(state.apply)


def observe(
    model: PyTree,
    batches: Iterable[PyTree],
    recipe: RecipeLike,
    *,
    fn: Callable[..., Any] | None = None,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
) -> Stats:
    """Collects activation statistics of a model over calibration batches, as `fb.observe`.

    What the model's methods change in it is discarded.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.full((1, 64), 3.0)
    >>> float(observe(model, [x, -2 * x], "w8a8")["kernel"].range.high)
    6.0
    """
    called, params, rest = _split(model).call(fn or _call)
    return observe_function(
        lambda params, *inputs: called(params, rest, *inputs), params, batches, recipe, rule=rule, collect=collect
    )


def lora_init(
    key: Key[Array, ""], model: PyTree, *inputs: PyTree, match: str, fn: Callable[..., Any] | None = None, **options: Any
) -> dict[str, Adapter]:
    """Initialises LoRA adapters (b = 0) for parameters whose path matches, as `fb.lora.init`.

    Args:
        match: a regular expression for full paths of the model's `nnx.Param`s, such as `"layers/[0-9]+/kernel"`.
        options: `rank`, `alpha`, `dtype` and `without_product` of `fb.lora.init`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    return lora_adapters(key, *_split(model).call(fn or _call), *inputs, match=match, **options)


def lora_apply(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Makes a function of a model add LoRA adapters to its parameters, as `fb.lora.apply`.

    Args:
        fn: a function whose first argument is an NNX model, quantized or not.
        options: `dropout`, `fallback` and `report` of `fb.lora.apply`.

    Returns:
        A function `(model, adapters, *args, dropout_key=None, **kwargs)`; differentiate it by `adapters`. The Variables that
        `fn` changes are changed in its arguments.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> adapters = lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    >>> adapted = lora_apply(lambda model, x: model(x).sum())
    >>> jax.grad(lambda adapters: adapted(model, adapters, x))(adapters)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    pure = with_lora(_pure(fn), **options)

    @functools.wraps(fn)
    def adapted(
        model: PyTree,
        adapters: Mapping[str, Adapter],
        *args: PyTree,
        dropout_key: Key[Array, ""] | None = None,
        **kwargs: PyTree,
    ) -> Any:
        def run(params: PyTree, *split: PyTree) -> Any:
            return pure(params, adapters, *split, dropout_key=dropout_key)

        return _run(run, (model, *args), kwargs)

    return adapted


def lora_merge(
    model: PyTree, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None = None
) -> PyTree:
    """Adds every adapter's update to its parameter, as `fb.lora.merge`.

    Returns:
        A new model, which shares arrays without an adapter with `model`.
    """
    return _split(model).replaced(functools.partial(merged_lora, adapters=adapters, scheme=scheme))


def _split(model: PyTree) -> SplitModel:
    """The values of the model's `nnx.Param`s and of its other Variables."""
    graph = _Graph.of((model,))
    return SplitModel(*graph.values(), lambda params, rest: graph.merged(params, rest)[0])


@dataclasses.dataclass(frozen=True)
class _Graph:
    """The graph definition and Variables of NNX objects; a static leaf in JAX.

    Attributes:
        definition: the graph definition.
        variables: the Variables and plain arrays by path.
    """

    definition: Any
    variables: dict[tuple[Any, ...], Any]

    @classmethod
    def of(cls, nodes: tuple[Any, ...]) -> "_Graph":
        nnx = flax("nnx")
        definition, state = nnx.split(nodes)
        return cls(definition, dict(nnx.to_flat_state(state)))

    def values(self) -> tuple[dict[Any, Any], list[Any]]:
        """The nested parameters of the first object, and the values of all other Variables."""
        params = {path[1:]: _value(x) for path, x in self.variables.items() if _is_param(path, x)}
        rest = [_value(x) for path, x in self.variables.items() if not _is_param(path, x)]
        return flax("traverse_util").unflatten_dict(params), rest

    def merged(self, params: dict[Any, Any], rest: Iterable[Any]) -> tuple[Any, ...]:
        """New objects with these values in their Variables."""
        nnx, others = flax("nnx"), iter(rest)

        def filled(path: tuple[Any, ...], variable: PyTree) -> Any:
            if _is_param(path, variable):
                value = functools.reduce(operator.getitem, path[1:], params)
            else:
                value = next(others)
            if isinstance(variable, nnx.Variable):
                return variable.replace(value)
            return value

        state = nnx.from_flat_state([(path, filled(path, variable)) for path, variable in self.variables.items()])
        return nnx.merge(self.definition, state)


def _is_param(path: tuple[Any, ...], variable: object) -> bool:
    return path[0] == 0 and isinstance(variable, flax("nnx").Param)


def _value(variable: PyTree) -> PyTree:
    """The raw value of a Variable, or a plain array."""
    if isinstance(variable, flax("nnx").Variable):
        return variable.get_raw_value()
    return variable


def _changed(nodes: tuple[Any, ...], before: dict[tuple[Any, ...], Any]) -> Any:
    """The state of new Variables and of those with another array than before."""
    after = _Graph.of(nodes).variables
    new = [(path, x) for path, x in after.items() if path not in before or _value(x) is not before[path]]
    return flax("nnx").from_flat_state(new)


def _pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a function of its objects' values, which also returns the changed state."""

    def pure(params: PyTree, rest: PyTree, graph: _Graph, filled: Callable[..., Any], leaves: PyTree) -> Any:
        nodes = graph.merged(params, rest)
        before = {path: _value(variable) for path, variable in _Graph.of(nodes).variables.items()}
        args, kwargs = filled(nodes, leaves)
        return fn(*args, **kwargs), _changed(nodes, before)

    return pure


def _run(pure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: object) -> Any:
    """Calls a transformed `_pure(fn)` with the arguments of `fn`; writes the changes into its objects."""
    nnx = flax("nnx")

    def is_object(x: object) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable)

    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: is_object(x) or is_qarray(x))
    places = [i for i, leaf in enumerate(leaves) if is_object(leaf)]
    nodes = tuple(leaves[i] for i in places)

    def filled(nodes: tuple[Any, ...], leaves: list[Any]) -> Any:
        found = dict(zip(places, nodes, strict=True))
        return jax.tree.unflatten(treedef, [found.get(i, leaf) for i, leaf in enumerate(leaves)])

    graph = _Graph.of(nodes)
    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]
    result, changes = pure(*graph.values(), graph, filled, others, **settings)
    nnx.update(nodes, changes)
    return result

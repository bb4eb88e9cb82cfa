"""Flax NNX: models with quantized arrays in their Variables, and functions of models that change them as they run.

Rules match the paths of the `nnx.Param`s of the model, `layers/0/mlp/wi/kernel`. What a function changes in its models (batch
statistics, counters of random numbers, caches) is written back, as under `nnx.jit`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ..array import is_qarray
from ..ops import transparent as transparent_function
from ..ops.transparent import Decoded
from ..recipe import Plan
from ..recipe import plan as make_plan
from ..statistics import AbsMaxRange, AbstractRange, Stats
from ..statistics import observe as observe_function
from ..statistics.measure import Statistic
from ..training import DelayedState, ModelSparsity, lora
from ..training import delayed_state as state_of
from ..training import sparsity_state as sparsity_of
from ..training import train as train_function
from . import serialization, tree
from ._flax import flax


def plan(model: Any, *inputs: Any, recipe: Any, fn: Callable[..., Any] | None = None) -> Plan:
    """Resolves a recipe against a model: what happens to every parameter, and why.

    Args:
        model: the NNX model. It is not changed.
        inputs: example inputs; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        fn: the function whose products decide the axes, `fn(model, *inputs)`; None calls the model.

    Returns:
        The plan, with a row for every `nnx.Param`.

    Raises:
        QuantError: for what `fb.plan` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import nnx
    >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> plan(model, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    call = _called if fn is None else fn
    graph = _Graph.of((model,))
    params, rest = graph.values()
    return make_plan(
        lambda params, rest, *inputs: call(*graph.merged(params, rest), *inputs), params, rest, *inputs, recipe=recipe
    )


def quantize(model: Any, *inputs: Any, recipe: Any, fn: Callable[..., Any] | None = None, donate: bool = False) -> Any:
    """Quantizes the parameters of a model.

    Args:
        model: the NNX model.
        inputs: example inputs; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan, as `plan` gives it.
        fn: the function whose products decide the axes, `fn(model, *inputs)`; None calls the model.
        donate: whether each float array is deleted as soon as its codes are there, as in `tree.quantize`, so that no more than
            the model and one parameter are held. The model that was handed in cannot be used any more.

    Returns:
        A new model with QArrays in its Variables, whose metadata is kept; all other arrays are those of `model`, not copies.
        Call it through `transparent`.

    Raises:
        QuantError: for what `fb.plan` and `fb.quantize_params` refuse.
        UnsupportedError: when flax is not installed, and for what `fb.quantize_params` refuses.

    >>> from flax import nnx
    >>> x = jnp.ones((1, 64))
    >>> model = quantize(nnx.Linear(64, 32, rngs=nnx.Rngs(0)), x, recipe="int8")
    >>> model.kernel.get_raw_value()
    QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)
    >>> nnx.jit(transparent(lambda model, x: model(x)))(model, x).shape
    (1, 32)
    """
    serialization.register()
    if not isinstance(recipe, Plan):
        recipe = plan(model, *inputs, recipe=recipe, fn=fn)
    graph = _Graph.of((model,))
    params, rest = graph.values()
    return graph.merged(tree.quantize(None, params, recipe=recipe, donate=donate), rest)[0]


def transparent(
    fn: Callable[..., Any], *, fallback: Any = "error", report: Callable[[Decoded], None] | None = None
) -> Callable[..., Any]:
    """Makes a function of a model take a quantized one; works inside and outside `nnx.jit` and `jax.jit`.

    Args:
        fn: a function whose first argument is an NNX model; other arguments may be or hold NNX objects too, such as Rngs.
        fallback: as in `fb.transparent`.
        report: as in `fb.transparent`.

    Returns:
        A function of the same arguments. The Variables that `fn` changes are changed in its arguments.

    Raises:
        UnsupportedError: when flax is not installed, and as in `fb.transparent`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> quantized = quantize(model, x, recipe="int8")
    >>> float(jnp.abs(transparent(lambda model, x: model(x))(quantized, x) - model(x)).max()) < 0.05
    True
    """
    pure = transparent_function(_pure(fn), fallback=fallback, report=report)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return _run(pure, args, kwargs)

    return wrapped


def train(fn: Callable[..., Any], recipe: Any, *, report: Callable[[Decoded], None] | None = None) -> Callable[..., Any]:
    """Makes a function of a float model compute its products as a recipe says, forwards and backwards.

    Args:
        fn: a function whose first argument is an NNX model, such as the loss that `nnx.value_and_grad` takes.
        recipe: a Recipe, or anything that `fb.recipe` takes. Rules match the paths of the model's `nnx.Param`s.
        report: as in `fb.train`.

    Returns:
        A function of the same arguments, `key=`: a JAX random key, needed when a policy rounds stochastically or rotates;
        `delayed=`: the state of `delayed_state`, needed for delayed scaling; and `sparsity=`: the state of `sparsity_state`,
        needed for sparsity. `nnx.grad` passes no keyword that `fn` has not; give it
        `lambda model, x, key: trained(model, x, key=key)`. The model, its gradients and its optimizer stay those of float
        training.

    Raises:
        QuantError: for what `fb.train` refuses.
        UnsupportedError: when flax is not installed, and for what `fb.train` refuses.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> gradient = nnx.grad(train(lambda model, x: jnp.sum(model(x)), "w8a8"))(model, x)
    >>> gradient["kernel"].shape
    (64, 32)
    """
    pure = train_function(_pure(fn), recipe, report=report)

    @functools.wraps(fn)  # nnx.grad reads the signature
    def trained(*args: Any, key: Any = None, delayed: Any = None, sparsity: Any = None, **kwargs: Any) -> Any:
        return _run(pure, args, kwargs, key=key, delayed=delayed, sparsity=sparsity)

    return trained


def _of_values(make: Callable[..., Any], model: Any, inputs: Any, recipe: Any, fn: Callable[..., Any] | None) -> Any:
    """What `make` gives for the function of a model's parameters and its other values."""
    call, graph = _called if fn is None else fn, _Graph.of((model,))
    params, rest = graph.values()

    def pure(params: Any, rest: Any, *inputs: Any) -> Any:
        return call(*graph.merged(params, rest), *inputs)

    return make(pure, params, rest, *inputs, recipe=recipe)


def delayed_state(model: Any, *inputs: Any, recipe: Any, fn: Callable[..., Any] | None = None) -> DelayedState:
    """The state of delayed scaling before the first step of a model under a recipe, for what `train` gives.

    Args:
        model: the NNX model.
        inputs: example inputs; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        fn: the function that is trained, `fn(model, *inputs)`; None calls the model.

    Returns:
        The state, as `fb.delayed_state` gives it.

    Raises:
        QuantError: for what `fb.delayed_state` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> list(delayed_state(model, x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return _of_values(state_of, model, inputs, recipe, fn)


def sparsity_state(model: Any, *inputs: Any, recipe: Any, fn: Callable[..., Any] | None = None) -> ModelSparsity:
    """The sparsity of a model under a recipe before the first step, for what `train` gives.

    Args:
        model: the NNX model.
        inputs: example inputs; arrays or `jax.ShapeDtypeStruct`s.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        fn: the function that is trained, `fn(model, *inputs)`; None calls the model.

    Returns:
        The state, as `fb.sparsity_state` gives it.

    Raises:
        QuantError: for what `fb.sparsity_state` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> recipe = fb.Recipe((fb.Rule(".*", "int8", sparsity=fb.Sparsity(2, 4)),))
    >>> state = update_sparsity(sparsity_state(model, x, recipe=recipe), model)
    >>> int(state.masks["kernel"].sum()), int((pruned(model, state).kernel[...] != 0).sum())
    (1024, 1024)
    """
    return _of_values(sparsity_of, model, inputs, recipe, fn)


def update_sparsity(state: ModelSparsity, model: Any, step: Any = None) -> ModelSparsity:
    """The sparsity for one step, as `ModelSparsity.update` gives it.

    Args:
        state: the state before.
        model: the NNX model, dense.
        step: the number of this step; None counts the updates from 0.

    Returns:
        The state for this step.

    Raises:
        QuantError: when the model is another one.
        UnsupportedError: when flax is not installed.
    """
    return state.update(_Graph.of((model,)).values()[0], step)


def pruned(model: Any, state: ModelSparsity) -> Any:
    """The model with zeros where the masks prune it, as `train` computed with it: to quantize and to serve.

    Args:
        model: the NNX model. It is not changed.
        state: the sparsity.

    Returns:
        A new model; all arrays but the sparse parameters are those of `model`, not copies.

    Raises:
        QuantError: when the model is another one.
        UnsupportedError: when flax is not installed.
    """
    graph = _Graph.of((model,))
    params, rest = graph.values()
    return graph.merged(state.apply(params), rest)[0]


def observe(
    model: Any,
    batches: Iterable[Any],
    recipe: Any,
    *,
    fn: Callable[..., Any] | None = None,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
) -> Stats:
    """Runs a model over batches, and measures what each parameter that a recipe quantizes meets in its products.

    Args:
        model: the NNX model, floating. What its methods change in it stays as it was.
        batches: for each batch the tuple of the model's inputs, or the one input.
        recipe: a Recipe, or anything that `fb.recipe` takes.
        fn: the function that runs it, `fn(model, *inputs)`; None calls the model.
        rule: how ranges are estimated, as in `fb.observe`.
        collect: the statistics, as in `fb.observe`.

    Returns:
        The statistics, as `fb.observe` gives them.

    Raises:
        QuantError: for what `fb.observe` refuses.
        UnsupportedError: when flax is not installed, and for what `fb.observe` refuses.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.full((1, 64), 3.0)
    >>> float(observe(model, [x, -2 * x], "w8a8")["kernel"].range.high)
    6.0
    """
    call = _called if fn is None else fn
    graph = _Graph.of((model,))
    params, rest = graph.values()

    def called(params: Any, *inputs: Any) -> Any:
        return call(*graph.merged(params, rest), *inputs)

    return observe_function(called, params, batches, recipe, rule=rule, collect=collect)


def lora_init(
    key: Key[Array, ""], model: Any, *inputs: Any, match: str, fn: Callable[..., Any] | None = None, **options: Any
) -> dict[str, lora.Adapter]:
    """LoRA adapters for the parameters of a model whose path matches, at first without effect.

    Args:
        key: a JAX random key.
        model: the NNX model, quantized or not. It is not changed.
        inputs: example inputs; arrays or `jax.ShapeDtypeStruct`s.
        match: a regular expression for whole paths of the model's `nnx.Param`s, such as `"layers/[0-9]+/kernel"`.
        fn: the function whose products decide the axes, `fn(model, *inputs)`; None calls the model.
        options: `rank`, `alpha`, `dtype` and `without_product` of `fb.lora.init`.

    Returns:
        The adapters by path, as `fb.lora.init` gives them.

    Raises:
        QuantError: for what `fb.lora.init` refuses.
        UnsupportedError: when flax is not installed.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    call, graph = _called if fn is None else fn, _Graph.of((model,))
    params, rest = graph.values()

    def pure(params: Any, rest: Any, *inputs: Any) -> Any:
        return call(*graph.merged(params, rest), *inputs)

    return lora.init(key, pure, params, rest, *inputs, match=match, **options)


def lora_apply(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Makes a function of a model compute with adapters added to its parameters, without changing its code.

    Args:
        fn: a function whose first argument is an NNX model, quantized or not.
        options: `dropout`, `fallback` and `report` of `fb.lora.apply`.

    Returns:
        A function `(model, adapters, *args, dropout_key=None, **kwargs)`; differentiate it by `adapters`. The Variables that
        `fn` changes are changed in its arguments.

    Raises:
        QuantError: for what `fb.lora.apply` refuses.
        UnsupportedError: when flax is not installed, and as in `fb.lora.apply`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> adapters = lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    >>> adapted = lora_apply(lambda model, x: model(x).sum())
    >>> jax.grad(lambda adapters: adapted(model, adapters, x))(adapters)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    pure = lora.apply(_pure(fn), **options)

    @functools.wraps(fn)
    def adapted(model: Any, adapters: Mapping[str, lora.Adapter], *args: Any, dropout_key: Any = None, **kwargs: Any) -> Any:
        def run(params: Any, *split: Any) -> Any:
            return pure(params, adapters, *split, dropout_key=dropout_key)

        return _run(run, (model, *args), kwargs)

    return adapted


def lora_merge(model: Any, adapters: Mapping[str, lora.Adapter], *, scheme: Any = None) -> Any:
    """A model with the update of every adapter added to its parameter.

    Args:
        model: the NNX model. It is not changed.
        adapters: by path, like those of `lora_init`.
        scheme: as in `fb.lora.merge`: None gives float arrays, "base" quantizes again as before, a scheme quantizes by it.

    Returns:
        A new model; arrays without an adapter are those of `model`, not copies.

    Raises:
        QuantError: for what `fb.lora.merge` refuses.
        UnsupportedError: when flax is not installed.
    """
    graph = _Graph.of((model,))
    params, rest = graph.values()
    return graph.merged(lora.merge(params, adapters, scheme=scheme), rest)[0]


def _called(model: Any, *inputs: Any) -> Any:
    return model(*inputs)


@dataclasses.dataclass(frozen=True)
class _Graph:
    """NNX objects taken apart; to JAX a leaf that is no array.

    Attributes:
        definition: what the objects are, without their Variables.
        variables: the Variables of the objects, and arrays beside them, by their paths.
    """

    definition: Any
    variables: dict[tuple[Any, ...], Any]

    @classmethod
    def of(cls, nodes: tuple[Any, ...]) -> "_Graph":
        nnx = flax("nnx")
        definition, state = nnx.split(nodes)
        return cls(definition, dict(nnx.to_flat_state(state)))

    def values(self) -> tuple[dict[Any, Any], list[Any]]:
        """The parameters of the first object, in nested dictionaries, and the values of all other Variables."""
        params: dict[Any, Any] = {}
        rest = []
        for path, variable in self.variables.items():
            if _is_param(path, variable):
                place = params
                for name in path[1:-1]:
                    place = place.setdefault(name, {})
                place[path[-1]] = _value(variable)
            else:
                rest.append(_value(variable))
        return params, rest

    def merged(self, params: dict[Any, Any], rest: Iterable[Any]) -> tuple[Any, ...]:
        """The objects again, new ones, with other values in their Variables."""
        nnx, others = flax("nnx"), iter(rest)

        def filled(path: tuple[Any, ...], variable: Any) -> Any:
            if _is_param(path, variable):
                value = functools.reduce(operator.getitem, path[1:], params)
            else:
                value = next(others)
            return variable.replace(value) if isinstance(variable, nnx.Variable) else value

        state = nnx.from_flat_state([(path, filled(path, variable)) for path, variable in self.variables.items()])
        return nnx.merge(self.definition, state)


def _is_param(path: tuple[Any, ...], variable: Any) -> bool:
    return path[0] == 0 and isinstance(variable, flax("nnx").Param)


def _value(variable: Any) -> Any:
    """The value of a Variable, whatever it is; an array that stands without one is its own."""
    return variable.get_raw_value() if isinstance(variable, flax("nnx").Variable) else variable


def _held(nodes: tuple[Any, ...]) -> dict[tuple[Any, ...], Any]:
    """The value of each Variable of the objects at this moment, by its path."""
    return {path: _value(variable) for path, variable in _Graph.of(nodes).variables.items()}


def _changed(nodes: tuple[Any, ...], before: dict[tuple[Any, ...], Any]) -> Any:
    """The state of the Variables of the objects that are new, or hold another array than before."""
    after = _Graph.of(nodes).variables
    new = [(path, x) for path, x in after.items() if path not in before or _value(x) is not before[path]]
    return flax("nnx").from_flat_state(new)


def _pure(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a function of the values of its objects' Variables, which also gives the state that it changed."""

    def pure(params: Any, rest: Any, graph: _Graph, filled: Callable[..., Any], leaves: Any) -> Any:
        nodes = graph.merged(params, rest)
        before = _held(nodes)
        args, kwargs = filled(nodes, leaves)
        return fn(*args, **kwargs), _changed(nodes, before)

    return pure


def _run(pure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any) -> Any:
    """Calls what became of `_pure(fn)` with the arguments of `fn`, and writes the changes into their objects."""
    nnx = flax("nnx")

    def is_object(x: Any) -> bool:
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

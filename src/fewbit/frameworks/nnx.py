"""Quantized and quantization-aware Flax NNX models.

Rules match the paths of the `nnx.Param`s of the model, such as `layers/0/mlp/wi/kernel`. What a function changes in its models
(batch statistics, RNG counters, caches, attributes such as `deterministic`, submodules) is written back, as under `nnx.jit`.
"""

import dataclasses
import functools
import inspect
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int, Key, PyTree

from .._wrapping import refuse_shared_keywords, signature_of
from ..array.qarray import is_qarray
from ..array.scheme import Scheme
from ..calibration.measure import Statistic
from ..calibration.range_rules import AbsMaxRange
from ..calibration.ranges import AbstractRange
from ..calibration.stats import Stats
from ..errors import QuantError
from ..ops.interpret.transparent import Decoded
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from ..recipe.quantize_row import SupportsObservations
from ..recipe.recipe import RecipeLike
from ..training.delayed_state import DelayedState
from ..training.lora.adapter import Adapter
from ..training.model_sparsity import ModelSparsity
from . import serialization
from ._flax import flax
from .adapter import SplitFunction, SplitModel

_R = TypeVar("_R")

_Call: TypeAlias = tuple[tuple[PyTree, ...], OrderedDict[str, PyTree]]
"""The arguments of a function, which may contain NNX objects: positional ones and keywords, in the order of its parameters."""


def _call(model: Callable[..., Any], *inputs: PyTree) -> Any:
    return model(*inputs)


def plan(model: PyTree, *inputs: PyTree, recipe: RecipeLike, fn: Callable[..., Any] | None = None) -> Plan:
    """Resolves a recipe against a model without running it, as `fb.plan`.

    >>> from flax import nnx
    >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    >>> plan(model, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    return _split(model).plan(fn or _call, *inputs, recipe=recipe)


def quantize(
    model: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    fn: Callable[..., Any] | None = None,
    method: AbstractMethod = NEAREST,
    stats: SupportsObservations | None = None,
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
    return _split(model).quantize(fn or _call, *inputs, recipe=recipe, method=method, stats=stats, donate=donate)


def correct_biases(
    model: PyTree,
    quantized: PyTree,
    plan: Plan,
    stats: SupportsObservations,
    *,
    biases: Mapping[str, str | None] = types.MappingProxyType({}),
) -> PyTree:
    """Adds to each bias the mean error of its quantized product, as `fb.methods.correct_biases`.

    Args:
        model: the float model.
        quantized: the quantized model.
        stats: what `observe` collected with `collect=("sum",)`.

    Returns:
        A new model with other biases; all other arrays are shared with `quantized`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.linspace(1, 2, 64)[None]
    >>> planned, stats = plan(model, x, recipe="int4"), observe(model, [x], "int4", collect=("sum",))
    >>> corrected = correct_biases(model, quantize(model, recipe=planned), planned, stats)
    >>> bool(jnp.allclose(transparent(lambda model, x: model(x))(corrected, x), model(x), atol=1e-4))
    True
    """
    return _split(quantized).correct_biases(_split(model).params, plan, stats, biases=biases)


def transparent(
    fn: Callable[..., Any],
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a model accept a quantized model, as `fb.transparent`, with or without jit.

    Args:
        fn: a function of an NNX model; other arguments may be or contain NNX objects too, such as Rngs.

    Returns:
        A function of the same arguments. What `fn` changes in their NNX objects is changed there.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> quantized = quantize(model, x, recipe="int8")
    >>> float(jnp.abs(transparent(lambda model, x: model(x))(quantized, x) - model(x)).max()) < 0.05
    True
    """
    run, signature = _with_changes(fn).transparent(fallback=fallback, report=report), signature_of(fn)

    @functools.wraps(fn)
    def wrapped(*args: PyTree, **kwargs: PyTree) -> Any:
        call = _ordered(signature, args, kwargs)
        return _written(call, *run(call))

    return wrapped


def train(
    fn: Callable[..., Any], recipe: RecipeLike, *, report: Callable[[Decoded], None] | None = None
) -> Callable[..., Any]:
    """Makes a function of a float model quantize its forward and backward matmuls (QAT), as `fb.train`.

    Args:
        fn: a function such as the loss that `nnx.value_and_grad` takes. The first argument with NNX objects is trained: a
            model, or a tree of models, such as `{"encoder": ..., "decoder": ...}` with paths such as `encoder/kernel`.

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
    run, signature = _with_changes(fn).train(recipe, report=report), signature_of(fn)

    @functools.wraps(fn)  # nnx.grad reads the signature
    def trained(
        *args: PyTree,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: PyTree,
    ) -> Any:
        refuse_shared_keywords(signature, args, {"key": key, "delayed": delayed, "sparsity": sparsity}, "nnx.train")
        call = _ordered(signature, args, kwargs)
        return _written(call, *run(call, key=key, delayed=delayed, sparsity=sparsity))

    return trained


def delayed_state(model: PyTree, *inputs: PyTree, recipe: RecipeLike, fn: Callable[..., Any] | None = None) -> DelayedState:
    """The initial state of delayed scaling, for `train`, as `fb.delayed_state`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> list(delayed_state(model, x, recipe="te_fp8_delayedscaling").products)
    ['kernel']
    """
    return _split(model).delayed_state(fn or _call, *inputs, recipe=recipe)


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
    return _split(model).sparsity_state(fn or _call, *inputs, recipe=recipe)


def update_sparsity(state: ModelSparsity, model: PyTree, step: Int[ArrayLike, ""] | None = None) -> ModelSparsity:
    """Updates the sparsity masks for one step, as `fb.ModelSparsity.update`."""
    return _split(model).update_sparsity(state, step)


def pruned(model: PyTree, state: ModelSparsity) -> PyTree:
    """The sparse model, to quantize and serve, with shared other arrays, as `fb.ModelSparsity.apply`."""
    return _split(model).pruned(state)


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
    return _split(model).observe(fn or _call, batches, recipe, rule=rule, collect=collect)


def lora_init(
    key: Key[Array, ""],
    model: PyTree,
    *inputs: PyTree,
    match: str,
    rank: int,
    fn: Callable[..., Any] | None = None,
    alpha: float | None = None,
    dtype: DTypeLike = jnp.float32,
    without_product: Literal["error", "skip"] = "error",
    axis: int | tuple[int, ...] | None = None,
) -> dict[str, Adapter]:
    """Initialises LoRA adapters (b = 0) for parameters whose path matches, as `fb.lora.init`.

    Args:
        match: a regular expression for full paths of the model's `nnx.Param`s, such as `"layers/[0-9]+/kernel"`.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    return _split(model).lora_init(
        key,
        fn or _call,
        *inputs,
        match=match,
        rank=rank,
        alpha=alpha,
        dtype=dtype,
        without_product=without_product,
        axis=axis,
    )


def lora_apply(
    fn: Callable[..., Any],
    *,
    dropout: float = 0.0,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a model add LoRA adapters to its parameters, as `fb.lora.apply`.

    Args:
        fn: a function whose first argument is an NNX model, or a tree of models, quantized or not.

    Returns:
        A function `(model, adapters, *args, dropout_key=None, **kwargs)`; differentiate it by `adapters`. What `fn`
        changes in NNX objects of its arguments is changed there.

    >>> from flax import nnx
    >>> model, x = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), jnp.ones((1, 64))
    >>> adapters = lora_init(jax.random.key(0), model, x, match="kernel", rank=4)
    >>> adapted = lora_apply(lambda model, x: model(x).sum())
    >>> jax.grad(lambda adapters: adapted(model, adapters, x))(adapters)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    run, signature = _with_changes(fn).lora_apply(dropout=dropout, fallback=fallback, report=report), signature_of(fn)

    @functools.wraps(fn)
    def adapted(
        model: PyTree,
        adapters: Mapping[str, Adapter],
        *args: PyTree,
        dropout_key: Key[Array, ""] | None = None,
        **kwargs: PyTree,
    ) -> Any:
        refuse_shared_keywords(signature, (model, *args), {"dropout_key": dropout_key}, "nnx.lora_apply")
        call = _ordered(signature, (model, *args), kwargs)
        return _written(call, *run(call, adapters, dropout_key=dropout_key))

    return adapted


def lora_merge(
    model: PyTree, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None = None
) -> PyTree:
    """Adds every adapter's update to its parameter, as `fb.lora.merge`.

    Returns:
        A new model, which shares arrays without an adapter with `model`.
    """
    return _split(model).lora_merge(adapters, scheme=scheme)


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
        if nodes and isinstance(nodes[0], nnx.Param):
            raise QuantError(
                "the model is an nnx.Param, which has no path; pass a module, or a dict such as {'kernel': param}"
            )
        definition, state = nnx.split(nodes)
        return cls(definition, dict(nnx.to_flat_state(state)))

    def values(self) -> tuple[dict[Any, Any], list[Any]]:
        """The nested parameters of the first node, and the values of all other Variables."""
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


def _ordered(signature: inspect.Signature | None, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> _Call:
    """A call with its keywords in the order of the function's parameters, the unknown ones last."""
    named = () if signature is None else tuple(name for name in signature.parameters if name in kwargs)
    return args, OrderedDict((name, kwargs[name]) for name in dict.fromkeys((*named, *kwargs)))


def _split_call(call: _Call) -> SplitModel:
    """The parameters of the first argument with NNX objects, and all other values.

    Parameters are `nnx.Param`s, with the paths that `_split` gives them. The objects of the call may share Variables.
    """
    leaves, treedef = jax.tree.flatten(call, is_leaf=_is_leaf)
    objects = {place: leaf for place, leaf in enumerate(leaves) if _is_object(leaf)}
    args, kwargs = call
    model = next((argument for argument in (*args, *kwargs.values()) if _objects(argument)), ())
    others = tuple(objects.values())[len(_objects(model)) :]
    graph = _Graph.of((jax.tree.map(lambda x: x if _is_object(x) else None, model, is_leaf=_is_leaf), *others))
    params, values = graph.values()

    def rebuild(params: PyTree, rest: tuple[list[Any], list[Any]]) -> _Call:
        values, leaves = rest[0], list(rest[1])
        for place, node in zip(objects, _objects(graph.merged(params, values)), strict=True):  # ascending
            leaves.insert(place, node)
        return treedef.unflatten(leaves)

    without_objects = [leaf for place, leaf in enumerate(leaves) if place not in objects]
    return SplitModel(params, (values, without_objects), rebuild)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Structure:
    """The structure of the NNX objects of a call, after a function changed it.

    Attributes:
        definition: the graph definition, with the indexes that the objects had before the call.
        paths: the paths of the Variables and plain arrays, in the order of the definition.
    """

    definition: Any
    paths: tuple[tuple[Any, ...], ...]


_Changes: TypeAlias = tuple[_Structure | None, PyTree]
"""The new structure of the NNX objects of a call, where it changed, and the state of new Variables and of changed ones."""


def _with_changes(fn: Callable[..., _R]) -> SplitFunction[tuple[_R, _Changes]]:
    """`fn` as a function of a call, which also returns what it changed in the objects of the call.

    Those are the state of new Variables and of those with another array, and the structure, where it is another one.
    """

    def changing(call: _Call) -> tuple[_R, _Changes]:
        nnx = flax("nnx")
        args, kwargs = call
        objects = _objects(call)
        before = {path: _value(x) for path, x in _Graph.of(objects).variables.items()}
        definition, _, references = _flattened(objects)
        result = fn(*args, **kwargs)
        after = _Graph.of(objects).variables
        changed = nnx.from_flat_state(
            [(path, x) for path, x in after.items() if path not in before or _value(x) is not before[path]]
        )
        if _flattened(objects)[0] == definition:
            return result, (None, changed)
        definition, state = nnx.flatten(objects, ref_outer_index=references)
        return result, (_Structure(definition, tuple(state.paths)), changed)

    return SplitFunction(changing, _split_call)


def _written(call: _Call, result: _R, changes: _Changes) -> _R:
    """The result, after the changes are written into the objects of the call."""
    nnx, objects, (structure, state) = flax("nnx"), _objects(call), changes
    if structure is None:
        nnx.update(objects, state)
        return result
    _, variables, references = _flattened(objects)
    variables |= dict(nnx.to_flat_state(state))
    nnx.unflatten(
        structure.definition,
        [variables[path] for path in structure.paths],
        outer_index_outer_ref={index: reference for reference, index in references.items()},
    )
    return result


def _flattened(objects: tuple[PyTree, ...]) -> tuple[Any, dict[tuple[Any, ...], Any], Mapping[Any, int]]:
    """The graph definition of NNX objects, their Variables and plain arrays by path, and the index of each object."""
    with flax("nnx").split_context() as context:
        definition, state = context.flatten(objects)
        return definition, dict(zip(state.paths, state.leaves, strict=True)), context.ref_index


def _objects(tree: PyTree) -> tuple[PyTree, ...]:
    """The NNX objects of a call, or of an argument, in order."""
    return tuple(leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_leaf) if _is_object(leaf))


def _is_object(x: object) -> bool:
    nnx = flax("nnx")
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_leaf(x: object) -> bool:
    return _is_object(x) or is_qarray(x)

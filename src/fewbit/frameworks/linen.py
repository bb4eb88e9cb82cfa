"""Quantized and quantization-aware Flax Linen modules.

Rules match the paths below the collection `params`, such as `decoder/layers_0/mlp/wi/kernel`; other collections are kept. Boxes
of sharding metadata (`nn.Partitioned`, `nn.LogicallyPartitioned`) are kept and do not appear in paths.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

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
from ..ops.interpret.transparent import Decoded, transparent
from ..recipe.method import NEAREST, AbstractMethod
from ..recipe.plan import Plan
from ..recipe.quantize_row import SupportsObservations
from ..recipe.recipe import RecipeLike
from ..training.delayed_state import DelayedState
from ..training.lora.adapter import Adapter
from ..training.model_sparsity import ModelSparsity
from . import serialization
from ._flax import LinenModule, flax
from .adapter import SplitFunction, SplitModel


def plan(module: LinenModule, variables: PyTree, *inputs: PyTree, recipe: RecipeLike, **kwargs: object) -> Plan:
    """Resolves a recipe against a module without running it, as `fb.plan`.

    >>> from flax import linen
    >>> dense = linen.Dense(32)
    >>> variables = dense.init(jax.random.key(0), jnp.ones((1, 64)))
    >>> plan(dense, variables, jnp.ones((1, 64)), recipe="int8")["kernel"].axis
    (-2,)
    """
    return _split(variables).plan(module.apply, *inputs, recipe=recipe, **kwargs)


def quantize(
    module: LinenModule,
    variables: PyTree,
    *inputs: PyTree,
    recipe: RecipeLike | Plan,
    method: AbstractMethod = NEAREST,
    stats: SupportsObservations | None = None,
    donate: bool = False,
    **kwargs: object,
) -> PyTree:
    """Quantizes a module's parameters, as `fb.quantize_params`.

    Args:
        method: how scales and codes are chosen, as in `fb.quantize_params`. It is not the `method` of `module.apply`: pass
            `recipe=plan(..., method=...)` for a method of the module.

    Returns:
        The variables with QArrays inside the same boxes, for `apply`.

    Raises:
        QuantError: for a `method` of the module.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = quantize(dense, dense.init(jax.random.key(0), x), x, recipe="int8")
    >>> variables["params"]["kernel"]
    QArray(int8, float32[64, 32], 2,176 bytes, 8.500 bits/weight)
    >>> apply(dense)(variables, x).shape
    (1, 32)
    """
    serialization.register()
    if not isinstance(method, AbstractMethod):
        raise QuantError(
            f"method is {method!r}; linen.quantize takes a quantization method, such as fb.methods.GPTQ(). For a method of the "
            "module, pass recipe=linen.plan(module, variables, ..., method=...)"
        )
    return _split(variables).quantize(
        module.apply, *inputs, recipe=recipe, method=method, stats=stats, donate=donate, **kwargs
    )


def correct_biases(
    variables: PyTree,
    quantized: PyTree,
    plan: Plan,
    stats: SupportsObservations,
    *,
    biases: Mapping[str, str | None] = types.MappingProxyType({}),
) -> PyTree:
    """Adds to each bias the mean error of its quantized product, as `fb.methods.correct_biases`.

    Args:
        variables: the float variables.
        quantized: the quantized variables.
        stats: what `observe` collected with `collect=("sum",)`.

    Returns:
        The quantized variables with other biases, inside the same boxes.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.linspace(1, 2, 64)[None]
    >>> variables = dense.init(jax.random.key(0), x)
    >>> planned, stats = plan(dense, variables, x, recipe="int4"), observe(dense, variables, [x], "int4", collect=("sum",))
    >>> corrected = correct_biases(variables, quantize(dense, variables, recipe=planned), planned, stats)
    >>> bool(jnp.allclose(apply(dense)(corrected, x), dense.apply(variables, x), atol=1e-4))
    True
    """
    return _split(quantized).correct_biases(_split(variables).params, plan, stats, biases=biases)


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
    trained = SplitFunction(module.apply, _split).train(recipe, report=report)

    # As for `module.apply`, the variables may be a keyword argument.
    def applied(
        variables: PyTree,
        *args: PyTree,
        key: Key[Array, ""] | None = None,
        delayed: DelayedState | None = None,
        sparsity: ModelSparsity | None = None,
        **kwargs: PyTree,
    ) -> Any:
        passed = {"key": key, "delayed": delayed, "sparsity": sparsity}
        refuse_shared_keywords(_signature(module, kwargs.get("method")), args, passed, "linen.train")
        return trained(variables, *args, **passed, **kwargs)

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
    return _split(variables).delayed_state(module.apply, *inputs, recipe=recipe, **kwargs)


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
    return _split(variables).sparsity_state(module.apply, *inputs, recipe=recipe, **kwargs)


def update_sparsity(state: ModelSparsity, variables: PyTree, step: Int[ArrayLike, ""] | None = None) -> ModelSparsity:
    """Updates the sparsity masks for one step, as `fb.ModelSparsity.update`."""
    return _split(variables).update_sparsity(state, step)


def pruned(variables: PyTree, state: ModelSparsity) -> PyTree:
    """The sparse variables, to quantize and serve, as `fb.ModelSparsity.apply`."""
    return _split(variables).pruned(state)


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
    return _split(variables).observe(module.apply, batches, recipe, rule=rule, collect=collect, **kwargs)


def lora_init(
    key: Key[Array, ""],
    module: LinenModule,
    variables: PyTree,
    *inputs: PyTree,
    match: str,
    rank: int,
    alpha: float | None = None,
    dtype: DTypeLike = jnp.float32,
    without_product: Literal["error", "skip"] = "error",
    axis: int | tuple[int, ...] | None = None,
    **kwargs: object,
) -> dict[str, Adapter]:
    """Initialises LoRA adapters (b = 0) for parameters whose path matches, as `fb.lora.init`.

    Args:
        match: a regular expression for full paths below the collection `params`, such as `"layers_[0-9]+/kernel"`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> lora_init(jax.random.key(0), dense, dense.init(jax.random.key(0), x), x, match="kernel", rank=4)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    return _split(variables).lora_init(
        key,
        module.apply,
        *inputs,
        match=match,
        rank=rank,
        alpha=alpha,
        dtype=dtype,
        without_product=without_product,
        axis=axis,
        **kwargs,
    )


def lora_apply(
    module: LinenModule,
    *,
    dropout: float = 0.0,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """`module.apply` that adds LoRA adapters to the parameters, quantized or not, as `fb.lora.apply`.

    Returns:
        A function `(variables, adapters, *args, dropout_key=None, **kwargs)`, with the other arguments of `module.apply`;
        differentiate it by `adapters`.

    >>> from flax import linen
    >>> dense, x = linen.Dense(32), jnp.ones((1, 64))
    >>> variables = quantize(dense, dense.init(jax.random.key(0), x), x, recipe="nf4")
    >>> adapters = lora_init(jax.random.key(1), dense, variables, x, match="kernel", rank=4)
    >>> jax.grad(lambda adapters: lora_apply(dense)(variables, adapters, x).sum())(adapters)
    {'kernel': Adapter(a=[64, 4], b=[4, 32], alpha=4)}
    """
    run = SplitFunction(module.apply, _split).lora_apply(dropout=dropout, fallback=fallback, report=report)

    def adapted(
        variables: PyTree,
        adapters: Mapping[str, Adapter],
        *args: PyTree,
        dropout_key: Key[Array, ""] | None = None,
        **kwargs: PyTree,
    ) -> Any:
        signature = _signature(module, kwargs.get("method"))
        refuse_shared_keywords(signature, args, {"dropout_key": dropout_key}, "linen.lora_apply")
        return run(variables, adapters, *args, dropout_key=dropout_key, **kwargs)

    return adapted


def lora_merge(
    variables: PyTree, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None = None
) -> PyTree:
    """Adds every adapter's update to its parameter, as `fb.lora.merge`.

    Returns:
        The variables, with parameters inside the same boxes; arrays without an adapter are shared.
    """
    return _split(variables).lora_merge(adapters, scheme=scheme)


def _signature(module: LinenModule, method: Callable[..., Any] | str | None) -> inspect.Signature | None:
    """The signature of the method that `module.apply` calls, without `self`."""
    if method is None or isinstance(method, str):
        return signature_of(getattr(module, method or "__call__"))
    if inspect.ismethod(method):
        return signature_of(method)
    return signature_of(functools.partial(method, module))


def _split(variables: PyTree) -> SplitModel:
    """The unboxed parameters and the other collections."""
    meta, frozen = flax("core.meta"), flax("core").FrozenDict
    collections = frozen if isinstance(variables, frozen) else dict

    def is_leaf(x: object) -> bool:
        return is_qarray(x) or isinstance(x, meta.AxisMetadata)

    leaves, treedef = jax.tree.flatten(variables.get("params", {}), is_leaf=is_leaf)

    def boxed(params: PyTree, others: dict[str, PyTree]) -> Mapping[str, PyTree]:
        values = treedef.flatten_up_to(params)
        params = treedef.unflatten(
            x.replace_boxed(value) if isinstance(x, meta.AxisMetadata) else value
            for x, value in zip(leaves, values, strict=True)
        )
        return collections({**others, "params": params})

    others = {name: collection for name, collection in variables.items() if name != "params"}
    return SplitModel(treedef.unflatten(_unboxed(x, meta) for x in leaves), others, boxed)


def _unboxed(x: PyTree, meta: types.ModuleType) -> PyTree:
    """The content of a box."""
    if isinstance(x, meta.Partitioned):
        return x.value  # `unbox` would constrain the sharding, which a QArray outside `transparent` does not support
    if isinstance(x, meta.AxisMetadata):
        return x.unbox()
    return x
